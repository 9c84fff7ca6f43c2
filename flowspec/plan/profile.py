"""Device profiles: what a board can do, read from `devices/*.toml`.

A profile states peak figures as the maker publishes them and, apart from these, the shares of them that
inference reaches. `flowspec profile` measures both together and writes the same kind of file.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from flowspec.core.protocol.precision import PRECISIONS
from flowspec.errors import InputError, meant
from flowspec.plan.tables import read_toml

RATES = {
    "memory_gb_per_s": (1e-3, 1e6),
    "memory_efficiency": (1e-3, 1.0),
    "compute_efficiency": (1e-4, 1.0),
    "layer_us": (0.0, 1e7),
    "pass_us": (0.0, 1e7),
}
TFLOPS = (1e-6, 1e6)
"""The slowest boards and the largest servers are far from all of these bounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """One kind of device.

    `memory_gb_per_s` and `tflops` (by precision, dense) are peaks; `memory_efficiency` and
    `compute_efficiency` the shares of these that a pass over layers reaches. `serial` is the share of the
    computing that reading does not hide: 0 is a roofline (GPUs), 1 the sum of both (small CPUs, whose cores
    do one after the other). `layer_us` is spent on each layer whatever its size (launching kernels, Python),
    `pass_us` on each pass. `idle_w` and `busy_w` are for the whole board. A
    `caution` is why FlowSpec does not run there as the profile says: such a board is not advised.
    """

    name: str
    memory_gb: float
    memory_gb_per_s: float
    memory_efficiency: float
    tflops: Mapping[str, float]
    compute_efficiency: float
    serial: float = 0.0
    layer_us: float = 0.0
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
            layer_us=self.layer_us * factor,
            pass_us=self.pass_us * factor,
        )

    def flops(self, precision: str) -> float:
        """Operations per second; raises `InputError` for a precision that the profile says nothing about."""
        is_unpacked = PRECISIONS[precision].is_unpacked
        found = self.tflops.get(precision) or (max(self.tflops.values()) if is_unpacked else None)
        if found is None:
            raise InputError(
                f"device {self.name}: expected a precision among {', '.join(self.tflops)}, got {precision}"
            )
        return found * 1e12 * self.compute_efficiency


def implausible(profile: DeviceProfile) -> str:
    """What of a profile no device can be, in a few words; nothing if all is plausible. Reckoning needs
    numbers within reason."""
    for name, (least, most) in RATES.items():
        if not least <= (value := getattr(profile, name)) <= most:
            return f"a speed of {value:g} ({name})"
    for name, value in profile.tflops.items():
        if not TFLOPS[0] <= value <= TFLOPS[1]:
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


def find_profile(name: str) -> DeviceProfile:
    """A profile by the name of a board that FlowSpec ships one for, or from a file; raises `InputError`."""
    if name.endswith(".toml"):
        return read_profile(Path(name))
    for folder in folders():
        for path in folder.glob("*.toml"):
            if path.stem == name:
                return read_profile(path)
    raise InputError(
        f"device: expected a .toml file or one of {', '.join(profile_names())}, got {name!r:.80}"
        f"{meant(name, profile_names())}"
    )


def read_profile(path: Path) -> DeviceProfile:
    """Reads a profile; raises `InputError` naming file, key and what was expected."""
    table = read_toml(path, "a device profile")
    memory, compute = table.table("memory"), table.table("compute")
    overhead, power = table.table("overhead", needed=False), table.table("power", needed=False)
    compute_keys = {"efficiency", "serial", *PRECISIONS}
    tflops = {name: compute.number(name) for name in PRECISIONS if name in compute.data}
    if not tflops:
        raise InputError(f"{path}: compute: expected TFLOP/s for at least one of {', '.join(PRECISIONS)}")
    found = DeviceProfile(
        name=path.stem,
        memory_gb=memory.number("gb"),
        memory_gb_per_s=memory.number("gb_per_s"),
        memory_efficiency=memory.number("efficiency", most=1.0),
        tflops=tflops,
        compute_efficiency=compute.number("efficiency", most=1.0),
        serial=compute.number("serial", 0.0, least=0.0, most=1.0),
        layer_us=overhead.number("layer_us", 0.0, least=0.0),
        pass_us=overhead.number("pass_us", 0.0, least=0.0),
        idle_w=power.number("idle_w", 0.0, least=0.0),
        busy_w=power.number("busy_w", 0.0, least=0.0),
        caution=table.text("caution") if "caution" in table.data else "",
    )
    table.check({"description", "caution", "memory", "compute", "overhead", "power", "measured"})
    memory.check({"gb", "gb_per_s", "efficiency"})
    compute.check(compute_keys)
    overhead.check({"layer_us", "pass_us"})
    power.check({"idle_w", "busy_w"})
    if wrong := implausible(found):
        raise InputError(f"{path}: expected what a device can be, got {wrong}")
    if found.busy_w < found.idle_w:
        raise InputError(
            f"{path}: power: expected busy_w of at least idle_w, got {found.busy_w:g} and {found.idle_w:g}"
        )
    return found
