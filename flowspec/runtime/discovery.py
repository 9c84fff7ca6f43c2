"""Daemons that make themselves known on the local network (zeroconf, RFC 6762 and 6763), and how they are
found.

Only a daemon that was asked to announces itself, and only on the interfaces that it listens on; what it tells
is in `Announced`. Whoever is in the network can answer a search, too: an announcement is a hint where to ask,
and nothing is believed of it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
import socket as sockets
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from flowspec.core.protocol import limits
from flowspec.errors import ClusterError, InputError
from flowspec.extras import how_to_get
from flowspec.runtime.addresses import ADDRESSES
from flowspec.version import __version__

if TYPE_CHECKING:
    from zeroconf import ServiceInfo

SERVICE = "_flowspec._tcp.local."
FOUND_MAX = limits.STAGES_MAX
_LABEL_BYTES = 40
_TEXT_BYTES = 200
"""Of a value; with its key it must stay below 256 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Announced:
    """What a daemon announces: where it may be reached, the likeliest address first; version, memory and
    device as it says."""

    name: str
    addresses: tuple[str, ...]
    version: str
    memory_bytes: int
    device: str


@contextlib.contextmanager
def announcing(*, name: str, host: str, port: int, memory_bytes: int, device: str) -> Iterator[None]:
    """Announces a daemon that listens on `host` while it lasts; one on loopback is announced on loopback
    only.

    Raises `InputError` without the zeroconf package, `ClusterError` where the network does not take it.
    """
    zeroconf = _zeroconf()
    addresses = _addresses(host)
    is_local = all(ipaddress.ip_address(address).is_loopback for address in addresses)
    label = _cut("".join(letter if letter.isalnum() else "-" for letter in name), _LABEL_BYTES) or "daemon"
    info = zeroconf.ServiceInfo(
        SERVICE,
        f"{label}-{secrets.token_hex(3)}.{SERVICE}",
        port=port,
        properties={
            "version": __version__,
            "name": _cut(name, _TEXT_BYTES),
            "memory": str(memory_bytes),
            "device": device,
        },
        server=f"flowspec-{secrets.token_hex(6)}.local.",
        parsed_addresses=addresses,
    )
    with _opened(zeroconf, ["127.0.0.1"] if is_local else addresses) as network:
        network.register_service(info)
        try:
            yield
        finally:
            network.unregister_service(info)


def find_announced(timeout_s: float) -> list[Announced]:
    """The daemons that tell their address within so many seconds, by name.

    All that are heard of are asked for it at the same time, so those that never tell, as false ones may, cost
    no other's time.
    """
    zeroconf = _zeroconf()
    deadline_s = time.monotonic() + timeout_s
    seen: dict[str, Future[ServiceInfo | None]] = {}

    with _opened(zeroconf, zeroconf.InterfaceChoice.All) as network, ThreadPoolExecutor(FOUND_MAX) as threads:

        def look_up(name: str) -> ServiceInfo | None:
            left_ms = round(1000 * (deadline_s - time.monotonic()))
            found: ServiceInfo | None = (
                network.get_service_info(SERVICE, name, left_ms) if left_ms > 0 else None
            )
            return found

        def heard(**change: Any) -> None:
            is_new = (
                change["state_change"] is not zeroconf.ServiceStateChange.Removed
                and change["name"] not in seen
            )
            if is_new and len(seen) < FOUND_MAX:
                seen[change["name"]] = threads.submit(look_up, change["name"])

        browser = zeroconf.ServiceBrowser(network, SERVICE, handlers=[heard])
        time.sleep(timeout_s)
        browser.cancel()
        infos = [each.result() for each in list(seen.values())]
    found = [announced for info in infos if info is not None and (announced := _announced(info)) is not None]
    return sorted(found, key=lambda each: (each.name, each.addresses))


def _zeroconf() -> Any:
    try:
        import zeroconf
    except ImportError:
        raise InputError(
            f"discovery needs the zeroconf package, which is not installed: {how_to_get('discovery')}"
        ) from None
    return zeroconf


@contextlib.contextmanager
def _opened(zeroconf: Any, interfaces: Any) -> Iterator[Any]:
    try:
        network = zeroconf.Zeroconf(interfaces=interfaces)
    except (OSError, RuntimeError) as error:
        raise ClusterError(
            f"this network takes no multicast, which discovery needs ({error}); list the devices in a "
            "cluster file"
        ) from None
    try:
        yield network
    finally:
        network.close()


def _addresses(host: str) -> list[str]:
    """Where a daemon that listens on `host` can be reached: that address, or every address of this machine if
    it is all of them."""
    address = ipaddress.ip_address(ADDRESSES.wait_for(host))
    if not address.is_unspecified:
        return [str(address)]
    own = [
        each.address
        for found in psutil.net_if_addrs().values()
        for each in found
        if each.family == sockets.AF_INET
    ]
    others = [each for each in own if not ipaddress.ip_address(each).is_loopback]
    return others or ["127.0.0.1"]


def _announced(info: ServiceInfo) -> Announced | None:
    """What an announcement says, bounded and printable; None for one that cannot be used."""
    texts = {
        key: _printable(info.properties.get(key.encode()) or b"")
        for key in ("version", "name", "memory", "device")
    }
    hosts = sorted(info.parsed_addresses(), key=lambda host: ":" in host)
    if not hosts or not info.port:
        return None
    memory = texts["memory"]
    return Announced(
        name=texts["name"] or hosts[0],
        addresses=tuple(
            f"[{host}]:{info.port}" if ":" in host else f"{host}:{info.port}" for host in hosts[:8]
        ),
        version=texts["version"],
        memory_bytes=int(memory) if memory.isdecimal() and len(memory) < 19 else 0,
        device=texts["device"],
    )


def _printable(raw: bytes) -> str:
    return "".join(letter for letter in raw[:_TEXT_BYTES].decode("utf-8", "ignore") if letter.isprintable())


def _cut(text: str, size: int) -> str:
    """At most so many bytes of a text, whole letters."""
    return text.encode()[:size].decode("utf-8", "ignore")
