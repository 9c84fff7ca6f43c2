"""What a forecast that was wrong by more than a factor of two did not know: of devices, links or guesses.

What an answer's segments took at each stage is compared with what the plan predicts for as many rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from flowspec.core.protocol.messages import Hop
from flowspec.plan.partition import Partition, Times
from flowspec.plan.planner import Plan
from flowspec.plan.sites import PlanRequest, Site
from flowspec.rounding import duration, rounded
from flowspec.runtime.device.links import HERE

WRONG = 2.0
"""A rate that is so many times the forecast, or as small a part of it, is explained."""
TOKENS_MIN = 16
"""Of an answer whose rate says something."""
CAUSE = 1.5
"""What is so many times what was predicted, or as small a part of it, is a cause."""
LINKS_SHARE = 0.2
"""Of a trip: links that take less are no cause."""
MISSED = 0.15
"""A share of tokens without a right guess that is off by so much is a cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """An answer: its rate, what its segments met at each stage, the seconds of a trip on links, and the share
    of tokens that no guess was right for.

    `why_slow` says of devices what they tell of their heat, `hosts` where each is, `HERE` on the head's
    machine; so `in_use` of devices that other heads use. `runs` are the layers that each device has by the
    end; devices were lost `recoveries` times meanwhile, which took `recovery_s`. Those `returning` were lost,
    and load their layers again.
    """

    tokens_per_s: float
    new_tokens: int
    hops: Sequence[Sequence[Hop]]
    links_s: float
    missed: float
    why_slow: Mapping[str, str]
    hosts: Mapping[str, str]
    runs: Mapping[str, int]
    recoveries: int = 0
    recovery_s: float = 0.0
    in_use: Mapping[str, str] = field(default_factory=dict)
    returning: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Cause:
    """Why a forecast was wrong. `times` is how many times as long it made something; causes of one `kind` are
    the same reason with other figures."""

    times: float
    kind: str
    text: str


def is_wrong(plan: Plan, measured: Measured) -> bool:
    """Whether the forecast was wrong by more than a factor of two; of a short answer that is not known."""
    if measured.new_tokens < TOKENS_MIN or measured.tokens_per_s <= 0:
        return False
    share = measured.tokens_per_s / plan.forecast.tokens_per_s
    return not 1 / WRONG <= share <= WRONG


def causes(request: PlanRequest, plan: Plan, measured: Measured) -> list[Cause]:
    """What explains that the answer was slower than predicted, or faster, the weightier first; or nothing."""
    other, told = _other_plan(plan, measured)
    if told:
        return [
            Cause(times=1.0, kind=other, text=told)
        ]  # what was predicted is of devices and layers that were not those of all hops
    is_slower = measured.tokens_per_s < plan.forecast.tokens_per_s
    found = [*_stages(request, plan, measured), *_links(request, plan, measured), *_guesses(plan, measured)]
    return [cause for cause in sorted(found, reverse=True) if (cause.times > 1) == is_slower]


def _other_plan(plan: Plan, measured: Measured) -> tuple[str, str]:
    """What became of the plan, if not all of the answer was computed as planned: its kind, and the whole."""
    gone = [stage.site.name for stage in plan.stages if stage.site.name not in measured.runs]
    if measured.recoveries:
        who = f"{_and(gone)} {'was' if len(gone) == 1 else 'were'} lost" if gone else "a device was lost"
        return who, f"{who} meanwhile, and it took {duration(measured.recovery_s)} to go on without"
    if gone:
        told = f"{_and(gone)} {'is' if len(gone) == 1 else 'are'} lost since the plan was made"
        if back := [name for name in gone if name in measured.returning]:
            told = f"{_and(back)} {'was lost, and loads' if len(back) == 1 else 'were lost, and load'} now"
        return told, told
    layers = {stage.site.name: stage.end - stage.first for stage in plan.stages}
    told = "layers were shared out anew since then" if layers != dict(measured.runs) else ""
    return told, told


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _stages(request: PlanRequest, plan: Plan, measured: Measured) -> Iterator[Cause]:
    """How many times as long as predicted stages computed; those that are slow for one reason together."""
    times = Partition(request).times(plan)
    slow: dict[str, list[tuple[float, str]]] = {}
    for index, stage in enumerate(plan.stages):
        hops = [hop[index] for hop in measured.hops if index < len(hop) and hop[index].rows]
        layers = stage.end - stage.first
        predicted_s = sum(_seconds(times, index, layers, hop.rows) for hop in hops)
        if not hops or not predicted_s:
            continue
        slowness = sum(hop.compute_s for hop in hops) / predicted_s
        name = stage.site.name
        if slowness > CAUSE:
            slow.setdefault(_why(plan, stage.site, measured), []).append((slowness, name))
        elif slowness < 1 / CAUSE:
            text = f"{name} is {rounded(1 / slowness)} times as fast as predicted"
            yield Cause(times=slowness, kind=f"{name} is fast", text=text)
    for why, found in slow.items():
        found.sort(reverse=True)
        times_long, names = _and([rounded(each) for each, _ in found]), _and([name for _, name in found])
        text = f"{names} took {times_long} times as long as predicted ({why})"
        yield Cause(times=found[0][0], kind=why, text=text)


def _why(plan: Plan, site: Site, measured: Measured) -> str:
    """What slows a device, as far as it is known; that its cores are shared is in the prediction, but threads
    that wait for each other cost more."""
    if told := measured.why_slow.get(site.name):
        return told
    host = measured.hosts.get(site.name, site.name)
    if used := [name for name, machine in measured.in_use.items() if machine == host]:
        return f"cores shared with {_and(used)} on the same machine, which other heads use"
    if site.shared is not None:
        beside = [
            each.site.shared
            for each in plan.stages
            if each.site.shared is not None and each.site.shared.host == site.shared.host
        ]
        threads, cores = sum(each.threads for each in beside), site.shared.cores
        if threads > cores:
            each = max(1, cores // len(beside))
            advice = f"start each daemon there with --threads {each}"
            if threads <= each * len(beside):
                advice = "let fewer daemons there have layers"
            return f"{threads} threads on {cores} {'core' if cores == 1 else 'cores'}: {advice}"
    others = Counter(measured.hosts.values())[host] - 1
    if others > 0:
        return f"cores shared with {others} more of our processes"
    return "cores busy with something else, or heat: flowspec doctor"


def _seconds(times: Times, index: int, layers: int, rows: int) -> float:
    return float(np.interp(rows, times.nodes, times.fixed_s[:, index] + layers * times.layer_s[:, index]))


def _links(request: PlanRequest, plan: Plan, measured: Measured) -> Iterator[Cause]:
    if all(host == HERE for host in measured.hosts.values()):
        return  # what a message waits for within a machine are its cores
    times = Partition(request).times(plan)
    predicted_s = float(np.interp(plan.forecast.nodes, times.nodes, times.links_s))
    if measured.links_s < LINKS_SHARE * plan.forecast.trip_s or not predicted_s:
        return
    share = measured.links_s / predicted_s
    if share > CAUSE:
        text = f"links took {duration(measured.links_s)} of a trip, not {duration(predicted_s)} as predicted"
        yield Cause(times=share, kind="links", text=text)


def _guesses(plan: Plan, measured: Measured) -> Iterator[Cause]:
    """Weighed by how many times as many tokens wait."""
    if plan.guesses and abs(measured.missed - plan.forecast.missed) > MISSED:
        share = max(measured.missed, 0.01) / max(plan.forecast.missed, 0.01)
        expected = f"the forecast reckons with {plan.forecast.missed:.0%} of an average text"
        text = f"{measured.missed:.0%} of the tokens were not guessed ahead; {expected}"
        yield Cause(times=share, kind="guesses", text=text)
