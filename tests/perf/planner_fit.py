"""Fits the constants of `plan.forecast` to simulated answers, on mixes that `tests.perf.planner_check` does
not report.

Of each mix the plan is simulated, or (every second one) the same devices with layers moved about by chance,
so that pipelines with an obvious bottleneck are known, too. The mean error is made small by a simplex search
(Nelder and Mead, 1965) over the constants' logarithms, from the present ones.

    python -m tests.perf.planner_fit [--mixes 150] [--first 20000] [--json]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np

from flowspec.bench.console import progress, show
from flowspec.bench.planned import simulated
from flowspec.cli.options import positive
from flowspec.plan.forecast import F64, FITTED, Constants, Guessing, seconds_per_token
from flowspec.plan.partition import Partition
from flowspec.plan.planner import Plan, rate_split
from flowspec.plan.sites import PlanRequest
from flowspec.plan.split import weighted_split
from tests.command import Parser, run_command
from tests.perf.planner_check import ANSWERS_FIRST, planned

ANSWERS, TOKENS = 3, 96
POWER, ERROR_MAX = 1.5, 0.4
"""Errors count to this power, and up to a size: a few odd ones shall not bend the rest."""
HELD = 0.003
"""What a constant's squared distance from where it was costs, in logarithms."""
ROUNDS, STEPS = 4, 400
NAMES = tuple(field.name for field in fields(Constants))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A simulated rate, and what the forecast would start from: slots and trips `[nodes]`."""

    slot_s: F64
    trip_s: F64
    nodes: F64
    guessing: Guessing
    tokens_per_s: float


def sampled(wish: PlanRequest, plan: Plan, number: int) -> Sample | None:
    """None where guessing does not pay: plain decoding needs no constants."""
    if number % 2:
        chance = random.Random(number)
        weights = [layers * chance.uniform(0.5, 1.5) for layers in plan.split.layers]
        order = [stage.site for stage in plan.stages]
        plan = rate_split(wish, order, plan.head, weighted_split(wish.shape.layers, weights))
    if not plan.guesses:
        return None
    partition, arrangement = Partition(wish), plan.split.arrangement
    times = partition.times(arrangement)
    slot_s, trip_s = times.slots_s(
        np.broadcast_to(np.array(plan.split.layers), (len(times.nodes), len(plan.split.layers)))
    )
    return Sample(
        slot_s=slot_s,
        trip_s=trip_s,
        nodes=times.nodes,
        guessing=partition.guessing(arrangement),
        tokens_per_s=simulated(
            wish, plan, answers=ANSWERS, tokens=TOKENS, first=ANSWERS_FIRST + 100 * number
        ).tokens_per_s,
    )


def errors(samples: Sequence[Sample], known: Constants) -> F64:
    """Logarithms of foretold by simulated rates."""
    drafters = Guessing(
        acceptance=np.array([each.guessing.acceptance for each in samples])[:, None, None],
        pass_s=np.array([each.guessing.pass_s for each in samples])[:, None, None],
    )
    slot_s, trip_s, nodes = (
        np.stack([getattr(each, name) for each in samples]) for name in ("slot_s", "trip_s", "nodes")
    )
    found = seconds_per_token(slot_s, trip_s, nodes, drafters, known=known)[0].min(axis=1)
    return np.asarray(-np.log(found * np.array([each.tokens_per_s for each in samples])))


def fit(samples: Sequence[Sample], start: Constants) -> Constants:
    """The constants near `start` whose errors are least."""

    def constants(moved: F64) -> Constants:
        return Constants(
            **{name: getattr(start, name) * float(np.exp(by)) for name, by in zip(NAMES, moved, strict=True)}
        )

    def loss(moved: F64) -> float:
        off = np.minimum(np.abs(errors(samples, constants(moved))), ERROR_MAX)
        return float((off**POWER).mean() + HELD * (moved**2).mean())

    best = np.zeros(len(NAMES))
    for _ in range(ROUNDS):
        best = _simplex(loss, best)
    return constants(best)


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


def command(args: argparse.Namespace) -> int:
    samples = []
    with progress("simulating", args.mixes) as step:
        for number, wish, plan in planned(args.mixes, args.first):
            sample = sampled(wish, plan, number)
            samples += [sample] if sample is not None else []
            step(f"mix {number}")
    found = fit(samples, FITTED)
    if args.json:
        print(json.dumps({"samples": len(samples), **asdict(found)}))
        return 0
    show(
        f"constants fitted to {len(samples)} simulations",
        ["", "was", "is"],
        [[name, f"{getattr(FITTED, name):.4f}", f"{getattr(found, name):.4f}"] for name in NAMES],
    )
    off = np.abs(np.expm1(errors(samples, found)))
    print(f"median error {np.median(off):.1%}, within 10%: {(off <= 0.1).mean():.0%} (of what was fitted)")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("tests.perf.planner_fit", __doc__)
    parser.add_argument("--mixes", type=positive, default=150, help="default: %(default)s")
    parser.add_argument(
        "--first", type=int, default=20000, help="number of the first mix (default: %(default)s)"
    )
    return run_command(parser, command, argv)


if __name__ == "__main__":
    sys.exit(main())
