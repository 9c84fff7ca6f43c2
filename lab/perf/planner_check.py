"""The planner against the simulator: its plans for random mixes of devices and links, beside an even and a
memory-proportional split.

Every mix is drawn from its number: boards, how many, each one's network, model, precision, drafter. The plan
chooses among all devices; the two splits use them all in the order drawn, but leave out the head's where the
plan keeps it for the head. They guess or not as is foretold to be best for them. Rates are tokens by time of
the same balanced answers, which no plan was chosen by. A split that is clearly slower is given one answer.

`--exhaustive N` plans N small mixes instead, and rates all that could be chosen by the planner's own formula:
all orders of all subsets, all places of the head, all splits that fit, with and without guesses, in all
allowed precisions. This says of the search that it misses nothing, and of the formula nothing.

    python -m lab.perf.planner_check [--mixes 200] [--within 0.05] [--answers 4]
    python -m lab.perf.planner_check --exhaustive 60
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations, permutations
from statistics import mean, stdev
from typing import Any

import numpy as np
import numpy.typing as npt

from flowspec.bench.cases import PROMPT_TOKENS, synthetic_cases
from flowspec.bench.console import progress
from flowspec.bench.drafters import DrafterForEach, Synthetic
from flowspec.bench.experiment import AR, OURS, SYNTHETIC, Setup, Testbed
from flowspec.bench.simulated import Drafters, run_many
from flowspec.core.protocol.messages import Sampling
from flowspec.errors import FlowSpecError
from flowspec.plan.memory import weights_of
from flowspec.plan.partition import Arrangement, Partition
from flowspec.plan.placement import even_split, weighted_split
from flowspec.plan.planner import DoesNotFit, Plan, make_plan, rate_split
from flowspec.plan.profile import find_profile, profile_names
from flowspec.plan.shape import eagle_shape, find_shape
from flowspec.plan.sites import Network, PlannedDrafter, PlanRequest, Site, site
from flowspec.plan.timing import LinkSpec
from lab.command import Parser, run_command, show

Floats = npt.NDArray[np.float64]

SHAPES = (
    "tinyllama-1.1b",
    "llama-3.2-1b",
    "qwen3-4b",
    "llama-2-7b",
    "llama-3-8b",
    "qwen3-8b",
    "llama-2-13b",
    "llama-3-70b",
)
PRECISIONS = ("float16", "int8", "int4")
NETWORKS = (
    LinkSpec(bandwidth_mbps=1000, delay_s=0.0005),
    LinkSpec(bandwidth_mbps=100, delay_s=0.001),
    LinkSpec(bandwidth_mbps=40, delay_s=0.004),
)
"""Gigabit and 100 Mbit/s Ethernet, and a Wi-Fi; a pair of devices has the slower of both."""
COUNTS = (2, 3, 3, 4, 4, 5, 6, 8)
ACCEPTANCES = (0.5, 0.6, 0.635, 0.7, 0.8)
TYPICAL_CONTEXT = 112
"""Tokens in the middle of the synthetic answers."""
ANSWERS_FIRST = 100_000
"""The first case of mix 0; nothing else is made of these cases."""
WITHIN = 0.10
CLEARLY_SLOWER = 1.3
"""How many times as fast as a split a plan must be in the first answer for that to be enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A mix: what was planned and foretold, and the simulated rates. `memory_share` is of the fullest device.

    `rate_error` is the standard error of the simulation, as a share.
    """

    mix: int
    model: str
    precision: str
    users: int
    devices: list[str]
    used: int
    guesses: bool
    foretold_tokens_per_s: float
    tokens_per_s: float
    rate_error: float
    even_tokens_per_s: float
    memory_tokens_per_s: float
    even_fits: bool
    memory_fits: bool
    memory_share: float

    @property
    def error(self) -> float:
        return self.foretold_tokens_per_s / self.tokens_per_s - 1


def drawn(number: int, users: int = 1) -> PlanRequest:
    """The mix of a number, which need not hold the model."""
    chance = random.Random(number)
    kinds = chance.sample(profile_names(), chance.choice((1, 2, 2, 3, 4)))
    sites = tuple(
        site(f"{index}-{kind}", find_profile(kind))
        for index, kind in enumerate(chance.choices(kinds, k=chance.choice(COUNTS)))
    )
    networks = {each.name: chance.choice(NETWORKS) for each in sites}
    pairs = {
        frozenset((a, b)): min(networks[a], networks[b], key=lambda link: link.bandwidth_mbps)
        for a, b in combinations(networks, 2)
    }
    shape = find_shape(chance.choice(SHAPES))
    return PlanRequest(
        sites=sites,
        network=Network(default=NETWORKS[0], pairs=pairs),
        shape=shape,
        weights=weights_of(shape),
        precisions=(chance.choice(PRECISIONS),),
        drafter=PlannedDrafter(
            name="eagle", shape=find_shape(f"eagle-{shape.name}"), acceptance=chance.choice(ACCEPTANCES)
        ),
        typical_context=TYPICAL_CONTEXT,
        users=users,
    )


def planned(count: int, first: int) -> Iterator[tuple[int, PlanRequest, Plan]]:
    """So many mixes that hold their model, from number `first` on, with the plans that are foretold to be
    fastest."""
    number = first
    while count:
        request = drawn(number)
        try:
            plan = make_plan(request)
        except DoesNotFit:
            number += 1
            continue
        yield number, request, plan
        number, count = number + 1, count - 1


def checked(number: int, users: int, answers: int, tokens: int) -> Outcome | None:
    """Plans a mix, and simulates the plan and the two splits; None where the model does not fit."""
    request = drawn(number, users)
    try:
        plan = make_plan(request)
    except DoesNotFit:
        return None
    others = [
        each for each in request.sites if not (plan.is_head_free and each.name == plan.head.name)
    ] or list(request.sites)
    others = others[: request.shape.layers]
    even = rate_split(request, others, plan.head, even_split(request.shape.layers, len(others)))
    shares = [each.profile.memory_gb for each in others]
    memory = rate_split(request, others, plan.head, weighted_split(request.shape.layers, shares))
    first = ANSWERS_FIRST + 1000 * number
    own_rate, error = simulated(request, plan, answers=answers, tokens=tokens, first=first)

    def rate(split: Plan) -> float:
        once = simulated(request, split, answers=1, tokens=tokens, first=first)[0]
        if answers == 1 or own_rate > CLEARLY_SLOWER * once:
            return once
        return simulated(request, split, answers=answers, tokens=tokens, first=first)[0]

    even_rate = rate(even)
    return Outcome(
        mix=number,
        model=request.shape.name,
        precision=plan.precision,
        users=users,
        devices=[each.profile.name for each in request.sites],
        used=len(plan.stages),
        guesses=plan.guesses,
        foretold_tokens_per_s=plan.forecast.tokens_per_s,
        tokens_per_s=own_rate,
        rate_error=error,
        even_tokens_per_s=even_rate,
        memory_tokens_per_s=even_rate if memory == even else rate(memory),
        even_fits=fits(even),
        memory_fits=fits(memory),
        memory_share=max(_shares(plan)),
    )


def _shares(plan: Plan) -> list[float]:
    places: list[tuple[Site, int]] = [(stage.site, stage.total_bytes) for stage in plan.stages]
    return [used / place.memory_bytes for place, used in [*places, (plan.head, plan.head_bytes)]]


def fits(plan: Plan) -> bool:
    """Whether every device holds what it is given."""
    return max(_shares(plan)) <= 1


def summary(found: Sequence[Outcome]) -> dict[str, Any]:
    """Ratios to the two splits (of all, and of those that would fit), the errors of the forecast, and
    memory."""
    result: dict[str, Any] = {"mixes": len(found), "guessing": sum(each.guesses for each in found)}
    for name in ("even", "memory"):
        ratios = np.array([each.tokens_per_s / getattr(each, f"{name}_tokens_per_s") for each in found])
        can_run = np.array([getattr(each, f"{name}_fits") for each in found])
        result[name] = {
            **_ratios(ratios),
            "would_not_fit": int((~can_run).sum()),
            "of_fitting": _ratios(ratios[can_run]),
        }
    rates = np.array([each.tokens_per_s for each in found])
    result["forecast"] = _errors(np.array([each.foretold_tokens_per_s for each in found]) / rates - 1)
    noise = np.array([each.rate_error for each in found])
    result["noise"] = {"median": float(np.median(noise)), "worst": float(noise.max())}
    result["memory_share_max"] = max(each.memory_share for each in found)
    return result


def _ratios(ratios: Floats) -> dict[str, Any]:
    if not len(ratios):
        return {"median": None, "worst": None, "slower": 0}
    return {
        "median": float(np.median(ratios)),
        "worst": float(ratios.min()),
        "slower": int((ratios < 1).sum()),
    }


def _errors(errors: Floats) -> dict[str, Any]:
    return {
        "median_error": float(np.median(np.abs(errors))),
        "p90_error": float(np.percentile(np.abs(errors), 90)),
        "worst_error": float(errors[np.abs(errors).argmax()]),
        "bias": float(np.median(errors)),
        f"within_{WITHIN:.0%}": float((np.abs(errors) <= WITHIN).mean()),
    }


# ------------------------------------------------------------------------------------------ small mixes

BOARDS = ("jetson-orin-nano", "raspberry-pi-5", "old-laptop", "raspberry-pi-4")
SHAPE = "llama-2-7b"
LAYERS = 6
NEARLY = 0.98
"""A plan that has such a share of the best rate is good: of those within 1% it takes the one of fewest
devices, and among the splits of an order it chooses by the formula alone, uncorrected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A small mix: how many splits there are, the best one's rate and the plan's (0 where nothing fits)."""

    mix: int
    devices: int
    splits: int
    best_tokens_per_s: float
    tokens_per_s: float

    @property
    def is_best(self) -> bool:
        return self.tokens_per_s >= NEARLY * self.best_tokens_per_s


def small_request(number: int) -> PlanRequest:
    """Two or three devices of any kind, of which some hold few layers, with any links, and a model of six
    layers."""
    chance = random.Random(number)
    shape = replace(find_shape(SHAPE), name="six", layers=LAYERS)
    boards = chance.choices(BOARDS, k=chance.choice((2, 3)))
    sites = tuple(
        site(f"{at}-{board}", find_profile(board), int(chance.uniform(2, 9) * 1e9))
        for at, board in enumerate(boards)
    )
    links = {
        frozenset(pair): LinkSpec(
            bandwidth_mbps=chance.choice((20, 100, 1000)), delay_s=chance.choice((0.0005, 0.02))
        )
        for pair in combinations([each.name for each in sites], 2)
    }
    return PlanRequest(
        sites=sites,
        network=Network(default=LinkSpec(bandwidth_mbps=1000, delay_s=0.0005), pairs=links),
        shape=shape,
        weights=weights_of(shape),
        precisions=("float16",),
        drafter=PlannedDrafter(
            name="eagle", shape=eagle_shape(shape), acceptance=chance.choice((0.3, 0.635, 0.8))
        ),
        users=chance.choice((1, 1, 3)),
    )


def all_rates(request: PlanRequest) -> Iterator[float]:
    """The rate of everything that could be chosen."""
    partition = Partition(request)
    for count in range(1, min(len(request.sites), request.shape.layers) + 1):
        for order in permutations(request.sites, count):
            for head in request.heads:
                for precision in request.precisions:
                    for guesses in (False, request.drafter is not None):
                        yield from _splits(
                            partition,
                            Arrangement(order=order, head=head, precision=precision, guesses=guesses),
                        )


def _splits(partition: Partition, arrangement: Arrangement) -> Iterator[float]:
    if not partition.head_fits(arrangement):
        return
    room = partition.room(arrangement)
    for layers in compositions(partition.request.shape.layers, len(room)):
        if all(some <= most for some, most in zip(layers, room, strict=True)):
            yield partition.rated(arrangement, layers).forecast.tokens_per_s


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to share `total` out to so many places, at least one to each."""
    for bars in combinations(range(1, total), parts - 1):
        yield tuple(end - start for start, end in zip((0, *bars), (*bars, total), strict=True))


def compare(number: int) -> Compared:
    """Plans a small mix, and tries all."""
    request = small_request(number)
    rates = list(all_rates(request))
    try:
        planned = make_plan(request).forecast.tokens_per_s
    except DoesNotFit:
        planned = 0.0
    return Compared(
        mix=number,
        devices=len(request.sites),
        splits=len(rates),
        best_tokens_per_s=max(rates, default=0.0),
        tokens_per_s=planned,
    )


# ------------------------------------------------------------------------------------------ the command


def command(args: argparse.Namespace) -> int:
    if args.exhaustive:
        return _exhaustive(args)
    found: list[Outcome] = []
    refused, number = 0, args.first
    with progress("planning", args.mixes) as step:
        while len(found) < args.mixes:
            outcome = checked(number, args.users, args.answers, args.tokens)
            refused += outcome is None
            if outcome is not None:
                found.append(outcome)
                step(f"mix {number}")
            number += 1
    result = {**summary(found), "do_not_fit": refused}
    far = [each.mix for each in found if args.within is not None and abs(each.error) > args.within]
    if args.json:
        print(json.dumps({**result, "far": far, "outcomes": [asdict(each) for each in found]}))
    else:
        _show(result)
        if far:
            print(f"\n{len(far)} of {len(found)} differ by more than {args.within:.0%}: {far}")
    return 1 if far else 0


def _show(result: dict[str, Any]) -> None:
    rows = []
    for name in ("even", "memory"):
        whole_, fitting = result[name], result[name]["of_fitting"]
        keys = ("median", "worst", "slower")
        rows.append(
            [
                f"plan / {name} split",
                *(whole_[key] for key in keys),
                whole_["would_not_fit"],
                *(fitting[key] for key in keys),
            ]
        )
    show(
        f"SIMULATED: plans for {result['mixes']} mixes beside two splits of the same devices",
        ["", "median", "worst", "slower", "would not fit", "median of fitting", "worst", "slower"],
        rows,
    )
    errors = list(result["forecast"])
    show(
        "what was foretold against the simulation",
        [key.replace("_", " ") for key in errors],
        [[f"{100 * result['forecast'][key]:.1f}%" for key in errors]],
    )
    print(
        f"\nstandard error of the simulation: {result['noise']['median']:.1%} in the median, at "
        f"most {result['noise']['worst']:.1%}"
        f"\nfullest device: {result['memory_share_max']:.2%} of what may be used; guessing pays in "
        f"{result['guessing']} mixes; "
        f"{result['do_not_fit']} more do not hold their model"
    )


def _exhaustive(args: argparse.Namespace) -> int:
    with progress("comparing", args.exhaustive) as step:
        found = []
        for number in range(args.first, args.first + args.exhaustive):
            found.append(compare(number))
            step(f"mix {number}")
    result = {
        "mixes": len(found),
        "best_of_all": sum(each.is_best for each in found),
        "refused_rightly": sum(each.splits == 0 and each.is_best for each in found),
        "splits": sum(each.splits for each in found),
    }
    if args.json:
        print(json.dumps({**result, "outcomes": [asdict(each) for each in found]}))
    else:
        print(
            f"{result['best_of_all']} of {result['mixes']} small mixes: the plan is the best of all splits "
            "of all orders with all places of the "
            f"head ({result['splits']} tried; {result['refused_rightly']} mixes hold no split, and were "
            "refused)"
        )
    return 0 if result["best_of_all"] == result["mixes"] else 1


WARM_UP_TOKENS = 16
PLAIN_TOKENS = 24
"""Of an answer without guesses, whose tokens all take the same time; times the users, who begin one after
another."""


def testbed_of(request: PlanRequest, plan: Plan) -> Testbed:
    """The plan's devices; those that share their cores are slowed as the planner supposes."""
    partition = Partition(request)
    *devices, head = (
        place.profile.slowed(partition.slowdown(plan, place)) for place in (*plan.order, plan.head)
    )
    return Testbed(
        name=request.shape.name,
        devices=tuple(devices),
        head=head,
        link=request.network.default,
        shape=request.shape,
        drafter_shape=None if request.drafter is None else request.drafter.shape,
        precision=plan.precision,
        split=plan.layers,
        hops=tuple(partition.hops(plan)),
    )


def simulated(
    request: PlanRequest, plan: Plan, *, answers: int, tokens: int, first: int
) -> tuple[float, float]:
    """Tokens per second of so many balanced answers on a plan, from case `first` on, by its method, each
    from the first token on, and of several users while all have begun and none is done; and the standard
    error as a share of that, 0 for a single answer.

    Like a session that has answered before: each answer begins with the costs that the one before it learnt.
    Prompts are as long as to have the request's typical context in the middle of an answer.
    """
    prompt, users = max(PROMPT_TOKENS, request.typical_context - tokens // 2), request.users
    testbed, guessing = testbed_of(request, plan), request.drafter if plan.guesses else None
    setup = Setup(name="planned", method=OURS if guessing else AR)
    counts = {-1: WARM_UP_TOKENS} | dict.fromkeys(range(answers), tokens)
    experience = None
    made, spent_s = [], []
    for number, count in counts.items() if guessing else [(0, min(tokens, PLAIN_TOKENS * users))]:
        cases = synthetic_cases(users, [Sampling()], count, first + (1 + number) * users, prompt)
        drafters: Drafters = {}
        if guessing:
            context, acceptance = prompt + count, guessing.acceptance
            each = [Synthetic(case, context, acceptance, balanced=True).drafter() for case in cases]
            drafters = {SYNTHETIC: DrafterForEach(each)}
        world = run_many(testbed, setup, cases, drafters, prompt + count, experience)
        experience = world.head.experience()
        given = [world.answers[user][0] for user in range(users)]
        for case, answer in zip(cases, given, strict=True):
            if answer.end is None or not case.is_answered_by(tuple(answer.tokens), answer.end.reason):
                raise FlowSpecError(
                    f"{request.shape.name} on {len(plan.stages)} devices: the answer is not the plain one"
                )
        if number >= 0:
            first_s = max(answer.times_s[0] for answer in given)
            last_s = min(answer.times_s[-1] for answer in given)
            made.append(sum(first_s <= at_s <= last_s for answer in given for at_s in answer.times_s) - 1)
            spent_s.append(last_s - first_s)
    token_s = [seconds / tokens for seconds, tokens in zip(spent_s, made, strict=True)]
    error = stdev(token_s) / mean(token_s) / math.sqrt(len(token_s)) if len(token_s) > 1 else 0.0
    return sum(made) / sum(spent_s), error


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("lab.perf.planner_check", __doc__)
    parser.whole("--mixes", 200)
    parser.add_argument("--first", type=int, default=0, help="number of the first mix (default: %(default)s)")
    parser.whole("--users", 1, "who ask at once")
    parser.whole("--answers", 4, "simulated for each plan")
    parser.whole("--tokens", 96, "of each answer")
    parser.add_argument(
        "--within",
        type=float,
        metavar="SHARE",
        help="exit status 1 where a forecast and its simulation differ by more",
    )
    parser.whole("--exhaustive", None, "compare so many small mixes with all that could be chosen")
    return run_command(parser, command, argv)


if __name__ == "__main__":
    sys.exit(main())
