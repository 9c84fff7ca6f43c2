"""What a forecast that was wrong by more than a factor of two did not know: of devices, links or guesses.

Nobody is asked: what an answer's segments took at each stage is compared with what the plan reckons for as
many rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from flowspec.core.protocol.messages import Hop
from flowspec.plan.partition import Partition, Times
from flowspec.plan.planner import Plan
from flowspec.plan.sites import PlanRequest
from flowspec.rounding import duration, rounded

WRONG = 2.0
"""A rate that is so many times the forecast, or as small a part of it, is explained."""
TOKENS_MIN = 16
"""Of an answer whose rate says something."""
CAUSE = 1.5
"""What is so many times what was reckoned, or as small a part of it, is a cause."""
LINKS_SHARE = 0.2
"""Of a trip: links that take less are no cause."""
MISSED = 0.15
"""A share of tokens without a right guess that is off by so much is a cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """An answer: its rate, what its segments met at each stage, the seconds of a trip on links, and the share
    of tokens that no guess was right for.

    `why_slow` says of devices what they tell of their heat, `hosts` where each is.
    """

    tokens_per_s: float
    new_tokens: int
    hops: Sequence[Sequence[Hop]]
    links_s: float
    missed: float
    why_slow: Mapping[str, str]
    hosts: Mapping[str, str]


def is_wrong(plan: Plan, measured: Measured) -> bool:
    """Whether the forecast was wrong by more than a factor of two; of a short answer that is not known."""
    if measured.new_tokens < TOKENS_MIN or measured.tokens_per_s <= 0:
        return False
    share = measured.tokens_per_s / plan.forecast.tokens_per_s
    return not 1 / WRONG <= share <= WRONG


def causes(request: PlanRequest, plan: Plan, measured: Measured) -> list[str]:
    """What explains that the answer was slower than foretold, or faster, the weightier first; or nothing."""
    is_slower = measured.tokens_per_s < plan.forecast.tokens_per_s
    found = [*_stages(request, plan, measured), *_links(request, plan, measured), *_guesses(plan, measured)]
    return [text for times, text in sorted(found, reverse=True) if (times > 1) == is_slower]


def _stages(request: PlanRequest, plan: Plan, measured: Measured) -> Iterator[tuple[float, str]]:
    """How many times as long as reckoned each stage computed."""
    times = Partition(request).times(plan.split.arrangement)
    beside = Counter(measured.hosts.values())
    for index, stage in enumerate(plan.stages):
        hops = [hop[index] for hop in measured.hops if index < len(hop) and hop[index].rows]
        layers = stage.end - stage.first
        reckoned_s = sum(_seconds(times, index, layers, hop.rows) for hop in hops)
        if not hops or not reckoned_s:
            continue
        slowness = sum(hop.compute_s for hop in hops) / reckoned_s
        name = stage.site.name
        if slowness > CAUSE:
            others = beside[measured.hosts.get(name, name)] - 1
            why = measured.why_slow.get(name) or (
                f"its cores are shared with {others} more of our processes"
                if others > 0
                else "its cores are busy with something else, or it is hot: flowspec doctor"
            )
            yield slowness, f"{name} computes {rounded(slowness)} times as long as reckoned ({why})"
        elif slowness < 1 / CAUSE:
            yield slowness, f"{name} is {rounded(1 / slowness)} times as fast as reckoned"


def _seconds(times: Times, index: int, layers: int, rows: int) -> float:
    return float(np.interp(rows, times.nodes, times.fixed_s[:, index] + layers * times.layer_s[:, index]))


def _links(request: PlanRequest, plan: Plan, measured: Measured) -> Iterator[tuple[float, str]]:
    times = Partition(request).times(plan.split.arrangement)
    reckoned_s = float(np.interp(plan.forecast.nodes, times.nodes, times.links_s))
    if measured.links_s < LINKS_SHARE * plan.forecast.trip_s or not reckoned_s:
        return
    share = measured.links_s / reckoned_s
    if share > CAUSE:
        yield share, f"links take {duration(measured.links_s)} of a trip, not {duration(reckoned_s)}"


def _guesses(plan: Plan, measured: Measured) -> Iterator[tuple[float, str]]:
    """Weighed by how many times as many tokens wait."""
    if plan.guesses and abs(measured.missed - plan.forecast.missed) > MISSED:
        share = max(measured.missed, 0.01) / max(plan.forecast.missed, 0.01)
        usual = f"{plan.forecast.missed:.0%} is usual"
        yield share, f"{measured.missed:.0%} of the tokens were not guessed, where {usual}"
