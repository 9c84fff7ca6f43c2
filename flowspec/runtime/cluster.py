"""The devices of a cluster, and what each of them shall run: sizes, forced splits, the context."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from flowspec.core.protocol import limits
from flowspec.errors import InputError
from flowspec.plan.placement import StagePlan, checked_split, even_split

CONTEXT_DEFAULT = 4096
PORT_DEFAULT = 7700
"""On which a daemon listens."""
_UNITS = {
    "": 1,
    "B": 1,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "KB": 1000,
    "MB": 10**6,
    "GB": 10**9,
    "K": 1 << 10,
    "M": 1 << 20,
    "G": 1 << 30,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device of a cluster: its daemon's address, and what the user fixed about it.

    `profile` is a board's name or a file, `ssh` where `launch/boards` logs in, as `user@host`. With a
    `drafter` it runs that model and no stage.
    """

    name: str
    address: str
    layers: tuple[int, int] | None = None
    memory_bytes: int | None = None
    profile: str | None = None
    ssh: str | None = None
    drafter: str | None = None


def stage_devices(devices: Sequence[Device]) -> list[Device]:
    """Those that may run stages."""
    return [device for device in devices if device.drafter is None]


def parse_bytes(text: str) -> int:
    """`4GiB`, `512MB` or a plain number of bytes, at least one; raises `InputError`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    size = 0.0 if match is None else float(match[1]) * _UNITS.get(match[2].upper(), 0)
    if not 1 <= size < limits.ID_MAX:
        raise InputError(f"expected a size such as 4GiB or 512MiB, got {text!r:.80}")
    return int(size)


def check_local(count: int, layer_count: int) -> None:
    """Refuses more local processes than a model has layers."""
    if count > layer_count:
        raise InputError(
            f"--local: expected at most {layer_count}, a process for each layer of the model, got {count}"
        )


def split_layers(
    devices: Sequence[Device], layer_count: int, forced: Sequence[int] | None
) -> list[StagePlan]:
    """Layers for each device: as forced, as the cluster file says, else evenly."""
    if forced is None and devices[0].layers is not None:
        return _fixed_layers(devices, layer_count)
    counts = (
        even_split(layer_count, len(devices))
        if forced is None
        else checked_split(forced, layer_count, len(devices))
    )
    ends = [sum(counts[: index + 1]) for index in range(len(counts))]
    return [
        StagePlan(name=device.name, address=device.address, first=end - count, end=end)
        for device, count, end in zip(devices, counts, ends, strict=True)
    ]


def _fixed_layers(devices: Sequence[Device], layer_count: int) -> list[StagePlan]:
    stages, at = [], 0
    for device in devices:
        assert device.layers is not None
        first, end = device.layers
        if first != at:
            raise InputError(
                f"layers of {device.name}: expected to begin at {at}, where the device before ends, got "
                f"{first}"
            )
        stages.append(StagePlan(name=device.name, address=device.address, first=first, end=end))
        at = end
    if at != layer_count:
        raise InputError(f"layers: the devices hold {at} layers together, but the model has {layer_count}")
    return stages


def pick_context(wanted: int | None, model_limit: int) -> int:
    """The context to reserve memory for: what is wanted, else 4096, and never more than the model's."""
    model_limit = min(model_limit, limits.CONTEXT_MAX)
    if wanted is None:
        return min(CONTEXT_DEFAULT, model_limit)
    if not 1 < wanted <= model_limit:
        raise InputError(f"--context: expected 2 to {model_limit}, the model's limit, got {wanted}")
    return wanted
