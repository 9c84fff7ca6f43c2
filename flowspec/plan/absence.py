"""What is left of a plan when one of its devices is absent: whether the model fits the others."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from flowspec.plan.advice import shortfalls
from flowspec.plan.planner import DoesNotFit, Plan, make_plan
from flowspec.plan.sites import PlanRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Without:
    """The plan without a device; None where the model does not fit the others, which lack `short_bytes`."""

    device: str
    plan: Plan | None
    short_bytes: int = 0


def among(request: PlanRequest, names: Collection[str]) -> PlanRequest:
    """The same request with only these devices for stages; the head stays, also without a daemon there."""
    left = [each if each.name in names else replace(each, runs_stages=False) for each in request.sites]
    return replace(
        request, sites=tuple(each for each in left if each.runs_stages or each.name == request.head)
    )


def without_each(request: PlanRequest, plan: Plan) -> Sequence[Without]:
    """What is left without each device that the plan uses, in pipeline order; the others change nothing."""
    return [_without(request, stage.site.name) for stage in plan.stages]


def _without(request: PlanRequest, name: str) -> Without:
    others = among(request, {site.name for site in request.stage_sites} - {name})
    if not others.stage_sites:
        return Without(device=name, plan=None)
    try:
        return Without(device=name, plan=make_plan(others))
    except DoesNotFit:
        short_bytes = sum(each.short_bytes for each in shortfalls(others))
        return Without(device=name, plan=None, short_bytes=short_bytes)
