"""Which network interface an address is reached by, and what kind of interface it is, by /sys/class/net."""

from __future__ import annotations

import ipaddress
import socket as sockets
from pathlib import Path

import psutil

from flowspec.core.protocol.device_messages import Interface
from flowspec.runtime.addresses import ADDRESSES
from flowspec.runtime.health.board import read_number, read_text

_LOOPBACK_TYPE = 772
_TUNNEL_TYPES = {65534, 768, 769, 776, 778}
"""ARPHRD_NONE (tun, WireGuard), and the kernel's own tunnels."""
_DEVICE_TYPES = {
    "wlan": "wi-fi",
    "bridge": "bridge",
    "wireguard": "tunnel",
    "vxlan": "tunnel",
    "geneve": "tunnel",
    "bond": "wired",
    "vlan": "wired",
}
"""What the kernel calls itself by DEVTYPE; bonds and VLANs are as good as the cards below them."""


def resolve(host: str) -> str:
    """The IP address of a host name; IPv6 brackets are taken off. Raises `InputError`."""
    return ADDRESSES.wait_for(host)


def own_address(towards: str) -> str:
    """This machine's address on the way to an IP address; empty when there is no way. Sends nothing."""
    family = sockets.AF_INET6 if ":" in towards else sockets.AF_INET
    with sockets.socket(family, sockets.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def interface_of(address: str, root: Path = Path("/")) -> Interface | None:
    """This machine's interface that has an IP address; None when none has."""
    try:
        wanted = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if (
                each.family in (sockets.AF_INET, sockets.AF_INET6)
                and ipaddress.ip_address(each.address.partition("%")[0]) == wanted
            ):
                return read_interface(name, root)
    if wanted.is_loopback:  # 127.0.0.2 and its like, which no list shows
        return read_interface("lo", root)
    return None


def read_interface(name: str, root: Path = Path("/")) -> Interface:
    """What the kernel shows of an interface."""
    folder = root / "sys/class/net" / name
    return Interface(
        name="".join(filter(str.isprintable, name)),
        kind=_kind(folder),
        speed_mbps=max(0, read_number(folder / "speed") or 0),
        mtu=max(0, read_number(folder / "mtu") or 0),
    )


def _kind(folder: Path) -> str:
    if not folder.exists():
        return "unknown"
    number = read_number(folder / "type")
    if number == _LOOPBACK_TYPE:
        return "loopback"
    if (folder / "wireless").exists() or (folder / "phy80211").exists():
        return "wi-fi"
    if (folder / "bridge").exists():
        return "bridge"
    if (folder / "tun_flags").exists() or number in _TUNNEL_TYPES:
        return "tunnel"
    try:
        lines = (folder / "uevent").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    kinds = (
        _DEVICE_TYPES.get(line.removeprefix("DEVTYPE=")) for line in lines if line.startswith("DEVTYPE=")
    )
    if kind := next(filter(None, kinds), None):
        return kind
    if (folder / "device").exists():
        return "wired"
    return "virtual" if read_text(folder / "type") else "unknown"
