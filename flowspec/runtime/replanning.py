"""Plans for those of a cluster's devices that are left, or that came since."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flowspec.plan.placement import ClusterPlan
from flowspec.runtime.cluster import Device, split_layers
from flowspec.runtime.pipelines import Slowness
from flowspec.runtime.planning.absent_devices import AbsentDevices
from flowspec.runtime.planning.choose import Chosen

NOBODY_SLOWER: Slowness = {}


class Replanner:
    """Plans for those of a cluster's devices that are there, by what is known of them.

    `plan` is the first one; those that are absent then are asked when they are there (`survey`, in any
    thread).
    """

    def __init__(
        self,
        plan: ClusterPlan,
        devices: Sequence[Device],
        chosen: Chosen | None,
        absent_devices: AbsentDevices | None,
    ) -> None:
        self._plan = plan
        self._devices = devices
        self._chosen = chosen
        self._absent_devices = absent_devices
        absent = () if chosen is None else chosen.survey.absent
        self._first = {device.name for device in devices} - set(absent)

    @property
    def is_planned(self) -> bool:
        """Whether the planner decides, and not the user or nobody."""
        return self._chosen is not None and not self._chosen.is_given

    def plan_of(self, names: Sequence[str], slowness: Slowness = NOBODY_SLOWER) -> ClusterPlan:
        """The plan for the devices of these names, which are so many times as slow as at first; raises
        `InputError`."""
        is_slower = bool(slowness) and self.is_planned
        if set(names) == self._first and not is_slower:
            return self._plan
        if len(self._first) < len(self._devices) and len(names) == len(self._devices):
            assert self._chosen is not None, "devices that were absent are the planner's"
            return replace(self._plan, stages=tuple(self._chosen.stages_of(self._devices, slowness)))
        return replan(self._plan, self._devices, names, slowness, self._chosen)

    def rate(self, plan: ClusterPlan, slowness: Slowness) -> float:
        """Tokens/s that the planner foretells for a plan."""
        assert self._chosen is not None, "only the planner foretells"
        return self._chosen.rate(plan, slowness)

    def survey(self, name: str) -> None:
        """Asks a device that was absent; raises `FlowSpecError` where that tells no plan what it needs."""
        assert self._absent_devices is not None, "who may be absent can be asked"
        assert self._chosen is not None, "who may be absent was planned with"
        self._chosen = self._chosen.knowing(self._absent_devices.survey(self._chosen.survey, name))


def replan(
    plan: ClusterPlan,
    devices: Sequence[Device],
    names: Sequence[str],
    slowness: Slowness = NOBODY_SLOWER,
    chosen: Chosen | None = None,
) -> ClusterPlan:
    """The plan where only the devices of these names are there: the planner's if the first one was, else an
    even split.

    The planner takes devices for so many times as slow as they were as `slowness` says. Raises `InputError`
    where the model does not fit them, or they are too many for its layers.
    """
    left = [device for device in devices if device.name in names]
    is_planned = chosen is not None and not chosen.is_given
    if len(left) == len(devices) and not (slowness and is_planned):
        return plan
    if chosen is None or not is_planned:
        return replace(plan, stages=tuple(split_layers(left, plan.layer_count, None)))
    return replace(plan, stages=tuple(chosen.stages_of(left, slowness)))
