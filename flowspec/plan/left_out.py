"""Why a plan leaves devices out."""

from __future__ import annotations

from dataclasses import replace

from flowspec.plan.memory import mib
from flowspec.plan.partition import Partition
from flowspec.plan.planner import NEARLY, Plan
from flowspec.plan.sites import PlanRequest, Site
from flowspec.rounding import rounded


def why_left_out(request: PlanRequest, plan: Plan) -> dict[str, str]:
    """Each device that could run a stage and runs none in a plan, in the user's order, with why."""
    used = {stage.site.name for stage in plan.stages}
    partition = Partition(request)
    return {site.name: _why(partition, plan, site) for site in request.stage_sites if site.name not in used}


def _why(partition: Partition, plan: Plan, site: Site) -> str:
    """What the device would change at its best place in the plan."""
    request, arrangement = partition.request, plan.split.arrangement
    layers, order = request.shape.layers, arrangement.order
    if len(order) == layers:
        return f"each of the {layers} layers has a device"
    wider = [
        replace(arrangement, order=(*order[:place], site, *order[place:])) for place in range(len(order) + 1)
    ]
    rates = [split.forecast.tokens_per_s for split in partition.best_of(wider) if split is not None]
    if not rates:
        needed = min(
            partition.stage_need(each, place, 1).total_bytes + partition.other_bytes(each, site)
            for place, each in enumerate(wider)
        )
        return f"a single layer needs {mib(needed)} there, and it has {mib(site.memory_bytes)}"
    own, with_it = plan.forecast.tokens_per_s, max(rates)
    told = f"the forecast is {rounded(own)} tokens/s, {rounded(with_it)} with one device more"
    return f"{told}, which is too little to count" if own < with_it <= own / NEARLY else told
