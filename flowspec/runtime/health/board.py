"""What a board's kernel and firmware tell of its kind, its heat and its power, from files under a root
folder.

All of it is optional: a file that is missing or holds something else leaves its fact unknown.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flowspec.core.protocol.device_messages import Board
from flowspec.core.protocol.limits import CELSIUS_RANGE, NAME_CHARS_MAX

TOOL_S = 2.0
"""How long a board's own tool may take to answer."""
TOOL_EVERY = 10
"""Readings, about one a second, for each question to a Raspberry Pi's own tool where its kernel does not
tell."""
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
    clocks = [(min(clock, most), most) for clock, most in _clocks(root, "scaling_cur_freq")]
    clock_mhz, max_mhz = max(clocks, key=lambda each: each[0] / each[1], default=(None, None))
    bits = _bits(read_text(root / FIRMWARE))
    bits = (firmware or 0) if bits is None else bits
    return Heat(
        celsius=_hottest(root)[0],
        clock_mhz=clock_mhz,
        clock_max_mhz=max_mhz,
        is_throttled=bool(bits & _CAPPED_NOW) or is_capped(root),
    )


class Thermometer:
    """Reads heat beside the daemon's other work: some boards' sensors take milliseconds to answer. Each
    question brings what the one before had read; there is no thread before the first question, and none where
    nothing tells."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._heat = Heat()
        self._asked = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_stopping = False

    def last(self) -> Heat:
        """What is known of the device's heat, nothing where that is not known (yet)."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="thermometer", daemon=True)
            self._thread.start()
        self._asked.set()
        return self._heat

    def stop(self) -> None:
        self._is_stopping = True
        self._asked.set()

    def _run(self) -> None:
        is_pi = "raspberry pi" in read_text(self._root / "proc/device-tree/model").lower()
        needs_tool = is_pi and not read_text(self._root / FIRMWARE)
        firmware, readings = None, 0
        while not self._is_stopping:
            self._asked.clear()
            if needs_tool and readings % TOOL_EVERY == 0:
                firmware = read_firmware()
            readings += 1
            self._heat = read_heat(self._root, firmware)
            if self._heat == Heat() and firmware is None:
                return
            self._asked.wait()


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
    """The board whose /sys, /proc and /etc are under `root`; `run` runs makers' tools.

    Its clock is the cap in force, not that of the moment, which is low on any idle board: of the cores whose
    cap is lowest beside what they can do.
    """
    model = read_text(root / "proc/device-tree/model") or read_text(root / "sys/class/dmi/id/product_name")
    is_jetson = (root / "etc/nv_tegra_release").exists() or "jetson" in model.lower()
    throttled = None
    if "raspberry pi" in model.lower():
        shown = read_text(root / FIRMWARE)
        throttled = _bits(shown) if shown else read_firmware(run)
    celsius, zone = _hottest(root)
    caps = [(cap, most) for cap, most in _clocks(root, "scaling_max_freq") if cap <= most]
    cap_mhz, max_mhz = min(caps, key=lambda each: each[0] / each[1], default=(None, None))
    return Board(
        model=model,
        is_jetson=is_jetson,
        power_mode=_power_mode(run("nvpmodel", "-q")) if is_jetson else "",
        throttled=throttled,
        celsius=celsius,
        trip_c=None if zone is None else _trip(zone),
        cpu_mhz=cap_mhz,
        cpu_max_mhz=max_mhz,
        is_capped=is_capped(root),
    )


def read_text(path: Path) -> str:
    """The printable part of a small file, trailing zero bytes of the device tree cut off; empty when there is
    none."""
    try:
        text = path.read_bytes()[:4096].decode("utf-8", "replace")
    except OSError:  # some files of sysfs exist and refuse to be read
        return ""
    return _name(text.strip("\0 \n"))


def read_number(path: Path) -> int | None:
    """The whole number in a file; None when there is none."""
    try:
        return int(read_text(path))
    except ValueError:
        return None


def _name(text: str) -> str:
    return "".join(filter(str.isprintable, text))[:NAME_CHARS_MAX]


def _bits(shown: str) -> int | None:
    try:
        found = int(shown, 16)
    except ValueError:
        return None
    return found if 0 <= found < 1 << 32 else None


def _power_mode(shown: str) -> str:
    """Of `NV Power Mode: MAXN`, the first line of what nvpmodel says, the mode."""
    modes = (line.partition(":")[2] for line in shown.splitlines() if "power mode" in line.lower())
    return _name(next(modes, "").strip())


def _hottest(root: Path) -> tuple[float | None, Path | None]:
    """The hottest thermal zone, in degrees Celsius."""
    zones = sorted((root / "sys/class/thermal").glob("thermal_zone*"))
    found = [(celsius, zone) for zone in zones if (celsius := _degrees(zone / "temp")) is not None]
    return max(found, key=lambda each: each[0], default=(None, None))


def _trip(zone: Path) -> float | None:
    """Where a thermal zone begins to throttle."""
    trips = [
        _degrees(zone / f"trip_point_{number}_temp")
        for number in range(_TRIPS_MAX)
        if read_text(zone / f"trip_point_{number}_type") in ("passive", "hot")
    ]
    return min((trip for trip in trips if trip is not None and trip > 0), default=None)


def _degrees(path: Path) -> float | None:
    milli = read_number(path)
    celsius = None if milli is None else milli / 1000
    return celsius if celsius is not None and CELSIUS_RANGE[0] <= celsius <= CELSIUS_RANGE[1] else None


def _clocks(root: Path, name: str) -> list[tuple[float, float]]:
    """Of each group of cores the clock that a file has, and what it can do, in MHz."""
    found = []
    for policy in sorted((root / "sys/devices/system/cpu/cpufreq").glob("policy*")):
        clock, most = read_number(policy / name), read_number(policy / "cpuinfo_max_freq")
        if clock and most and 0 < clock < 10**9 and 0 < most < 10**9:
            found.append((clock / 1000, most / 1000))
    return found
