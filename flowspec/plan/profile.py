"""Device profiles: what a board can do, read from `devices/*.toml`.

A profile states peak figures as the maker publishes them and, apart from these, the shares of them that
inference reaches. What the kernels of packed precisions reach follows from neither: they have rates of their
own. `flowspec profile` measures all of it and writes the same kind of file.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from flowspec.core.protocol.precision import PACKED, UNPACKED
from flowspec.errors import InputError, meant
from flowspec.plan.tables import Table, read_toml

RATES = {
    "memory_gb_per_s": (1e-3, 1e6),
    "memory_efficiency": (1e-3, 1.0),
    "compute_efficiency": (1e-4, 1.0),
    "layer_us": (0.0, 1e7),
    "expert_us": (0.0, 1e7),
    "pass_us": (0.0, 1e7),
}
TFLOPS = (1e-6, 1e6)
"""The slowest boards and the largest servers are far from all of these bounds."""
EXPERT_SHARE_CPU, EXPERT_SHARE_GPU = 0.04, 0.25
"""Of `layer_us`: `expert_us` of a profile that says none. A CPU's kernels take all experts in one call, which
was measured; a GPU starts each, which is assumed to be two or three starts where a layer is ten
(docs/devices.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRates:
    """What the kernels of one precision reach: GB/s of its weights as they lie in memory, TFLOP/s, and the
    share of the computing that reading does not hide: 0 is a roofline (GPUs), 1 the sum of both (small CPUs,
    whose cores do one after the other).

    `basis` says where that is known from, where a profile has it apart; for people.
    """

    gb_per_s: float
    tflops: float
    serial: float
    basis: str = ""

    def slowed(self, factor: float) -> KernelRates:
        return replace(self, gb_per_s=self.gb_per_s / factor, tflops=self.tflops / factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
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
    memory_gb_per_s: float
    memory_efficiency: float
    tflops: Mapping[str, float]
    compute_efficiency: float
    serial: float = 0.0
    packed: Mapping[str, KernelRates] = field(default_factory=dict)
    layer_us: float = 0.0
    expert_us: float = 0.0
    pass_us: float = 0.0
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


def implausible(profile: DeviceProfile) -> str:
    """What of a profile no device can be, in a few words; nothing if all is plausible. Reckoning needs
    numbers within reason."""
    for name, (least, most) in RATES.items():
        if not least <= (value := getattr(profile, name)) <= most:
            return f"a speed of {value:g} ({name})"
    reading, computing = RATES["memory_gb_per_s"], TFLOPS
    for name, rates in profile.packed.items():
        if not reading[0] <= rates.gb_per_s <= reading[1]:
            return f"a speed of {rates.gb_per_s:g} (gb_per_s in {name})"
    rated = {name: rates.tflops for name, rates in profile.packed.items()}
    for name, value in {**profile.tflops, **rated}.items():
        if not computing[0] <= value <= computing[1]:
            return f"{value:g} TFLOP/s in {name}"
    return ""


def folders() -> list[Path]:
    """Where profiles are: beside the package in a checkout, under the environment's `share` when
    installed."""
    return [
        Path(__file__).resolve().parents[2] / "devices",
        Path(sys.prefix) / "share" / "flowspec" / "devices",
    ]


def profile_names() -> list[str]:
    return sorted({path.stem for folder in folders() for path in folder.glob("*.toml")})


def find_profile(name: str, *, what: str = "") -> DeviceProfile:
    """A profile by the name of a board that FlowSpec ships one for, or from a file; raises `InputError`, of
    which `what` names the place."""
    if name.endswith(".toml"):
        try:
            return read_profile(Path(name))
        except InputError as error:
            raise InputError(f"{what}: {error}" if what else str(error)) from None
    for folder in folders():
        for path in folder.glob("*.toml"):
            if path.stem == name:
                return read_profile(path)
    raise InputError(
        f"{what or 'device'}: expected a .toml file or one of {', '.join(profile_names())}, got {name!r:.80}"
        f"{meant(name, profile_names())}"
    )


def read_profile(path: Path) -> DeviceProfile:
    """Reads a profile; raises `InputError` naming file, key and what was expected."""
    table = read_toml(path, "a device profile")
    memory, compute = table.table("memory"), table.table("compute")
    overhead, power = table.table("overhead", needed=False), table.table("power", needed=False)
    packed = table.table("packed", needed=False)
    tflops = {name: compute.number(name) for name in UNPACKED if name in compute.data}
    if not tflops:
        raise InputError(f"{path}: compute: expected TFLOP/s for at least one of {', '.join(UNPACKED)}")
    layer_us = overhead.number("layer_us", 0.0, least=0.0)
    serial = compute.number("serial", 0.0, least=0.0, most=1.0)
    expert_share = EXPERT_SHARE_CPU if serial else EXPERT_SHARE_GPU
    found = DeviceProfile(
        name=path.stem,
        memory_gb=memory.number("gb"),
        memory_gb_per_s=memory.number("gb_per_s"),
        memory_efficiency=memory.number("efficiency", most=1.0),
        tflops=tflops,
        compute_efficiency=compute.number("efficiency", most=1.0),
        serial=serial,
        packed={name: _read_rates(packed.table(name)) for name in PACKED if name in packed.data},
        layer_us=layer_us,
        expert_us=overhead.number("expert_us", expert_share * layer_us, least=0.0),
        pass_us=overhead.number("pass_us", 0.0, least=0.0),
        idle_w=power.number("idle_w", 0.0, least=0.0),
        busy_w=power.number("busy_w", 0.0, least=0.0),
        caution=table.text("caution") if "caution" in table.data else "",
    )
    table.check({"description", "caution", "memory", "compute", "packed", "overhead", "power", "measured"})
    memory.check({"gb", "gb_per_s", "efficiency"})
    compute.check({"efficiency", "serial", *UNPACKED})
    packed.check(PACKED)
    overhead.check({"layer_us", "expert_us", "pass_us"})
    power.check({"idle_w", "busy_w"})
    if wrong := implausible(found):
        raise InputError(f"{path}: expected what a device can be, got {wrong}")
    if found.busy_w < found.idle_w:
        raise InputError(
            f"{path}: power: expected busy_w of at least idle_w, got {found.busy_w:g} and {found.idle_w:g}"
        )
    return found


def _read_rates(table: Table) -> KernelRates:
    found = KernelRates(
        gb_per_s=table.number("gb_per_s"),
        tflops=table.number("tflops"),
        serial=table.number("serial", 0.0, least=0.0, most=1.0),
        basis=table.text("basis"),
    )
    table.check({"gb_per_s", "tflops", "serial", "basis"})
    return found
