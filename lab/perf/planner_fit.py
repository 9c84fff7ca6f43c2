"""Fits the constants of `plan.forecast` to simulated answers, on mixes that `lab.perf.planner_check` does
not report.

A mix's number says of which kind its pipeline is: as it is planned; planned, and then with layers moved about
by chance, so that pipelines with an obvious bottleneck are known, too; of one of its devices, of two, or of
more, drawn by chance, since plans are mostly of few. The last three have their drafter beside a stage or
apart, and need not hold the model. Of each kind every third is held out: the others are fitted to, and errors
are told of both. The mean error is made small by a simplex search (Nelder and Mead, 1965) over the constants'
logarithms, from the present ones and from some about these. Where guessing hardly pays in simulation a sample
counts for nothing, since such answers are decoded plainly for the most part.

    python -m lab.perf.planner_fit [--mixes 240] [--first 20000] [--out FILE.jsonl] [--json]

With `--cases` the constants stay, and the samples become the cases by which the formula is corrected: errors
are told of those that are held out, corrected by the others, and all are written to `plan.forecast.CASES`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np

from flowspec.bench.console import progress, show
from flowspec.bench.planned import simulated
from flowspec.cli.options import reals
from flowspec.errors import InputError
from flowspec.plan.forecast import (
    CASES,
    F64,
    FITTED,
    MANY_ROWS,
    NODES,
    Constants,
    Correction,
    Guessing,
    Rated,
    plain_rates,
    seconds_per_token,
)
from flowspec.plan.partition import Arrangement, Partition
from flowspec.plan.planner import DoesNotFit, Plan, described, make_plan
from flowspec.plan.sites import PlanRequest, Site
from flowspec.plan.split import weighted_split
from lab.command import Parser, chosen, run_command
from lab.perf.planner_check import ANSWERS_FIRST, drawn

KINDS = ("planned", "moved", "one device", "two devices", "several devices")
HELD_OUT = 3
"""Every so manieth sample of a kind is not fitted to."""
ANSWERS, TOKENS = 2, 96
PAYS = 0.97
"""How many times plain decoding a rate must be. One that is slower has a drafter in its stage's way."""
MODELLESS = 0.45
"""Drafters that are right less often than that are n-grams, which need no model."""
POWER, ERROR_MAX = 1.5, 0.4
"""Errors count to this power, and up to a size: a few odd ones shall not bend the rest."""
HELD = 0.003
"""What a constant's squared distance from where it was costs, in logarithms."""
BEGINNINGS, SPREAD, SEED = 4, 0.5, 7
"""The search begins where the constants are, and at some places about it by chance: from one it may end in
a hollow beside a deeper one."""
ROUNDS, STEPS = 4, 400
NAMES = tuple(field.name for field in fields(Constants))
FREE, DEAR = 1.3, 3.0
"""How many times one row's slot the slot of `ROWS` takes: up to the first these cost nothing, from the second
on each is paid for."""
ROWS = 16


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
    def pays(self) -> bool:
        return self.tokens_per_s >= PAYS * self.plain_tokens_per_s

    @property
    def held_out(self) -> bool:
        return self.mix // len(KINDS) % HELD_OUT == 0

    @property
    def rows(self) -> str:
        """What further rows cost on its slowest stage or link."""
        times = self.slot_s[NODES.index(ROWS)] / self.slot_s[0]
        return "free" if times <= FREE else "dear" if times >= DEAR else "between"


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
        arrangement, layers = plan.split.arrangement, plan.split.layers
        weights = [count * chance.uniform(0.5, 1.5) for count in layers]
        return arrangement, layers if kind == 0 else tuple(weighted_split(request.shape.layers, weights))
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
    plan: Plan = described(partition, partition.rated(arrangement, layers), None)
    guessing = partition.guessing(arrangement)
    slot_s, trip_s = _slots_s(partition, arrangement, layers)
    plain_s = _slots_s(partition, replace(arrangement, guesses=False), layers)
    made = simulated(request, plan, answers=ANSWERS, tokens=TOKENS, first=ANSWERS_FIRST + 100 * number)
    return Sample(
        mix=number,
        kind=KINDS[number % len(KINDS)],
        stages=len(layers),
        acceptance=float(guessing.acceptance),
        pass_s=float(guessing.pass_s),
        slot_s=tuple(slot_s.tolist()),
        trip_s=tuple(trip_s.tolist()),
        plain_tokens_per_s=float(plain_rates(*plain_s, np.ones(1), 1)[0]),
        tokens_per_s=made.tokens_per_s,
    )


def _slots_s(partition: Partition, arrangement: Arrangement, layers: Sequence[int]) -> tuple[F64, F64]:
    times = partition.times(arrangement)
    counts = np.broadcast_to(np.array(layers), (len(times.nodes), 1, len(layers)))
    slots_s, trips_s = times.slots_s(counts)
    return slots_s[:, 0], trips_s[:, 0]


def column(samples: Sequence[Sample], name: str) -> F64:
    return np.array([getattr(each, name) for each in samples])


def foretold(samples: Sequence[Sample], known: Constants = FITTED) -> tuple[F64, F64, F64]:
    """What `seconds_per_token` says of each sample and each of `NODES`."""
    acceptance, pass_s = (column(samples, name)[:, None, None] for name in ("acceptance", "pass_s"))
    drafters, nodes = Guessing(acceptance=acceptance, pass_s=pass_s), np.array(NODES, dtype=np.float64)
    slot_s, trip_s = column(samples, "slot_s"), column(samples, "trip_s")
    return seconds_per_token(slot_s, trip_s, nodes, drafters, known=known)


def errors(samples: Sequence[Sample], known: Constants) -> F64:
    """Logarithms of foretold by simulated rates `[samples]`; what is foretold is plain decoding where that is
    faster."""
    found = 1 / foretold(samples, known)[0].min(axis=1)
    plain, rates = column(samples, "plain_tokens_per_s"), column(samples, "tokens_per_s")
    return np.asarray(np.log(np.maximum(found, plain) / rates))


def fit(samples: Sequence[Sample], start: Constants) -> Constants:
    """The constants near `start` whose errors are least."""

    def constants(moved: F64) -> Constants:
        return Constants(
            **{name: getattr(start, name) * float(np.exp(by)) for name, by in zip(NAMES, moved, strict=True)}
        )

    def loss(moved: F64) -> float:
        off = np.minimum(np.abs(errors(samples, constants(moved))), ERROR_MAX)
        return float((off**POWER).mean() + HELD * (moved**2).mean())

    chance = np.random.default_rng(SEED)
    found = []
    for beginning in range(BEGINNINGS):
        best = chance.normal(0, SPREAD, len(NAMES)) if beginning else np.zeros(len(NAMES))
        for _ in range(ROUNDS):
            best = _simplex(loss, best)
        found.append(best)
    return constants(min(found, key=loss))


def _simplex(loss: Callable[[F64], float], start: F64) -> F64:
    """Nelder and Mead's search with their usual coefficients."""
    points = [start, *(start + 0.15 * axis for axis in np.eye(len(start)))]
    values = [loss(point) for point in points]
    for _ in range(STEPS):
        order = np.argsort(values, kind="stable")
        points, values = [points[at] for at in order], [values[at] for at in order]
        middle = np.mean(points[:-1], axis=0)
        beyond = middle - points[-1]
        tried = middle + beyond
        value = loss(tried)
        if value < values[0]:
            further = middle + 2 * beyond
            if (further_value := loss(further)) < value:
                tried, value = further, further_value
        elif value >= values[-2]:
            tried = middle - beyond / 2
            value = loss(tried)
        if value < values[-1]:
            points[-1], values[-1] = tried, value
        else:
            points = [points[0], *(points[0] + (point - points[0]) / 2 for point in points[1:])]
            values = [values[0], *(loss(point) for point in points[1:])]
    return points[int(np.argmin(values))]


def rated(samples: Sequence[Sample]) -> Rated:
    """What the formula says of them."""
    slot_s, trip_s = column(samples, "slot_s"), column(samples, "trip_s")
    token_s, levels, missed = foretold(samples)
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


def write_cases(samples: Sequence[Sample], path: Path) -> None:
    names = ("odds", "trip", "rows", "pass", "nodes", "levels", "missed", "slot", "gain", "lacked")
    table = np.column_stack([rated(samples).features, lacked(samples)])
    np.savetxt(path, table, fmt="%.4f", delimiter=",", header=",".join(names), comments="")


def correct(samples: Sequence[Sample]) -> int:
    """Tells how far off held out samples are, as they are and corrected by the others, and writes all."""
    others, held_out = ([each for each in samples if each.held_out == is_out] for is_out in (False, True))
    found = Correction.of(rated(others).features, lacked(others))
    raw = lacked(held_out)
    left = raw - np.log(found.factors(rated(held_out).features))
    rows: list[list[str | int]] = []
    for name, off in (("by formula", raw), ("corrected", left)):
        size = np.abs(np.expm1(-off))
        shares = (np.median(size), np.percentile(size, 90), size.max())
        rows.append([name, len(off), *(f"{share:.1%}" for share in shares), f"{(size <= 0.05).mean():.0%}"])
    show("errors of held out samples", ["", "samples", "median", "90th", "worst", "within 5%"], rows)
    write_cases(samples, CASES)
    return 0


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


def report(samples: Sequence[Sample], known: Constants) -> list[list[str | int]]:
    """Rows for people: group, samples, and errors in the median, at the 90th percentile, at worst, and their
    bias."""
    groups: dict[str, list[Sample]] = {"all": list(samples)}
    for each in sorted(samples, key=lambda sample: sample.stages):
        groups.setdefault(f"{each.stages} stages" if each.stages > 1 else "1 stage", []).append(each)
    for name in ("free", "between", "dear"):
        groups[f"rows {name}"] = [each for each in samples if each.rows == name]
        groups[f"1 stage, rows {name}"] = [each for each in samples if each.rows == name and each.stages == 1]
    rows: list[list[str | int]] = []
    for name, some in groups.items():
        if some:
            off = np.expm1(errors(some, known))
            size = np.abs(off)
            shares = (np.median(size), np.percentile(size, 90), off[size.argmax()], np.median(off))
            rows.append([name, len(some), *(f"{share:+.1%}" for share in shares)])
    return rows


def command(args: argparse.Namespace) -> int:
    samples = gathered(args.mixes, args.first, args.out, args.acceptances, args.kinds)
    if args.cases:
        return correct(samples)
    samples = [each for each in samples if each.pays]
    fitted_to = [each for each in samples if not each.held_out]
    held_out = [each for each in samples if each.held_out]
    if not fitted_to or not held_out:
        raise InputError(f"--mixes: expected some to fit to and some to hold out, got {args.mixes}")
    found = fit(fitted_to, FITTED)
    if args.json:
        told = {"samples": len(samples), "held_out": len(held_out), **asdict(found)}
        print(json.dumps(told))
        return 0
    show(
        f"constants fitted to {len(fitted_to)} simulations",
        ["", "was", "is"],
        [[name, f"{getattr(FITTED, name):.4f}", f"{getattr(found, name):.4f}"] for name in NAMES],
    )
    for title, some in (("fitted to", fitted_to), ("held out", held_out)):
        for which, known in (("was", FITTED), ("is", found)):
            show(
                f"errors of what was {title}, as the formula {which}",
                ["", "samples", "median", "90th", "worst", "bias"],
                report(some, known),
            )
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
    parser.add_argument(
        "--cases", action="store_true", help="make cases of the samples, and fit no constants"
    )
    return run_command(parser, command, argv)


if __name__ == "__main__":
    sys.exit(main())
