"""What a board's kernel and firmware tell of its kind, its heat and its power, from files under a root
folder.

All of it is optional: a file that is missing or holds something else leaves its fact unknown.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flowspec.core.protocol.facts import Board
from flowspec.core.protocol.limits import CELSIUS_RANGE, NAME_CHARS_MAX

TOOL_S = 2.0
"""How long a board's own tool may take to answer."""
_TRIPS_MAX = 16
FIRMWARE = "sys/devices/platform/soc/soc:firmware/get_throttled"
"""Where a Raspberry Pi's kernel shows what its firmware does about heat and a weak supply."""
_CAPPED_NOW = 0b1111
"""Of the Raspberry Pi's `get_throttled`: whatever lowers its clock now."""
_COOLED = ("cpu", "gpu", "processor", "devfreq")
"""In the types of cooling devices that are parts which compute, and no fans."""

RunTool = Callable[..., str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heat:
    """How hot a device is right now and what that does to its clock; None for what nothing tells. The clock
    is its fastest core's, in MHz."""

    celsius: float | None = None
    clock_mhz: float | None = None
    clock_max_mhz: float | None = None
    is_throttled: bool = False


def read_heat(root: Path = Path("/"), firmware: int | None = None) -> Heat:
    """Heat and clocks of the moment, from files alone; `firmware` is `get_throttled` where the kernel has no
    file for it."""
    clock_mhz, max_mhz = _fastest(root)
    told = _firmware(root)
    bits = firmware if told is None else told
    return Heat(
        celsius=read_celsius(root),
        clock_mhz=clock_mhz,
        clock_max_mhz=max_mhz,
        is_throttled=bool((bits or 0) & _CAPPED_NOW) or is_capped(root),
    )


def run_tool(name: str, *flags: str) -> str:
    """What a maker's tool prints; empty where it is missing or fails."""
    try:
        done = subprocess.run(
            [name, *flags], capture_output=True, text=True, timeout=TOOL_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def read_firmware(run: RunTool = run_tool) -> int | None:
    """The Raspberry Pi's `get_throttled` from its own tool, None where there is none."""
    return _bits(run("vcgencmd", "get_throttled").strip().removeprefix("throttled="))


def is_capped(root: Path = Path("/")) -> bool:
    """Whether the kernel holds the clock of a part that computes down because of heat."""
    return any(
        (read_number(device / "cur_state") or 0) > 0
        for device in sorted((root / "sys/class/thermal").glob("cooling_device*"))
        if any(kind in read_text(device / "type").lower() for kind in _COOLED)
    )


def read_board(root: Path = Path("/"), run: RunTool = run_tool) -> Board:
    """The board whose /sys, /proc and /etc are under `root`; `run` runs makers' tools."""
    model = read_text(root / "proc/device-tree/model") or read_text(root / "sys/class/dmi/id/product_name")
    is_jetson = (root / "etc/nv_tegra_release").exists() or "jetson" in model.lower()
    celsius, trip_c = _hottest(root)
    cap_mhz, max_mhz = _clocks(root)
    return Board(
        model=model,
        is_jetson=is_jetson,
        power_mode=_power_mode(run("nvpmodel", "-q")) if is_jetson else "",
        throttled=_throttled(root, run) if "raspberry pi" in model.lower() else None,
        celsius=celsius,
        trip_c=trip_c,
        cpu_mhz=cap_mhz,
        cpu_max_mhz=max_mhz,
        is_capped=is_capped(root),
    )


def read_celsius(root: Path = Path("/")) -> float | None:
    """The hottest thermal zone in degrees Celsius, None without any."""
    return max(
        (celsius for zone in _zones(root) if (celsius := _degrees(zone / "temp")) is not None), default=None
    )


def read_text(path: Path) -> str:
    """The printable part of a small file, trailing zero bytes of the device tree cut off; empty when there is
    none."""
    try:
        text = path.read_bytes()[:4096].decode("utf-8", "replace")
    except OSError:  # some files of sysfs exist and refuse to be read
        return ""
    return "".join(letter for letter in text.strip("\0 \n") if letter.isprintable())[:NAME_CHARS_MAX]


def read_number(path: Path) -> int | None:
    """The whole number in a file; None when there is none."""
    try:
        return int(read_text(path))
    except ValueError:
        return None


def _throttled(root: Path, run: RunTool) -> int | None:
    """The firmware's bit field: from the kernel, else from `vcgencmd get_throttled`, which says
    throttled=0x50000."""
    if read_text(root / FIRMWARE):
        return _firmware(root)
    return read_firmware(run)


def _firmware(root: Path) -> int | None:
    return _bits(read_text(root / FIRMWARE))


def _bits(shown: str) -> int | None:
    try:
        found = int(shown, 16)
    except ValueError:
        return None
    return found if 0 <= found < 1 << 32 else None


def _power_mode(shown: str) -> str:
    """Of `NV Power Mode: MAXN`, the first line of what nvpmodel says, the mode."""
    for line in shown.splitlines():
        if "power mode" in line.lower():
            return "".join(letter for letter in line.partition(":")[2].strip() if letter.isprintable())[
                :NAME_CHARS_MAX
            ]
    return ""


def _zones(root: Path) -> list[Path]:
    return sorted((root / "sys/class/thermal").glob("thermal_zone*"))


def _hottest(root: Path) -> tuple[float | None, float | None]:
    """The hottest thermal zone in degrees Celsius, and where that zone begins to throttle."""
    found: list[tuple[float, float | None]] = []
    for zone in _zones(root):
        celsius = _degrees(zone / "temp")
        if celsius is not None:
            trips = [
                _degrees(zone / f"trip_point_{number}_temp")
                for number in range(_TRIPS_MAX)
                if read_text(zone / f"trip_point_{number}_type") in ("passive", "hot")
            ]
            found.append(
                (celsius, min((trip for trip in trips if trip is not None and trip > 0), default=None))
            )
    return max(found, key=lambda each: each[0], default=(None, None))


def _degrees(path: Path) -> float | None:
    milli = read_number(path)
    celsius = None if milli is None else milli / 1000
    return celsius if celsius is not None and CELSIUS_RANGE[0] <= celsius <= CELSIUS_RANGE[1] else None


def _clocks(root: Path) -> tuple[float | None, float | None]:
    """(cap in force, what the processor can do) of the cores whose cap is lowest beside what they can do, in
    MHz.

    A cap, not the clock of the moment, which is low on any idle board.
    """
    found = []
    for policy in sorted((root / "sys/devices/system/cpu/cpufreq").glob("policy*")):
        cap, most = read_number(policy / "scaling_max_freq"), read_number(policy / "cpuinfo_max_freq")
        if cap and most and 0 < cap <= most < 10**9:
            found.append((cap / 1000, most / 1000))
    return min(found, key=lambda each: each[0] / each[1], default=(None, None))


def _fastest(root: Path) -> tuple[float | None, float | None]:
    """(clock right now, what it can do) in MHz, of the core that runs fastest beside what it can do: the
    others may be idle."""
    found = []
    for policy in sorted((root / "sys/devices/system/cpu/cpufreq").glob("policy*")):
        clock, most = read_number(policy / "scaling_cur_freq"), read_number(policy / "cpuinfo_max_freq")
        if clock and most and 0 < clock < 10**9 and 0 < most < 10**9:
            found.append((min(clock, most) / 1000, most / 1000))
    return max(found, key=lambda each: each[0] / each[1], default=(None, None))
