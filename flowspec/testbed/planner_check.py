"""The planner against the simulator: its plans for random mixes of devices and links, beside an even and a memory-proportional split.

Every mix is drawn from its number: boards, how many, each one's network, model, precision, drafter. The plan chooses among all devices; the
two splits use them all in the order drawn, but leave out the head's where the plan keeps it for the head. They are given the tree
budget, and guess or not, as is foretold to be best for them. Those that would not fit are counted, and left out of the ratios. Rates are
tokens by time of the same synthetic answers. The constants of the forecast were fitted on other mixes (`testbed.planner_fit`).

    python -m flowspec.testbed.planner_check [--mixes 200] [--first 0] [--answers 3] [--tokens 96] [--json]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np

from flowspec.plan.memory import weights_of
from flowspec.plan.planner import DoesNotFit, Plan, make_plan, rate_split
from flowspec.plan.profile import find_profile, profile_names
from flowspec.plan.shape import find_shape
from flowspec.plan.sites import Drafter, Network, Site, Wish, site
from flowspec.plan.split import even_split, weighted_split
from flowspec.plan.timing import LinkSpec
from flowspec.testbed.command import Parser, progress, run_command, show, whole
from flowspec.testbed.planned import simulated_rate

SHAPES = ("tinyllama-1.1b", "llama-3.2-1b", "qwen3-4b", "llama-2-7b", "llama-3-8b", "qwen3-8b", "llama-2-13b", "llama-3-70b")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A mix: what was planned and foretold, and the simulated rates. `memory_share` is of the fullest device."""

    mix: int
    model: str
    precision: str
    devices: list[str]
    used: int
    guesses: bool
    foretold_tokens_per_s: float
    tokens_per_s: float
    even_tokens_per_s: float
    memory_tokens_per_s: float
    even_fits: bool
    memory_fits: bool
    memory_share: float

    @property
    def error(self) -> float:
        return self.foretold_tokens_per_s / self.tokens_per_s - 1


def drawn(number: int) -> Wish:
    """The mix of a number, which need not hold the model."""
    chance = random.Random(number)
    kinds = chance.sample(profile_names(), chance.choice((1, 2, 2, 3, 4)))
    sites = tuple(site(f"{index}-{kind}", find_profile(kind)) for index, kind in enumerate(chance.choices(kinds, k=chance.choice(COUNTS))))
    networks = {each.name: chance.choice(NETWORKS) for each in sites}
    pairs = {frozenset((a, b)): min(networks[a], networks[b], key=lambda link: link.bandwidth_mbps) for a, b in combinations(networks, 2)}
    shape = find_shape(chance.choice(SHAPES))
    return Wish(
        sites=sites,
        network=Network(default=NETWORKS[0], pairs=pairs),
        shape=shape,
        weights=weights_of(shape),
        precisions=(chance.choice(PRECISIONS),),
        drafter=Drafter(shape=find_shape(f"eagle-{shape.name}"), acceptance=chance.choice(ACCEPTANCES)),
        typical_context=TYPICAL_CONTEXT,
    )


def planned(count: int, first: int) -> Iterator[tuple[int, Wish, Plan]]:
    """So many mixes that hold their model, from number `first` on, with their plans."""
    number = first
    while count:
        wish = drawn(number)
        try:
            plan = make_plan(wish)
        except DoesNotFit:
            number += 1
            continue
        yield number, wish, plan
        number, count = number + 1, count - 1


def checked(number: int, wish: Wish, plan: Plan, answers: int, tokens: int) -> Outcome:
    """Simulates the plan and the two splits."""
    others = [each for each in wish.sites if not (plan.is_head_free and each.name == plan.head.name)] or list(wish.sites)
    others = others[: wish.shape.layers]
    even = rate_split(wish, others, plan.head, even_split(wish.shape.layers, len(others)))
    shares = [each.profile.memory_gb for each in others]
    memory = rate_split(wish, others, plan.head, weighted_split(wish.shape.layers, shares))
    first = ANSWERS_FIRST + 100 * number
    rates = [simulated_rate(wish, each, answers=answers, tokens=tokens, first=first) for each in (plan, even, memory)]
    return Outcome(
        mix=number,
        model=wish.shape.name,
        precision=plan.precision,
        devices=[each.profile.name for each in wish.sites],
        used=len(plan.stages),
        guesses=plan.guesses,
        foretold_tokens_per_s=plan.forecast.tokens_per_s,
        tokens_per_s=rates[0],
        even_tokens_per_s=rates[1],
        memory_tokens_per_s=rates[2],
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
    """Ratios to the two splits, the errors of the forecast, and memory."""
    errors = np.array([each.error for each in found])
    result: dict[str, Any] = {"mixes": len(found), "guessing": sum(each.guesses for each in found)}
    for name in ("even", "memory"):
        can_run = [each for each in found if getattr(each, f"{name}_fits")]
        ratios = np.array([each.tokens_per_s / getattr(each, f"{name}_tokens_per_s") for each in can_run])
        result[name] = {
            "median": float(np.median(ratios)),
            "worst": float(ratios.min()),
            "slower": int((ratios < 1).sum()),
            "would_not_fit": len(found) - len(can_run),
        }
    result["forecast"] = {
        "median_error": float(np.median(np.abs(errors))),
        "p90_error": float(np.percentile(np.abs(errors), 90)),
        "worst_error": float(errors[np.abs(errors).argmax()]),
        "bias": float(np.median(errors)),
        f"within_{WITHIN:.0%}": float((np.abs(errors) <= WITHIN).mean()),
    }
    result["memory_share_max"] = max(each.memory_share for each in found)
    return result


def command(args: argparse.Namespace) -> int:
    found = []
    with progress("planning", args.mixes) as step:
        for number, wish, plan in planned(args.mixes, args.first):
            found.append(checked(number, wish, plan, args.answers, args.tokens))
            step(f"mix {number}")
    result = summary(found)
    if args.json:
        print(json.dumps({**result, "outcomes": [asdict(each) for each in found]}))
        return 0
    rows = [
        [name, *(f"{result[name][key]:.2f}" for key in ("median", "worst")), result[name]["slower"], result[name]["would_not_fit"]]
        for name in ("even", "memory")
    ]
    show(
        f"SIMULATED: plans for {result['mixes']} mixes beside two splits of the same devices",
        ["plan / split", "median", "worst", "plan slower", "split would not fit"],
        rows,
    )
    forecast = {key.replace("_", " "): f"{100 * value:.1f}%" for key, value in result["forecast"].items()}
    show("forecast against simulation", list(forecast), [list(forecast.values())])
    print(f"\nfullest device: {100 * result['memory_share_max']:.1f}% of what may be used; guessing pays in {result['guessing']} mixes")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("planner_check", __doc__)
    parser.add_argument("--mixes", type=whole, default=200, help="default: %(default)s")
    parser.add_argument("--first", type=int, default=0, help="number of the first mix (default: %(default)s)")
    parser.add_argument("--answers", type=whole, default=3, help="simulated for each plan (default: %(default)s)")
    parser.add_argument("--tokens", type=whole, default=96, help="of each answer (default: %(default)s)")
    return run_command(parser, command, argv)


if __name__ == "__main__":
    sys.exit(main())
