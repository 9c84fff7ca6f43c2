"""Makes cases by which the formula of `plan.forecast` is corrected: of mixes that `lab.perf.planner_check`
does not report.

A mix's number says of which kind its pipeline is: as it is planned; planned, and then with layers moved about
by chance, so that pipelines with an obvious bottleneck are known, too; of one of its devices, of two, or of
more, drawn by chance, since plans are mostly of few. The last three have their drafter beside a stage or
apart, and need not hold the model. Errors are shown of every third of a kind, corrected by the others; all
are written to `plan.forecast.CASES`.

    python -m lab.perf.planner_fit [--mixes 240] [--first 20000] [--out FILE.jsonl] [--json]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from flowspec.bench.console import progress
from flowspec.cli.options import reals
from flowspec.errors import InputError
from flowspec.plan.forecast import (
    CASES,
    F64,
    MANY_ROWS,
    NODES,
    Correction,
    Rated,
    plain_rates,
    seconds_per_token,
)
from flowspec.plan.partition import Arrangement, Partition
from flowspec.plan.placement import weighted_split
from flowspec.plan.planner import DoesNotFit, Plan, describe, make_plan
from flowspec.plan.sites import PlanRequest, Site
from lab.command import Parser, chosen, run_command, show
from lab.perf.planner_check import ANSWERS_FIRST, drawn, simulated

KINDS = ("planned", "moved", "one device", "two devices", "several devices")
HELD_OUT = 3
"""Every so manieth sample of a kind is not fitted to."""
ANSWERS, TOKENS = 2, 96
MODELLESS = 0.45
"""Drafters that are right less often than that are n-grams, which need no model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A simulated rate, and what the forecast would start from: slots and trips for each of `NODES`."""

    mix: int
    kind: str
    stages: int
    acceptance: float
    pass_s: float
    slot_s: tuple[float, ...]
    trip_s: tuple[float, ...]
    plain_tokens_per_s: float
    tokens_per_s: float

    @property
    def held_out(self) -> bool:
        return self.mix // len(KINDS) % HELD_OUT == 0


def arranged(request: PlanRequest, number: int) -> tuple[Arrangement, tuple[int, ...]] | None:
    """A mix's devices and layers; None where it has too few devices for its kind, where the model does not
    fit those of a plan, or where no plan guesses."""
    chance = random.Random(number)
    kind = number % len(KINDS)
    if kind < 2:
        try:
            plan = make_plan(request, guesses=True)
        except DoesNotFit:
            return None
        weights = [count * chance.uniform(0.5, 1.5) for count in plan.layers]
        moved = tuple(weighted_split(request.shape.layers, weights))
        return plan, plan.layers if kind == 0 else moved
    several = range(3, min(len(request.sites), request.shape.layers) + 1)
    if kind == 4 and not several:
        return None
    order = tuple(chance.sample(request.sites, chance.choice(several) if kind == 4 else kind - 1))
    spare: list[Site] = [each for each in request.sites if each not in order]
    arrangement = Arrangement(
        order=order,
        head=chance.choice(spare if spare and chance.random() < 0.5 else order),
        precision=request.precisions[0],
        guesses=True,
    )
    weights = [each.profile.bytes_per_s() * chance.uniform(0.7, 1.4) for each in order]
    return arrangement, tuple(weighted_split(request.shape.layers, weights))


def sampled(number: int, acceptances: Sequence[float] = ()) -> Sample | None:
    """A mix, with its own drafter or one that is right as often as one of these; None where it is none."""
    request = drawn(number)
    if acceptances:
        drafter, acceptance = request.drafter, random.Random(number).choice(acceptances)
        assert drafter is not None, "mixes have drafters"
        shape = None if acceptance < MODELLESS else drafter.shape
        request = replace(request, drafter=replace(drafter, shape=shape, acceptance=acceptance))
    found = arranged(request, number)
    if found is None:
        return None
    arrangement, layers = found
    partition = Partition(request)
    plan: Plan = describe(partition, partition.rated(arrangement, layers), None)
    slot_s, trip_s = _slots_s(partition, arrangement, layers)
    plain_s = _slots_s(partition, replace(arrangement, guesses=False), layers)
    rate, _ = simulated(request, plan, answers=ANSWERS, tokens=TOKENS, first=ANSWERS_FIRST + 100 * number)
    return Sample(
        mix=number,
        kind=KINDS[number % len(KINDS)],
        stages=len(layers),
        acceptance=0.0 if request.drafter is None else request.drafter.acceptance,
        pass_s=partition.pass_s(arrangement),
        slot_s=tuple(slot_s.tolist()),
        trip_s=tuple(trip_s.tolist()),
        plain_tokens_per_s=float(plain_rates(*plain_s, np.ones(1), 1)[0]),
        tokens_per_s=rate,
    )


def _slots_s(partition: Partition, arrangement: Arrangement, layers: Sequence[int]) -> tuple[F64, F64]:
    times = partition.times(arrangement)
    counts = np.broadcast_to(np.array(layers), (len(times.nodes), 1, len(layers)))
    slots_s, trips_s = times.slots_s(counts)
    return slots_s[:, 0], trips_s[:, 0]


def column(samples: Sequence[Sample], name: str) -> F64:
    return np.array([getattr(each, name) for each in samples])


def predict(samples: Sequence[Sample]) -> tuple[F64, F64, F64]:
    """What `seconds_per_token` says of each sample and each of `NODES`."""
    acceptance, pass_s = (column(samples, name)[:, None, None] for name in ("acceptance", "pass_s"))
    slot_s, trip_s = column(samples, "slot_s"), column(samples, "trip_s")
    return seconds_per_token(slot_s, trip_s, np.array(NODES, dtype=np.float64), acceptance, pass_s)


def rated(samples: Sequence[Sample]) -> Rated:
    """What the formula says of them."""
    slot_s, trip_s = column(samples, "slot_s"), column(samples, "trip_s")
    token_s, levels, missed = predict(samples)
    rows, best = np.arange(len(samples)), token_s.argmin(axis=1)
    return Rated(
        rates=1 / token_s[rows, best],
        levels=levels[rows, best],
        missed=missed[rows, best],
        nodes=np.array(NODES, dtype=np.float64)[best],
        slot_s=slot_s[rows, best],
        trip_s=trip_s[rows, best],
        slot_of_one_s=slot_s[:, 0],
        slot_of_many_s=slot_s[:, NODES.index(MANY_ROWS)],
        plain=column(samples, "plain_tokens_per_s"),
        acceptance=column(samples, "acceptance"),
        pass_s=column(samples, "pass_s"),
    )


def lacked(samples: Sequence[Sample]) -> F64:
    """By what the formula's logarithm is too small; a head does without guesses where they do not pay."""
    rates = [max(each.tokens_per_s, each.plain_tokens_per_s) for each in samples]
    return np.log(np.array(rates) / rated(samples).best_rates)


def gathered(
    count: int,
    first: int,
    path: Path | None,
    acceptances: Sequence[float] = (),
    kinds: Sequence[str] = KINDS,
) -> list[Sample]:
    """The samples of so many mixes as far as they are of these kinds, and all others that the file holds.
    Those that it holds are not made again, the others are added to it."""
    known: dict[int, Sample | None] = {}
    if path is not None and path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            known[entry["mix"]] = (
                Sample(**{**entry, "slot_s": tuple(entry["slot_s"]), "trip_s": tuple(entry["trip_s"])})
                if "kind" in entry
                else None
            )
    with progress("simulating", count) as step:
        for number in range(first, first + count):
            if number not in known and KINDS[number % len(KINDS)] in kinds:
                known[number] = found = sampled(number, acceptances)
                if path is not None:
                    with path.open("a", encoding="utf-8") as file:
                        print(json.dumps({"mix": number} if found is None else asdict(found)), file=file)
            step(f"mix {number}")
    return [each for each in known.values() if each is not None]


def command(args: argparse.Namespace) -> int:
    samples = gathered(args.mixes, args.first, args.out, args.acceptances, args.kinds)
    others, held_out = ([each for each in samples if each.held_out == is_out] for is_out in (False, True))
    if not others or not held_out:
        raise InputError(f"--mixes: expected some to correct by and some to hold out, got {args.mixes}")
    raw = lacked(held_out)
    correction = Correction.of(rated(others).features, lacked(others))
    left = raw - np.log(correction.factors(rated(held_out).features))
    rows = []
    for name, off in (("by formula", raw), ("corrected", left)):
        size = np.abs(np.expm1(-off))
        shares = [float(each) for each in (np.median(size), np.percentile(size, 90), size.max())]
        rows.append([name, len(off), *shares, float((size <= 0.05).mean())])
    names = ("odds", "trip", "rows", "pass", "nodes", "levels", "missed", "slot", "gain", "lacked")
    table = np.column_stack([rated(samples).features, lacked(samples)])
    np.savetxt(CASES, table, fmt="%.4f", delimiter=",", header=",".join(names), comments="")
    columns = ["", "samples", "median", "90th", "worst", "within 5%"]
    if args.json:
        print(json.dumps([dict(zip(columns, row, strict=True)) for row in rows]))
    else:
        show("errors of held out samples", columns, rows)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("lab.perf.planner_fit", __doc__)
    parser.whole("--mixes", 240)
    parser.add_argument(
        "--first", type=int, default=20000, help="number of the first mix (default: %(default)s)"
    )
    parser.add_argument(
        "--acceptances",
        type=reals,
        default=(),
        metavar="SHARES",
        help="drafters of these mixes are right so often, by chance; else as planner_check draws them",
    )
    parser.add_argument(
        "--kinds",
        type=chosen(KINDS),
        default=KINDS,
        metavar="NAMES",
        help=f"of these mixes only those are taken: some of {', '.join(KINDS)} (default: all)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.jsonl",
        help="samples are kept there, and all that it holds are used",
    )
    return run_command(parser, command, argv)


if __name__ == "__main__":
    sys.exit(main())
