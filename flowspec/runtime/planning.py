"""What runs where on a cluster: the planner's choice, or the user's, compared with the planner's; and plans
for those of its devices that are left, or that came since."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flowspec.errors import ClusterError
from flowspec.plan.advice import ModelDoesNotFitError, among, plan_or_refuse, why_left_out
from flowspec.plan.cost import layers_curve
from flowspec.plan.memory import mib
from flowspec.plan.placement import ClusterPlan, StagePlan
from flowspec.plan.planner import DoesNotFit, Plan, make_plan, rate_split
from flowspec.plan.sites import PlanRequest
from flowspec.plan.timing import Curve
from flowspec.rounding import rounded
from flowspec.runtime.cluster import Device, split_layers
from flowspec.runtime.plan_inputs import enough_bytes
from flowspec.runtime.survey import ASSUMED, Survey, Surveyor

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

    @property
    def gain(self) -> float:
        """By how much the better plan is faster."""
        assert self.better is not None
        return self.better.forecast.tokens_per_s / self.plan.forecast.tokens_per_s - 1

    def lines(self, runs: Sequence[StagePlan], measured: str | None = None) -> list[str]:
        """What is told of the plan where `runs` are the stages by now, after devices were lost or taken in.

        Once an answer was `measured`, what is known by then stands for the forecast; nothing, if that is
        empty."""
        used = {stage.name: (stage.first, stage.end) for stage in runs}
        is_plans = used == {stage.site.name: (stage.first, stage.end) for stage in self.plan.stages}
        if measured is None:
            measured = f"forecast {_rate(self.plan)} tokens/s" if is_plans else ""
        how = f"as {'given' if self.is_given else 'planned'}" if is_plans else "shared out anew"
        found = [f"layers {how}{measured and f': {measured}'}"]
        if self.better is not None and is_plans:
            parts = [f"{stage.end - stage.first} on {stage.site.name}" for stage in self.better.stages]
            more = f"{self.gain:+.0%}" if self.gain < 1 else f"{1 + self.gain:.1f} times that"
            found.append(f"the planner's would give {_rate(self.better)} ({more}): {', '.join(parts)}")
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
        plan = plan_or_refuse(steadied(request), found.limited)
    except ModelDoesNotFitError as error:
        if not found.absent:
            raise
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
    better = None
    with contextlib.suppress(DoesNotFit):
        better = make_plan(steadied(request))
        if better.forecast.tokens_per_s <= (1 + BETTER_BY) * given.forecast.tokens_per_s:
            better = None
    return Chosen(plan=given, request=request, survey=found, is_given=True, better=better)


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
    sites = [
        replace(each, profile=each.profile.slowed(slowness.get(each.name, 1.0))) for each in request.sites
    ]
    return replace(request, sites=tuple(sites))


def steadied(request: PlanRequest) -> PlanRequest:
    """The same with memory that does not change from start to start where there is enough of it, so that the
    plan does not, either."""
    enough = enough_bytes(request)
    sites = [replace(each, memory_bytes=min(enough, each.memory_bytes)) for each in request.sites]
    return replace(request, sites=tuple(sites))


class Replanner:
    """Plans for those of a cluster's devices that are there, by what is known of them; the `first` plan is
    for all that are not absent.

    Those that are absent then the `surveyor` asks when they are there, in any thread.
    """

    def __init__(
        self,
        first: ClusterPlan,
        devices: Sequence[Device],
        chosen: Chosen | None = None,
        surveyor: Surveyor | None = None,
    ) -> None:
        self._plan, self._devices, self._chosen, self._surveyor = first, devices, chosen, surveyor
        absent = () if chosen is None else chosen.survey.absent
        self._first = {device.name for device in devices} - set(absent)

    @property
    def is_planned(self) -> bool:
        """Whether the planner decides, and not the user or nobody."""
        return self._chosen is not None and not self._chosen.is_given

    def plan_of(self, names: Sequence[str], slowness: Mapping[str, float] | None = None) -> ClusterPlan:
        """The plan for the devices of these names, which are so many times as slow as at first: the planner's
        if the first one was, else an even split. Raises `InputError`."""
        if set(names) == self._first and not (slowness and self.is_planned):
            return self._plan
        devices = [device for device in self._devices if device.name in names]
        if self._chosen is None or not self.is_planned:
            return replace(self._plan, stages=tuple(split_layers(devices, self._plan.layer_count, None)))
        return replace(self._plan, stages=tuple(self._chosen.stages_of(devices, slowness or {})))

    def rate(self, plan: ClusterPlan, slowness: Mapping[str, float]) -> float:
        """Tokens/s that the planner forecasts for a plan."""
        assert self._chosen is not None, "only the planner forecasts"
        return self._chosen.rate(plan, slowness)

    def survey(self, name: str) -> None:
        """Asks a device that was absent; raises `FlowSpecError` where that tells no plan what it needs."""
        assert self._surveyor is not None, "who may be absent can be asked"
        assert self._chosen is not None, "who may be absent was planned with"
        found = self._surveyor.join(self._chosen.survey, name)
        request = replace(self._chosen.request, sites=found.sites, network=found.network)
        self._chosen = replace(self._chosen, survey=found, request=request)
