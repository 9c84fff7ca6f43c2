"""What runs where on a cluster: the planner's choice, or the user's, compared with the planner's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flowspec.errors import ClusterError
from flowspec.plan.absence import among
from flowspec.plan.cost import layers_curve
from flowspec.plan.left_out import why_left_out
from flowspec.plan.memory import mib
from flowspec.plan.placement import ClusterPlan, StagePlan
from flowspec.plan.planner import DoesNotFit, Plan, make_plan, rate_split
from flowspec.plan.refusal import ModelDoesNotFitError, plan_or_refuse
from flowspec.plan.sites import PlanRequest
from flowspec.plan.timing import Curve
from flowspec.rounding import rounded
from flowspec.runtime.cluster import Device
from flowspec.runtime.planning.plan_inputs import enough_bytes
from flowspec.runtime.planning.survey import ASSUMED, Survey

BETTER_BY = 0.05
"""A planned split is told of only if it gains more over the user's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The plan that is run, for this request. Where the user gave its layers, `better` is the planner's if
    that is clearly better."""

    plan: Plan
    request: PlanRequest
    survey: Survey
    is_given: bool
    better: Plan | None = None
    unused: Mapping[str, str] = field(default_factory=dict)
    """Devices that run no stage, with why."""

    def stages(self, devices: Sequence[Device]) -> list[StagePlan]:
        """The plan's stages with the addresses of their devices."""
        return _placed(self.plan, devices)

    def curves(self) -> list[Curve]:
        """The time of each stage's layers."""
        return [
            layers_curve(stage.site.profile, self.request.shape, self.plan.precision, stage.end - stage.first)
            for stage in self.plan.stages
        ]

    def stages_of(self, devices: Sequence[Device], slowness: Mapping[str, float]) -> list[StagePlan]:
        """What the planner has these devices run when all others are lost, by what it knew at the start;
        raises `DoesNotFit`.

        Devices that `slowness` names take so many times what they took then.
        """
        left = among(slowed(self.request, slowness), {device.name for device in devices})
        return _placed(make_plan(steadied(left)), devices)

    def rate(self, plan: ClusterPlan, slowness: Mapping[str, float]) -> float:
        """Tokens/s that are foretold for a plan, by what was known at the start and how slow devices are by
        now."""
        return _rated(slowed(self.request, slowness), plan.stages).forecast.tokens_per_s

    def knowing(self, found: Survey) -> Chosen:
        """The same plan by what is known now, which later plans are made of."""
        return replace(
            self, survey=found, request=replace(self.request, sites=found.sites, network=found.network)
        )

    @property
    def gain(self) -> float:
        """By how much the better plan is faster."""
        assert self.better is not None
        return self.better.forecast.tokens_per_s / self.plan.forecast.tokens_per_s - 1

    def lines(self, runs: Sequence[StagePlan], measured: str | None = None) -> list[str]:
        """What is told of the plan where `runs` are the stages by now, after devices were lost or taken in.

        Once an answer was `measured`, what is known by then stands for the forecast; nothing, if that is
        empty."""
        used = _layers(runs)
        is_plans = used == {stage.site.name: (stage.first, stage.end) for stage in self.plan.stages}
        foretold = measured
        if measured is None:
            foretold = f"forecast {_rate(self.plan)} tokens/s" if is_plans else ""
        how = f"as {'given' if self.is_given else 'planned'}" if is_plans else "shared out anew"
        found = [f"layers {how}{f': {foretold}' if foretold else ''}"]
        if self.better is not None and is_plans:
            split = ", ".join(
                f"{stage.end - stage.first} on {stage.site.name}" for stage in self.better.stages
            )
            more = f"{self.gain:+.0%}" if self.gain < 1 else f"{1 + self.gain:.1f} times that"
            found.append(f"the planner's would give {_rate(self.better)} ({more}): {split}")
        unused = [f"{name} is left out: {why}" for name, why in self.unused.items() if name not in used]
        found += [*unused, "--all-devices has every device work, to see them all"] if unused else []
        for name, why in self.survey.left_out.items():
            found.append(f"{name} is left out: it says that it has {why}, which cannot be")
        assumed = [name for name, source in self.survey.sources.items() if source == ASSUMED]
        if assumed:
            found.append(f"speed not known, taken for that of the slowest: {', '.join(assumed)}")
        return found + self.plan.bases

    def report(self) -> dict[str, Any]:
        return {
            "is_given": self.is_given,
            **_numbers(self.plan),
            "not_used": list(self.unused),
            "why_not_used": dict(self.unused),
            "left_out": self.survey.left_out,
            "absent": self.survey.absent,
            "profiles": {
                site.name: {"board": site.profile.name, "source": self.survey.sources[site.name]}
                for site in self.survey.sites
                if site.runs_stages
            },
            "better": None if self.better is None else {**_numbers(self.better), "gain": self.gain},
        }


def _placed(plan: Plan, devices: Sequence[Device]) -> list[StagePlan]:
    addresses = {device.name: device.address for device in devices}
    return [
        StagePlan(name=stage.site.name, address=addresses[stage.site.name], first=stage.first, end=stage.end)
        for stage in plan.stages
    ]


def _layers(stages: Sequence[StagePlan]) -> dict[str, tuple[int, int]]:
    return {stage.name: (stage.first, stage.end) for stage in stages}


def _rate(plan: Plan) -> str:
    return rounded(plan.forecast.tokens_per_s)


def _numbers(plan: Plan) -> dict[str, Any]:
    return {
        "stages": [{"device": stage.site.name, "layers": [stage.first, stage.end]} for stage in plan.stages],
        "tokens_per_s": plan.forecast.tokens_per_s,
        "guessing_pays": plan.guesses,
    }


def choose(request: PlanRequest, found: Survey) -> Chosen:
    """The planner's choice; raises `ModelDoesNotFitError` where the model does not fit.

    Where devices are absent it is a `ClusterError` of one line, which names the first of them and what is
    missing.
    """
    try:
        plan = plan_or_refuse(steadied(request))
    except ModelDoesNotFitError as error:
        if not found.absent:
            raise ModelDoesNotFitError(
                error.reason, list(error.shortfalls), list(error.options), found.limited
            ) from None
        name, why = next(iter(found.absent.items()))
        others = f", as {len(found.absent) - 1} more" if len(found.absent) > 1 else ""
        missing = mib(sum(each.short_bytes for each in error.shortfalls))
        told = f"device {name} is absent{others} ({why})"
        if name in found.in_use:
            told = f"device {name} is {why}{others}"
        lacks = f"{request.shape.name} does not fit the others: they lack {missing} of memory"
        raise ClusterError(f"{told}; {lacks}") from None
    unused = why_left_out(request, plan)
    return Chosen(plan=plan, request=request, survey=found, is_given=False, unused=unused)


def compare(request: PlanRequest, found: Survey, stages: Sequence[StagePlan]) -> Chosen:
    """The user's split, with the planner's where that is clearly better. Whether the user's fits is for the
    daemons to say.

    Raises `ClusterError` where it has layers for a device that is left out.
    """
    for stage in stages:
        if why := found.left_out.get(stage.name):
            raise ClusterError(
                f"{stage.name} is given layers, but says that it has {why}, which cannot be; look at it"
            )
    given = _rated(request, stages)
    try:
        planned = make_plan(steadied(request))
    except DoesNotFit:
        return Chosen(plan=given, request=request, survey=found, is_given=True)
    is_better = planned.forecast.tokens_per_s > (1 + BETTER_BY) * given.forecast.tokens_per_s
    return Chosen(
        plan=given, request=request, survey=found, is_given=True, better=planned if is_better else None
    )


def _rated(request: PlanRequest, stages: Sequence[StagePlan]) -> Plan:
    """The forecast of given stages, with the head where it suits them best."""
    sites = {site.name: site for site in request.sites}
    order, layers = [sites[stage.name] for stage in stages], [stage.end - stage.first for stage in stages]
    return max(
        (rate_split(request, order, head, layers) for head in request.heads),
        key=lambda plan: plan.forecast.tokens_per_s,
    )


def slowed(request: PlanRequest, slowness: Mapping[str, float]) -> PlanRequest:
    """The same with devices that take so many times what their profile says."""
    sites = tuple(
        replace(site, profile=site.profile.slowed(slowness.get(site.name, 1.0))) for site in request.sites
    )
    return replace(request, sites=sites)


def steadied(request: PlanRequest) -> PlanRequest:
    """The same with memory that does not change from start to start where there is enough of it, so that the
    plan does not, either."""
    enough = enough_bytes(request)
    return replace(
        request,
        sites=tuple(replace(site, memory_bytes=min(enough, site.memory_bytes)) for site in request.sites),
    )
