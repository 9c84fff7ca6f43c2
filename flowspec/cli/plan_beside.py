"""What a plan is to be seen beside: the best that one of its devices can do alone, and an EAGLE head where
nothing trained guesses."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flowspec.draft.choosing import without_model
from flowspec.draft.kinds import sketched
from flowspec.draft.kinds.eagle import SKETCH
from flowspec.errors import InputError
from flowspec.plan.absence import among
from flowspec.plan.advice import GAIN_MIN, Option
from flowspec.plan.planner import DoesNotFit, Plan, make_plan
from flowspec.plan.sites import PlannedDrafter, PlanRequest, Site


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """The device that is fastest without the others, by its best plan; with `drafter`, None without guesses.
    `left_out` is the drafter of the request that does not fit there."""

    site: Site
    plan: Plan
    drafter: PlannedDrafter | None
    left_out: PlannedDrafter | None

    @property
    def tokens_per_s(self) -> float:
        return self.plan.forecast.tokens_per_s


def alone(request: PlanRequest) -> Alone | None:
    """Of the request's drafter, n-grams and no guesses the fastest; None where the model fits no device
    alone."""
    found, seen = [], []
    for each in request.stage_sites:
        if (each.profile, each.memory_bytes) not in seen:
            seen.append((each.profile, each.memory_bytes))
            found += [one] if (one := _alone(request, each)) is not None else []
    return max(found, key=lambda one: one.tokens_per_s, default=None)


def _alone(request: PlanRequest, place: Site) -> Alone | None:
    only = among(request, {place.name})
    own, plans = request.drafter, []
    for drafter in {own, None if own is None else without_model(request.shape)}:
        try:
            plans.append((make_plan(replace(only, drafter=drafter)), drafter))
        except DoesNotFit:
            return None  # a plan may do without its drafter, so the model itself does not fit
    plan, drafter = max(plans, key=lambda each: each[0].forecast.tokens_per_s)
    fits = any(each.guessed is not None for each, of in plans if of == own)
    return Alone(
        site=place,
        plan=plan,
        drafter=drafter if plan.guesses else None,
        left_out=None if fits else own,
    )


def with_eagle(request: PlanRequest, tokens_per_s: float) -> Option | None:
    """What an EAGLE head for the model would give beside `tokens_per_s`; None where it would not help, or
    where a model that was trained guesses already."""
    if request.drafter is not None and request.drafter.shape is not None:
        return None
    head = sketched(SKETCH, request.shape)
    try:
        rate = make_plan(replace(request, drafter=head)).forecast.tokens_per_s
    except InputError:
        return None
    gain = rate / tokens_per_s - 1
    text = f"--drafter {SKETCH}, a head that is right at {head.acceptance:.1%}"
    return Option(text=text, tokens_per_s=rate, gain=gain) if gain >= GAIN_MIN else None
