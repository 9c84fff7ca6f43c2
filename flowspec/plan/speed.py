"""Device profiles as daemons tell them (`core.protocol.device_messages.Speed`): whether they can be true, and
what to make of one that says nothing about a precision."""

from __future__ import annotations

from msgspec.structs import replace

from flowspec.core.protocol.device_messages import Facts, PackedSpeed, Speed
from flowspec.core.protocol.limits import NAME_CHARS_MAX
from flowspec.core.protocol.precision import PACKED, UNPACKED
from flowspec.plan.memory import mib
from flowspec.plan.profile import DeviceProfile, KernelRates, implausible

MEMORY_BYTES = (16 << 20, 1 << 50)
"""What a device may have of it."""


def speed_of(profile: DeviceProfile, source: str) -> Speed:
    """A profile on its way; memory and power stay behind, for a daemon tells what memory is free, and so do
    words."""
    return Speed(
        name="".join(letter for letter in profile.name[:NAME_CHARS_MAX] if letter.isprintable()),
        source=source,
        gb_per_s=profile.memory_gb_per_s,
        memory_efficiency=profile.memory_efficiency,
        **{precision: profile.tflops.get(precision, 0.0) for precision in UNPACKED},
        compute_efficiency=profile.compute_efficiency,
        serial=profile.serial,
        packed=tuple(
            PackedSpeed(dtype=dtype, gb_per_s=rates.gb_per_s, tflops=rates.tflops, serial=rates.serial)
            for dtype, rates in profile.packed.items()
        ),
        layer_us=profile.layer_us,
        expert_us=profile.expert_us,
        pass_us=profile.pass_us,
    )


def profile_of(speed: Speed, memory_bytes: int) -> DeviceProfile:
    """The profile that a daemon told; `memory_bytes` is all of its device's."""
    return DeviceProfile(
        name=speed.name,
        memory_gb=memory_bytes / 1e9,
        memory_gb_per_s=speed.gb_per_s,
        memory_efficiency=speed.memory_efficiency,
        tflops={name: rate for name in UNPACKED if (rate := getattr(speed, name))},
        compute_efficiency=speed.compute_efficiency,
        serial=speed.serial,
        packed={
            each.dtype: KernelRates(gb_per_s=each.gb_per_s, tflops=each.tflops, serial=each.serial)
            for each in speed.packed
        },
        layer_us=speed.layer_us,
        expert_us=speed.expert_us,
        pass_us=speed.pass_us,
    )


def why_insane(facts: Facts) -> str:
    """What of it cannot be, in a few words; nothing if all can. A head reckons with
    it, and a device may be broken or lie."""
    least, most = MEMORY_BYTES
    total, free = facts.memory_total_bytes, facts.memory_available_bytes
    if not least <= total <= most:
        return f"{mib(total)} of memory"
    if free > total:
        return f"{mib(free)} of memory free of {mib(total)}"
    return "" if facts.speed is None else implausible(profile_of(facts.speed, facts.memory_total_bytes))


def completed(profile: DeviceProfile, precision: str) -> DeviceProfile:
    """The profile with TFLOP/s for `precision`: where it says none, the least that it says of any, for what a
    device lacks it widens. For packed ones every profile has some (`DeviceProfile.rates`)."""
    if precision in profile.tflops or precision in PACKED:
        return profile
    return replace(profile, tflops={**profile.tflops, precision: min(profile.tflops.values())})
