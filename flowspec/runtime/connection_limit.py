"""The connections to a daemon's port, as its socket's monitor tells of them: how many there are, and that
there are not too many.

ZeroMQ takes as many as the process may have files, and then nothing else in the process can open one: so
connections may have half of these. Those above the limit are shut down by their descriptor, which ZeroMQ
takes for the peer's own end.
"""

from __future__ import annotations

import contextlib
import resource
import socket as sockets
from dataclasses import dataclass, field

import zmq

from flowspec.core.protocol import limits
from flowspec.runtime.monitor import HANDSHAKE_FAILED, Refusal, events, refusal_of


@dataclass(slots=True)
class ConnectionChanges:
    """Since the last look: connections `closed`, how handshakes `failed`, and connections `surplus`, of which
    there were too many."""

    closed: int = 0
    failed: list[Refusal] = field(default_factory=list)
    surplus: int = 0


class ConnectionLimit:
    """Watches a bound socket; `socket` is readable when there is something to `drain`."""

    def __init__(self, bound: zmq.Socket[bytes], connections_max: int | None = None) -> None:
        self.socket: zmq.Socket[bytes] = bound.get_monitor_socket(
            zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILED
        )
        self.connections_max = connections_max or connections_most(limits.CONNECTIONS_MAX)
        self._open: set[int] = set()

    def drain(self) -> ConnectionChanges:
        """What happened since the last call; shuts down connections above the limit."""
        found = ConnectionChanges()
        for event, descriptor in events(self.socket):  # of a failed handshake the value says why
            if event == zmq.EVENT_ACCEPTED:
                if len(self._open) >= self.connections_max:
                    found.surplus += 1
                    _shut_down(descriptor)
                self._open.add(descriptor)
            elif event == zmq.EVENT_DISCONNECTED:
                found.closed += 1
                self._open.discard(descriptor)
            else:
                found.failed.append(refusal_of(event, descriptor))
        return found


def connections_most(wanted: int, share: int = 2) -> int:
    """So many, or one in `share` of the files that this process may open."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if files < 0 else min(wanted, files // share)


def _shut_down(descriptor: int) -> None:
    """Ends a connection whose descriptor stays ZeroMQ's to close, even where there is no other descriptor;
    one that is closed by now is no error."""
    with contextlib.suppress(OSError):
        connection = sockets.socket(fileno=descriptor)
        try:
            connection.shutdown(sockets.SHUT_RDWR)
        finally:
            connection.detach()
