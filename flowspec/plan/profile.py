"""Device profiles: what a board can do, read from `devices/*.toml`.

A profile states peak figures as the maker publishes them and, apart from these, the shares of them that
inference reaches. What the kernels of packed precisions reach follows from neither: they have rates of their
own. `flowspec profile` measures all of it and writes the same kind of file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct, field, to_builtins
from msgspec.structs import asdict, replace

from flowspec.core.protocol.device_messages import Facts, PackedSpeed, Speed
from flowspec.core.protocol.limits import NAME_CHARS_MAX
from flowspec.core.protocol.precision import PACKED, UNPACKED
from flowspec.errors import InputError
from flowspec.plan.memory import mib
from flowspec.plan.tables import (
    NotNegative,
    Positive,
    Share,
    Table,
    Text,
    at,
    find_file,
    read_toml,
    shipped_files,
)
from flowspec.validation import NOTHING, Misfit, expect, fit, shown

FOLDER = "devices"
MEMORY_BYTES = (16 << 20, 1 << 50)
"""What a device may have of it."""
GBPerS = Annotated[float, Meta(ge=1e-3, le=1e6)]
Tflops = Annotated[float, Meta(ge=1e-6, le=1e6)]
ReadingShare = Annotated[float, Meta(ge=1e-3, le=1)]
ComputingShare = Annotated[float, Meta(ge=1e-4, le=1)]
Microseconds = Annotated[float, Meta(ge=0, le=1e7)]
"""The slowest boards and the largest servers are far from all of these bounds."""
EXPERT_SHARE_CPU, EXPERT_SHARE_GPU = 0.04, 0.25
"""Of `layer_us`: `expert_us` of a profile that says none. A CPU's kernels take all experts in one call, which
was measured; a GPU starts each, which is assumed to be two or three starts where a layer is ten
(docs/devices.md)."""


class KernelRates(Table, frozen=True, kw_only=True):
    """What the kernels of one precision reach: GB/s of its weights as they lie in memory, TFLOP/s, and the
    share of the computing that reading does not hide: 0 is a roofline (GPUs), 1 the sum of both (small CPUs,
    whose cores do one after the other).

    `basis` says where that is known from, where a profile has it apart; for people.
    """

    gb_per_s: GBPerS
    tflops: Tflops
    serial: Share = 0.0
    basis: str = ""

    def slowed(self, factor: float) -> KernelRates:
        return replace(self, gb_per_s=self.gb_per_s / factor, tflops=self.tflops / factor)


class DeviceProfile(Struct, frozen=True, kw_only=True):
    """One kind of device.

    `memory_gb_per_s` and `tflops` (by precision that is not packed, dense) are peaks; `memory_efficiency` and
    `compute_efficiency` the shares of these that a pass over layers reaches, `serial` as in `KernelRates`.
    `packed` has the rates of packed precisions. `layer_us` is spent on each layer whatever its size
    (launching kernels, Python), `expert_us` on each expert of a mixture that any row of a layer's pass
    chooses (0: one kernel chooses and runs all), `pass_us` on each pass. `idle_w` and `busy_w` are for the
    whole board. A `caution` is why FlowSpec does not run there as the profile says: such a board is not
    advised.
    """

    name: str
    memory_gb: float
    memory_gb_per_s: GBPerS
    memory_efficiency: ReadingShare
    tflops: Mapping[str, Tflops]
    compute_efficiency: ComputingShare
    serial: Share = 0.0
    packed: Mapping[str, KernelRates] = field(default_factory=dict)
    layer_us: Microseconds = 0.0
    expert_us: Microseconds = 0.0
    pass_us: Microseconds = 0.0
    idle_w: float = 0.0
    busy_w: float = 0.0
    caution: str = ""

    def energy_j(self, time_s: float, busy_s: float) -> float:
        """What the board takes in `time_s` of which it computes for `busy_s`."""
        return self.idle_w * time_s + (self.busy_w - self.idle_w) * min(busy_s, time_s)

    def bytes_per_s(self) -> float:
        return self.memory_gb_per_s * 1e9 * self.memory_efficiency

    def slowed(self, factor: float) -> DeviceProfile:
        """A device that takes `factor` times as long for everything."""
        return replace(
            self,
            memory_gb_per_s=self.memory_gb_per_s / factor,
            tflops={precision: rate / factor for precision, rate in self.tflops.items()},
            packed={precision: rates.slowed(factor) for precision, rates in self.packed.items()},
            layer_us=self.layer_us * factor,
            expert_us=self.expert_us * factor,
            pass_us=self.pass_us * factor,
        )

    def rates(self, precision: str) -> KernelRates:
        """Of the kernels that multiply a precision's weights; raises `InputError` for one that the profile
        says nothing about."""
        return self.packed.get(precision) or self.number_rates(precision)

    def number_rates(self, precision: str) -> KernelRates:
        """As `rates`, of what is not packed: keys and values, too.

        A packed precision computes so as the fastest of the others; its weights do where the profile has no
        rates for them.
        """
        tflops = max(self.tflops.values()) if precision in PACKED else self.tflops.get(precision)
        if tflops is None:
            known = ", ".join((*self.tflops, *PACKED))
            raise InputError(f"device {self.name}: expected a precision among {known}, got {precision}")
        return KernelRates(
            gb_per_s=self.memory_gb_per_s * self.memory_efficiency,
            tflops=tflops * self.compute_efficiency,
            serial=self.serial,
        )

    def basis(self, precision: str) -> str:
        """Where the rates of a packed precision are from, or what is taken in their place, for people; empty
        for others."""
        if precision in self.packed:
            return self.packed[precision].basis
        if precision not in PACKED:
            return ""
        fastest = max(self.tflops, key=lambda each: self.tflops[each])
        return (
            f"not measured; taken to be read as fast as memory is, and computed as {fastest} is (flowspec "
            "profile measures it)"
        )


def profile_names() -> list[str]:
    return sorted(shipped_files(FOLDER))


def find_profile(name: str, *, what: str = "") -> DeviceProfile:
    """A profile by the name of a board that FlowSpec ships one for, or from a file; raises `InputError`, of
    which `what` names the place."""
    path = find_file(name, FOLDER, what or "device")
    with at(what) if what else contextlib.nullcontext():
        return read_profile(path)


class MemoryTable(Table, frozen=True, kw_only=True):
    gb: Positive
    gb_per_s: GBPerS
    efficiency: ReadingShare


class ComputeTable(Table, frozen=True, kw_only=True):
    """TFLOP/s by precision that is not packed."""

    efficiency: ComputingShare
    serial: Share = 0.0
    float32: Tflops | None = None
    bfloat16: Tflops | None = None
    float16: Tflops | None = None

    @property
    def tflops(self) -> dict[str, float]:
        return {name: rate for name in UNPACKED if (rate := getattr(self, name)) is not None}

    def __post_init__(self) -> None:
        if not self.tflops:
            raise Misfit((), f"TFLOP/s for at least one of {', '.join(UNPACKED)}", NOTHING)


class OverheadTable(Table, frozen=True, kw_only=True):
    layer_us: Microseconds = 0.0
    expert_us: Microseconds | None = None
    pass_us: Microseconds = 0.0


class PowerTable(Table, frozen=True, kw_only=True):
    idle_w: NotNegative = 0.0
    busy_w: NotNegative = 0.0

    def __post_init__(self) -> None:
        expect(self.busy_w >= self.idle_w, "busy_w", self.busy_w, f"idle_w, {self.idle_w:g}, or more")


class ProfileFile(Table, frozen=True, kw_only=True):
    memory: MemoryTable
    compute: ComputeTable
    packed: Mapping[str, KernelRates] = field(default_factory=dict)
    overhead: OverheadTable = OverheadTable()
    power: PowerTable = PowerTable()
    caution: Text | None = None
    description: Any = None
    measured: Any = None

    def __post_init__(self) -> None:
        for name, rates in self.packed.items():
            if name not in PACKED:
                raise Misfit(("packed", name), "", rates, PACKED)
            if not rates.basis or not rates.basis.isprintable():
                raise Misfit(("packed", name, "basis"), "a printable text", rates.basis or NOTHING)


def read_profile(path: Path) -> DeviceProfile:
    """Reads a profile; raises `InputError` naming file, key and what was expected."""
    file = read_toml(path, ProfileFile, "a device profile")
    memory, compute, overhead = file.memory, file.compute, asdict(file.overhead)
    if overhead["expert_us"] is None:
        share = EXPERT_SHARE_CPU if compute.serial else EXPERT_SHARE_GPU
        overhead["expert_us"] = share * file.overhead.layer_us
    return DeviceProfile(
        name=path.stem,
        memory_gb=memory.gb,
        memory_gb_per_s=memory.gb_per_s,
        memory_efficiency=memory.efficiency,
        tflops=compute.tflops,
        compute_efficiency=compute.efficiency,
        serial=compute.serial,
        packed=file.packed,
        caution=file.caution or "",
        **overhead,
        **asdict(file.power),
    )


# ------------------------------------------------------------------------------- as daemons tell them


def speed_of(profile: DeviceProfile, source: str) -> Speed:
    """A profile on its way, without memory, power and words: a daemon tells what memory is free."""
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
    """What of it cannot be, in a few words; nothing if all can. A head counts on it, and a device may be
    broken or lie."""
    least, most = MEMORY_BYTES
    total, free = facts.memory_total_bytes, facts.memory_available_bytes
    if not least <= total <= most:
        return f"{mib(total)} of memory"
    if free > total:
        return f"{mib(free)} of memory free of {mib(total)}"
    try:
        if facts.speed is not None:
            fit(to_builtins(profile_of(facts.speed, total)), DeviceProfile)
    except Misfit as misfit:
        return f"a {misfit.field} of {shown(misfit.value)}"
    return ""


def completed(profile: DeviceProfile, precision: str) -> DeviceProfile:
    """The profile with TFLOP/s for `precision`: where it says none, the least that it says of any, for what a
    device lacks it widens. For packed ones every profile has some (`DeviceProfile.rates`)."""
    if precision in profile.tflops or precision in PACKED:
        return profile
    return replace(profile, tflops={**profile.tflops, precision: min(profile.tflops.values())})
