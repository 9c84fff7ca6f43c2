"""What a plan is to be seen beside: one of its devices alone, and an EAGLE head where nothing trained
guesses."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flowspec.bench.planned import refined_plan
from flowspec.draft.kinds import sketched
from flowspec.draft.kinds.eagle import SKETCH
from flowspec.errors import InputError
from flowspec.plan.absence import among
from flowspec.plan.advice import GAIN_MIN, Option
from flowspec.plan.planner import DoesNotFit, make_plan
from flowspec.plan.sites import PlanRequest, Site


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """The device that is fastest without the others, and its rate there."""

    site: Site
    tokens_per_s: float


def alone(request: PlanRequest, *, is_quick: bool) -> Alone | None:
    """None where the model fits no device alone."""
    found, seen = [], []
    for each in request.stage_sites:
        if (each.profile, each.memory_bytes) in seen:
            continue
        seen.append((each.profile, each.memory_bytes))
        only = among(request, {each.name})
        try:
            found.append((make_plan(only).forecast.tokens_per_s, each, only))
        except DoesNotFit:
            continue
    if not found:
        return None
    rate, place, only = max(found, key=lambda each: each[0])
    return Alone(site=place, tokens_per_s=rate if is_quick else _rate(only, is_quick=False))


def with_eagle(request: PlanRequest, tokens_per_s: float, *, is_quick: bool) -> Option | None:
    """What an EAGLE head for the model would give beside `tokens_per_s`; None where it would not help, or
    where a model that was trained guesses already."""
    if request.drafter is not None and request.drafter.shape is not None:
        return None
    head = sketched(SKETCH, request.shape)
    changed = replace(request, drafter=head)
    try:
        rate = _rate(changed, is_quick=is_quick)
    except InputError:
        return None
    gain = rate / tokens_per_s - 1
    text = f"--drafter {SKETCH}, a head that is right at {head.acceptance:.1%}"
    option = Option(text=text, tokens_per_s=rate, gain=gain, is_simulated=not is_quick)
    return option if gain >= GAIN_MIN else None


def _rate(request: PlanRequest, *, is_quick: bool) -> float:
    return (
        make_plan(request).forecast.tokens_per_s if is_quick else refined_plan(request).simulated.tokens_per_s
    )
