"""What happens to the connections of a socket: who was lost, and which handshakes failed and why."""

from __future__ import annotations

import enum
import struct
import time
from collections.abc import Iterator

import zmq

from flowspec.runtime.security.keyring import Keyring
from flowspec.runtime.transport import ready_sources, receive

HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
FAILED_MAX = 4
"""So many handshakes that failed in a row are no accident: ZeroMQ tries again within .1 to .2 s."""


class Refusal(enum.Enum):
    """How a handshake failed, as far as ZeroMQ tells this end."""

    MECHANISM = "one end has keys and the other has none"
    UNLISTED = "the key is not listed"
    BROKEN = "what was sent cannot be decrypted, or was no handshake"
    HUNG_UP = "the other end hung up"

    @property
    def is_final(self) -> bool:
        """Whether trying again is useless: ZeroMQ itself then stops dialling."""
        return self in (Refusal.MECHANISM, Refusal.UNLISTED)

    def told(self, keys: Keyring | None, *, has_answered: bool = False) -> str:
        """What to tell somebody who dialled with these keys: what is wrong there, and what to do.

        One that `has_answered` before, to these keys or none, was ended: keys explain nothing.
        """
        if has_answered and self is Refusal.HUNG_UP:
            return "it hung up; see the daemon's log there"
        if keys is None:
            text = "it takes" if self is Refusal.MECHANISM else "it hung up; if nobody ended it, it takes"
            return (
                f"{text} encrypted connections only, and there are no keys here: put its cluster's keys "
                "beside the cluster file (flowspec keygen)"
            )
        if self is Refusal.MECHANISM:
            return (
                f"it has no keys, but this end has ({keys.where}): copy its key there, as flowspec keygen "
                "prints, and start it again (launch/boards start does both)"
            )
        if self is Refusal.UNLISTED:
            return (
                f"it does not know the key of {keys.name}: copy {keys.where} there and start it again "
                "(launch/boards start does both)"
            )
        return (
            f"it has no keys, or not the one that {keys.where} has for it: copy its key and that list there, "
            "as flowspec keygen prints, and start it again (launch/boards start does both), or correct its "
            "address"
        )


def refusal_of(event: int, value: int) -> Refusal:
    """How a handshake failed, by the event that tells of it and the event's value."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return Refusal.UNLISTED
    if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        return Refusal.HUNG_UP
    return Refusal.MECHANISM if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH else Refusal.BROKEN


def events(socket: zmq.Socket[bytes]) -> Iterator[tuple[int, int]]:
    """What a monitor's socket has to tell: each event with its value, oldest first."""
    while (frames := receive(socket)) is not None:
        yield struct.unpack("=Hi", frames[0])  # as zmq.utils.monitor does, which loads asyncio


class Monitor:
    """What happens to a socket's connections: peers lost, and handshakes that failed. `refusal` is how the
    last one did."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket: zmq.Socket[bytes] = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILED)
        self._watched = socket
        self._failed = 0
        self.refusal: Refusal | None = None

    @property
    def is_refused(self) -> bool:
        """Whether waiting is useless: a handshake has failed for good, or one after another."""
        return self.refusal is not None and (self.refusal.is_final or self._failed >= FAILED_MAX)

    def drain(self) -> tuple[int, list[Refusal]]:
        """Since the last call: how many connections were lost, and how handshakes failed."""
        lost, refusals = 0, []
        for event, value in events(self.socket):
            lost += event == zmq.EVENT_DISCONNECTED
            if event & HANDSHAKE_FAILED:
                refusals.append(refusal_of(event, value))
        self._failed += len(refusals)
        self.refusal = next(
            (refusal for refusal in refusals if refusal.is_final), refusals[-1] if refusals else self.refusal
        )
        return lost, refusals

    def await_ready(self, patience_s: float, events: int = zmq.POLLIN) -> bool:
        """Waits until the socket is ready; False when the time is up, or it is refused."""
        poller = zmq.Poller()
        poller.register(self._watched, events)
        poller.register(self.socket, zmq.POLLIN)
        deadline_s = time.monotonic() + patience_s
        while not self.is_refused:
            ready = ready_sources(poller.poll(max(0, int(1000 * (deadline_s - time.monotonic())))))
            if self._watched in ready:
                return True
            if not ready:
                return False
            self.drain()
        return False

    def close(self) -> None:
        """Ends the watching; the socket watched lives on."""
        self._watched.disable_monitor()
        self.socket.close()
