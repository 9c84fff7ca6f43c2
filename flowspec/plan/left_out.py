"""Why a plan leaves devices out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from flowspec.plan.memory import mib
from flowspec.plan.partition import Arrangement, Partition
from flowspec.plan.planner import Plan, kinds_of
from flowspec.plan.sites import PlanRequest, Site
from flowspec.rounding import rounded


def why_left_out(
    request: PlanRequest, plan: Plan, simulated: Sequence[tuple[Plan, float]] = ()
) -> dict[str, str]:
    """Each device that could run a stage and runs none in a plan, in the user's order, with why.

    `simulated` are the plans among which simulations decided, this one too, with their tokens/s. A plan with
    the device that is not among them was decided against by the formula, whose figures are given then.
    """
    used = {stage.site.name for stage in plan.stages}
    partition = Partition(request)
    return {
        site.name: _why(partition, plan, site, simulated)
        for site in request.stage_sites
        if site.name not in used
    }


def _why(partition: Partition, plan: Plan, site: Site, simulated: Sequence[tuple[Plan, float]]) -> str:
    """What the device would change at its best place in the plan."""
    request, arrangement = partition.request, plan.split.arrangement
    layers, order = request.shape.layers, arrangement.order
    if len(order) == layers:
        return f"each of the {layers} layers has a device"
    wider = [
        replace(arrangement, order=(*order[:place], site, *order[place:])) for place in range(len(order) + 1)
    ]
    rates = [split.forecast.tokens_per_s for each in wider if (split := partition.best(each)) is not None]
    if not rates:
        needed = min(
            partition.stage_need(each, place, 1).total_bytes + partition.other_bytes(each, site)
            for place, each in enumerate(wider)
        )
        return f"a single layer needs {mib(needed)} there, and it has {mib(site.memory_bytes)}"
    with_it = _rate_of(request, wider[0], simulated)
    own = _rate_of(request, arrangement, simulated)
    if with_it is not None and own is not None:
        return f"{rounded(own)} tokens/s are foretold, {rounded(with_it)} with it"
    formula = f"{rounded(plan.forecast.tokens_per_s)} tokens/s are foretold"
    return f"{formula}{' by formula' if simulated else ''}, {rounded(max(rates))} with it"


def _rate_of(
    request: PlanRequest, wanted: Arrangement, simulated: Sequence[tuple[Plan, float]]
) -> float | None:
    """The best simulated rate with stages on the same devices, or on such as can stand for them."""
    kinds = {site.name: number for number, alike in enumerate(kinds_of(request)) for site in alike}

    def made_of(arrangement: Arrangement) -> tuple[Counter[int], bool]:
        return Counter(kinds[each.name] for each in arrangement.order), arrangement.guesses

    return max(
        (rate for plan, rate in simulated if made_of(plan.split.arrangement) == made_of(wanted)), default=None
    )
