"""IP addresses of devices that are named, looked up in threads of their own: who serves others does not wait.

`core/cluster/addresses.py` decides which address is used and when to look it up; here are the threads. All of
a process shares one `ADDRESSES`, so that what one connection found out every other knows. Numeric addresses
are what they are, and no thread sees them.
"""

from __future__ import annotations

import socket as sockets
import threading
import time
from collections.abc import Callable, Iterable

import psutil

from flowspec.core.cluster.addresses import AddressBook, LookupTimeouts, is_good_for
from flowspec.core.protocol.types import is_numeric
from flowspec.errors import InputError
from flowspec.runtime import timeouts

WAIT_S = 0.05
"""How often somebody who waits for a look-up sees whether it has taken too long."""


def not_ours(host: str) -> InputError:
    """What is said of an address to listen on that this machine does not have."""
    listed = [each for card in psutil.net_if_addrs().values() for each in card]
    families = (sockets.AF_INET, sockets.AF_INET6)
    own = dict.fromkeys(
        each.address for each in listed if each.family in families and "%" not in each.address
    )
    return InputError(
        f"--host: {host} is no address of this machine, which has {', '.join(own)}; give one of these, the "
        "one by which the other devices reach it"
    )


class Addresses:
    """See the module; for any number of threads."""

    def __init__(self, lookup_timeouts: LookupTimeouts) -> None:
        self._book = AddressBook(lookup_timeouts)
        self._change = threading.Condition()
        self._wakes: dict[str, list[Callable[[], None]]] = {}

    def look_up(self, host: str, wake: Callable[[], None] | None = None) -> str | None:
        """The address of a host (IPv6 in brackets or without); None while it is not known.

        Never waits; `wake` is called when more is known. Raises `InputError` for a host that cannot be found.
        """
        name = host.strip("[]")
        if is_numeric(name):
            return name
        with self._change:
            found = self._book.ask(name, time.monotonic())
            if not found.address and not found.trouble and wake is not None:
                wakes = self._wakes.setdefault(name, [])
                if wake not in wakes:
                    wakes.append(wake)
        if found.is_wanted:
            threading.Thread(target=self._ask, args=(name,), name=f"look-up of {name}", daemon=True).start()
        if found.trouble and not found.address:
            advice = "check the name or use an IP address"
            raise InputError(f"cannot find the host {host}: {found.trouble}; {advice}")
        return found.address or None

    def wait_for(self, host: str) -> str:
        """The same, and waits for an address that is not known, as long as a look-up may take."""
        while (address := self.look_up(host)) is None:
            with self._change:
                self._change.wait(WAIT_S)
        return address

    def hint(self, host: str, other: str) -> str:
        """The address of a host that can be told to another, `other`; empty where none is known that will
        do."""
        try:
            found = [self.look_up(each) for each in (host, other)]
        except InputError:
            return ""
        address, others = found
        return address if address and others and is_good_for(address, others) else ""

    def prepare(self, hosts: Iterable[str]) -> None:
        """Begins the look-ups of all, so that nobody waits for one after the other."""
        for host in hosts:
            try:
                self.look_up(host)
            except InputError:  # whoever asks for it hears of it
                continue

    def _ask(self, name: str) -> None:
        """One look-up, in a thread of its own."""
        address = trouble = ""
        try:
            address = str(sockets.getaddrinfo(name, None, type=sockets.SOCK_STREAM)[0][4][0])
        except (OSError, ValueError) as error:  # no such name; a name that cannot be one
            trouble = str(error.args[-1]) if error.args else type(error).__name__
        with self._change:
            if address:
                self._book.found(name, address, time.monotonic())
            else:
                self._book.failed(name, trouble, time.monotonic())
            wakes = self._wakes.pop(name, [])
            self._change.notify_all()
        for wake in wakes:
            wake()


ADDRESSES = Addresses(
    LookupTimeouts(limit_s=timeouts.LOOK_UP_S, fresh_s=timeouts.FRESH_S, again_s=timeouts.LOOK_UP_AGAIN_S),
)
"""Those that this process knows."""
