"""What a board's kernel and firmware show of its kind, heat, power and network, under a root
folder.

All of it is optional: a file that is missing or holds something else leaves its fact unknown.
"""

from __future__ import annotations

import ipaddress
import re
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil

from flowspec.core.protocol.device_messages import Board, Interface
from flowspec.core.protocol.limits import CELSIUS_RANGE, NAME_CHARS_MAX

TOOL_S = 2.0
"""How long a board's own tool may take to answer."""
FIRMWARE = "sys/devices/platform/soc/soc:firmware/get_throttled"
"""Where a Raspberry Pi's kernel shows what its firmware does about heat and a weak supply."""
_CAPPED_NOW = 0b1111
"""Of the Raspberry Pi's `get_throttled`: whatever lowers its clock now."""
_COOLED = ("cpu", "gpu", "processor", "devfreq")
"""In the types of cooling devices that are parts which compute, and no fans."""
_TUNNELS = (65534, 768, 769, 776, 778)
"""ARPHRD_NONE (tun, WireGuard), and the kernel's own tunnels."""
_LOOPBACK = 772
_DEVICE_TYPES = {
    "wlan": "wi-fi",
    "bridge": "bridge",
    **dict.fromkeys(("wireguard", "vxlan", "geneve"), "tunnel"),
    **dict.fromkeys(("bond", "vlan"), "wired"),  # as good as the cards below them
}
"""By the kernel's DEVTYPE."""

RunTool = Callable[..., str]


class Heat(NamedTuple):
    """As `Pong` tells it; None for what nothing shows. The clock is the fastest core's, in MHz."""

    temperature_c: float | None = None
    clock_mhz: float | None = None
    clock_max_mhz: float | None = None
    is_throttled: bool = False


def read_heat(root: Path = Path("/")) -> Heat:
    """Heat and clocks of the moment."""
    bits = _bits(read_text(root / FIRMWARE)) or 0
    return Heat(
        _hottest(root)[0],
        *_clock(root, "scaling_cur_freq", max),
        bool(bits & _CAPPED_NOW) or _is_capped(root),
    )


class Thermometer:
    """Reads heat beside the daemon's other work: some boards' sensors take milliseconds to answer."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root, self._heat = root, Heat()
        self._thread = threading.Thread()

    def last(self) -> Heat:
        """What the last reading brought; begins another."""
        if not self._thread.is_alive():
            self._thread = threading.Thread(target=self._read, name="thermometer", daemon=True)
            self._thread.start()
        return self._heat

    def _read(self) -> None:
        self._heat = read_heat(self._root)


def run_tool(name: str, *flags: str) -> str:
    """What a maker's tool prints; empty where it is missing or fails."""
    try:
        done = subprocess.run(
            [name, *flags], capture_output=True, text=True, timeout=TOOL_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def read_board(root: Path = Path("/"), run: RunTool = run_tool) -> Board:
    """The board whose /sys, /proc and /etc are under `root`; `run` runs makers' tools.

    Its clock is the cap in force, not that of the moment, which is low on any idle board: of the cores whose
    cap is lowest beside what they can do.
    """
    model = read_text(root / "proc/device-tree/model") or read_text(root / "sys/class/dmi/id/product_name")
    is_jetson = (root / "etc/nv_tegra_release").exists() or "jetson" in model.lower()
    throttled, mode = "", None
    if "raspberry pi" in model.lower():
        throttled = read_text(root / FIRMWARE) or run("vcgencmd", "get_throttled")
    if is_jetson:
        mode = re.search(r"power mode.*?:(.*)", run("nvpmodel", "-q"), re.IGNORECASE)
    celsius, zone = _hottest(root)
    cap_mhz, max_mhz = _clock(root, "scaling_max_freq", min)
    return Board(
        model=model,
        is_jetson=is_jetson,
        power_mode=_name(mode[1].strip()) if mode else "",
        throttled=_bits(throttled.strip().removeprefix("throttled=")),
        celsius=celsius,
        trip_c=None if zone is None else _trip(zone),
        cpu_mhz=cap_mhz,
        cpu_max_mhz=max_mhz,
        is_capped=_is_capped(root),
    )


def interface_of(address: str, root: Path = Path("/")) -> Interface | None:
    """This machine's interface that has an IP address; None when none has."""
    try:
        wanted = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if str(wanted) in (each.address.partition("%")[0] for each in addresses):
            return read_interface(name, root)
    return read_interface("lo", root) if wanted.is_loopback else None  # 127.0.0.2, which no list shows


def read_interface(name: str, root: Path = Path("/")) -> Interface:
    """What the kernel shows of an interface."""
    folder = root / "sys/class/net" / name
    return Interface(
        name=_name(name),
        kind=_kind(folder),
        speed_mbps=max(0, read_number(folder / "speed") or 0),
        mtu=max(0, read_number(folder / "mtu") or 0),
    )


def _kind(folder: Path) -> str:
    number = read_number(folder / "type")
    uevent = re.search(r"^DEVTYPE=(\w+)", _read(folder / "uevent"), re.MULTILINE)
    kinds = (
        ("loopback", number == _LOOPBACK),
        ("wi-fi", (folder / "wireless").exists() or (folder / "phy80211").exists()),
        ("bridge", (folder / "bridge").exists()),
        ("tunnel", (folder / "tun_flags").exists() or number in _TUNNELS),
        (_DEVICE_TYPES.get(uevent[1], "") if uevent else "", True),
        ("wired", (folder / "device").exists()),
        ("virtual", number is not None),
    )
    return next((kind for kind, is_it in kinds if kind and is_it), "unknown")


def read_text(path: Path) -> str:
    """The printable part of a small file, trailing zero bytes of the device tree cut off; empty when there is
    none."""
    return _name(_read(path).strip("\0 \n"))


def read_number(path: Path) -> int | None:
    """The whole number in a file; None when there is none."""
    try:
        return int(read_text(path))
    except ValueError:
        return None


def _read(path: Path) -> str:
    try:
        return path.read_bytes()[:4096].decode("utf-8", "replace")
    except OSError:  # some files of sysfs exist and refuse to be read
        return ""


def _name(text: str) -> str:
    return "".join(filter(str.isprintable, text))[:NAME_CHARS_MAX]


def _bits(shown: str) -> int | None:
    try:
        return bits if 0 <= (bits := int(shown, 16)) < 1 << 32 else None
    except ValueError:
        return None


def _is_capped(root: Path) -> bool:
    """Whether the kernel holds the clock of a part that computes down because of heat."""
    devices = (root / "sys/class/thermal").glob("cooling_device*")
    held = [device for device in devices if (read_number(device / "cur_state") or 0) > 0]
    return any(kind in read_text(device / "type").lower() for device in held for kind in _COOLED)


def _hottest(root: Path) -> tuple[float | None, Path | None]:
    """The hottest thermal zone, in degrees Celsius."""
    zones = sorted((root / "sys/class/thermal").glob("thermal_zone*"))
    degrees = [(celsius, zone) for zone in zones if (celsius := _degrees(zone / "temp")) is not None]
    return max(degrees, key=lambda each: each[0], default=(None, None))


def _trip(zone: Path) -> float | None:
    """Where a thermal zone begins to throttle."""
    kinds = [path for path in zone.glob("trip_point_*_type") if read_text(path) in ("passive", "hot")]
    trips = [_degrees(path.with_name(path.name.replace("_type", "_temp"))) for path in kinds]
    return min((trip for trip in trips if trip is not None and trip > 0), default=None)


def _degrees(path: Path) -> float | None:
    milli = read_number(path)
    return None if milli is None or not CELSIUS_RANGE[0] <= milli / 1000 <= CELSIUS_RANGE[1] else milli / 1000


Clocks = tuple[float | None, float | None]


def _clock(root: Path, name: str, pick: Callable[..., Clocks]) -> Clocks:
    """The clock in a file of a group of cores, and what they can do, in MHz: of the group whose share of that
    `pick` picks."""
    clocks = []
    for policy in sorted((root / "sys/devices/system/cpu/cpufreq").glob("policy*")):
        clock, most = read_number(policy / name) or 0, read_number(policy / "cpuinfo_max_freq") or 0
        if clock > 0 and 0 < most < 10**9:
            clocks.append((min(clock, most) / 1000, most / 1000))
    return pick(clocks, key=lambda each: each[0] / each[1]) if clocks else (None, None)
