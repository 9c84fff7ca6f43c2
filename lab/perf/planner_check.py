"""The planner against the simulator: its plans for random mixes of devices and links, beside an even and a
memory-proportional split.

Every mix is drawn from its number: boards, how many, each one's network, model, precision, drafter. The plan
chooses among all devices; the two splits use them all in the order drawn, but leave out the head's where the
plan keeps it for the head. They guess or not as is foretold to be best for them. Rates are tokens by time of
the same balanced answers (`bench.synthetic`), which no plan was chosen or foretold by. A split that is
clearly slower is given one answer only. `--exhaustive N` compares plans of N small mixes with all that could
be chosen (`lab.perf.exhaustive`) instead.

    python -m lab.perf.planner_check [--mixes 200] [--within 0.05] [--answers 4] [--out FILE.jsonl]
    python -m lab.perf.planner_check --exhaustive 60
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flowspec.bench.console import progress, show
from flowspec.bench.planned import simulated
from flowspec.errors import InputError
from flowspec.plan.memory import weights_of
from flowspec.plan.planner import DoesNotFit, Plan, make_plan, rate_split
from flowspec.plan.profile import find_profile, profile_names
from flowspec.plan.shape import find_shape
from flowspec.plan.sites import Network, PlannedDrafter, PlanRequest, Site, site
from flowspec.plan.split import even_split, weighted_split
from flowspec.plan.timing import LinkSpec
from lab.command import Parser, run_command
from lab.perf.exhaustive import compare

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
    found = simulated(request, plan, answers=answers, tokens=tokens, first=first)

    def rate(split: Plan) -> float:
        once = simulated(request, split, answers=1, tokens=tokens, first=first).tokens_per_s
        if answers == 1 or found.tokens_per_s > CLEARLY_SLOWER * once:
            return once
        return simulated(request, split, answers=answers, tokens=tokens, first=first).tokens_per_s

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
        tokens_per_s=found.tokens_per_s,
        rate_error=found.error,
        even_tokens_per_s=even_rate,
        memory_tokens_per_s=even_rate if memory.split == even.split else rate(memory),
        even_fits=fits(even),
        memory_fits=fits(memory),
        memory_share=max(_shares(plan)),
    )


class Findings:
    """Outcomes by mix (None: the model does not fit), kept in a file of one JSON object for each if there is
    one, so that a run can go on."""

    def __init__(self, path: Path | None, settings: dict[str, int]) -> None:
        self._path = path
        self._settings = settings
        self.known: dict[int, Outcome | None] = {}
        if path is None or not path.exists():
            return
        names = {field.name for field in fields(Outcome)}
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            entry = json.loads(line)
            if any(entry.get(name) != value for name, value in settings.items()):
                raise InputError(f"{path}:{number}: expected a run with {settings}; give another --out")
            fitting = {name: value for name, value in entry.items() if name in names}
            self.known[entry["mix"]] = Outcome(**fitting) if len(fitting) == len(names) else None

    def add(self, number: int, found: Outcome | None) -> None:
        self.known[number] = found
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                print(
                    json.dumps({"mix": number, **self._settings, **({} if found is None else asdict(found))}),
                    file=file,
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


def command(args: argparse.Namespace) -> int:
    if args.exhaustive:
        return _exhaustive(args)
    findings = Findings(args.out, {"users": args.users, "answers": args.answers, "tokens": args.tokens})
    found: list[Outcome] = []
    refused, number = 0, args.first
    with progress("planning", args.mixes) as step:
        while len(found) < args.mixes:
            if number not in findings.known:
                findings.add(number, checked(number, args.users, args.answers, args.tokens))
            outcome = findings.known[number]
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


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("lab.perf.planner_check", __doc__)
    parser.whole("--mixes", 200)
    parser.add_argument("--first", type=int, default=0, help="number of the first mix (default: %(default)s)")
    parser.whole("--users", 1, "who ask at once")
    parser.whole("--answers", 4, "simulated for each plan")
    parser.whole("--tokens", 96, "of each answer")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.jsonl",
        help="outcomes are kept there, and a run goes on with what it holds",
    )
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
