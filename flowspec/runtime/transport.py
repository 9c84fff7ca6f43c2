"""ZeroMQ sockets as FlowSpec uses them: one ROUTER per daemon, one DEALER per peer that is dialled.

A `Link` sends enveloped messages to one peer and counts them; a `Receiver` checks that the counts of a peer have no gap.
A successful `send` is not delivery: what must arrive is repeated by the protocol above, not here.
"""

from __future__ import annotations

import contextlib
import os
import socket as sockets
import time
from collections.abc import Sequence
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from flowspec.core import limits
from flowspec.core.messages import Message
from flowspec.errors import InputError, PeerError
from flowspec.runtime import timeouts
from flowspec.runtime.emulation import Frames, Shaper
from flowspec.wire.codec import Envelope, Tensor, encode

FRAMES_QUEUED_MAX = 4096
TIMER_EARLY_S = 0.0005
"""What is due may happen up to this early: polls count in whole milliseconds."""
_HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


def _configure(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    # The codec refuses, and names, what is above the limit; ZeroMQ closes the connection silently on what is far above it.
    socket.setsockopt(zmq.MAXMSGSIZE, 2 * limits.PAYLOAD_BYTES_MAX)
    socket.setsockopt(zmq.SNDHWM, FRAMES_QUEUED_MAX)
    socket.setsockopt(zmq.RCVHWM, FRAMES_QUEUED_MAX)
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(timeouts.HEARTBEAT_S * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(timeouts.HEARTBEAT_TIMEOUT_S * 1000))


def split_address(address: str) -> tuple[str, int]:
    """`host:port` (IPv6 hosts in brackets) as its two halves; raises `InputError` when it is not one."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or len(port) > 5 or not 0 < int(port) < 65536:
        raise InputError(f"expected an address host:port, got {address!r:.80}")
    return host, int(port)


def bind_router(context: zmq.Context[Any], host: str, port: int) -> tuple[zmq.Socket[bytes], int]:
    """A bound ROUTER and its port (`port` 0 takes a free one)."""
    socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    _configure(socket)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    try:
        family, *_, found = sockets.getaddrinfo(host, None, type=sockets.SOCK_STREAM)[0]
        bound = f"[{found[0]}]" if family == sockets.AF_INET6 else found[0]
        socket.bind(f"tcp://{bound}:{port or '*'}")
    except (sockets.gaierror, UnicodeError):
        raise InputError(f"--host: expected an address of this machine, got {host!r}") from None
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE:
            raise InputError(f"port {port} on {host} is taken; stop what uses it or choose another with --port") from None
        raise InputError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return socket, int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])


def dial(context: zmq.Context[Any], address: str, *, queued_max: int = FRAMES_QUEUED_MAX) -> zmq.Socket[bytes]:
    """A DEALER on its way to `host:port`, with room for so many messages that wait to leave."""
    host, port = split_address(address)
    try:
        sockets.getaddrinfo(host.strip("[]"), port)
    except (sockets.gaierror, UnicodeError) as error:
        raise InputError(f"cannot find the host of {address}: {error.args[-1]}; check the name or use an IP address") from None
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    _configure(socket)
    socket.setsockopt(zmq.SNDHWM, queued_max)
    try:
        socket.connect(f"tcp://{host}:{port}")
    except zmq.ZMQError as error:
        socket.close()
        raise InputError(f"cannot dial {address}: {error.strerror}") from None
    return socket


class Link:
    """The sending half of one connection: stamps and counts what goes out.

    With a `shape` messages wait in it, as on the emulated link, until `flush` finds that they have arrived.
    """

    def __init__(self, socket: zmq.Socket[bytes], *, incarnation: int, sender: str, identity: bytes | None = None) -> None:
        self.socket = socket
        self.incarnation = incarnation
        self.sender = sender
        self._prefix = [] if identity is None else [identity]
        self._sent = 0
        self.shape: Shaper | None = None

    @property
    def due_s(self) -> float:
        """When the next message must be flushed; infinity without any."""
        return float("inf") if self.shape is None else self.shape.due_s

    def send(self, message: Message, tensor: Tensor | None = None) -> bool:
        """Hands a message to ZeroMQ; False when the peer is gone or its queue is full."""
        envelope = Envelope(incarnation=self.incarnation, sender=self.sender, sequence=self._sent, message=message, tensor=tensor)
        frames = encode(envelope)
        if self.shape is None:
            sent = self._hand_over(frames)
            self._sent += sent
            return sent
        now_s = time.monotonic()
        if not self.shape.put(frames, tensor, now_s):
            return False
        self._sent += 1
        return self.flush(now_s)

    def flush(self, now_s: float) -> bool:
        """Hands over what has come through the shape by now; False when that fails, and with it the connection."""
        while self.shape is not None and (frames := self.shape.take(now_s + TIMER_EARLY_S)) is not None:
            if not self._hand_over(frames):
                return False
        return True

    def unshape(self) -> None:
        """Hands over at once what is on its way, and all that follows: the emulation is over."""
        self.flush(float("inf"))
        self.shape = None

    def _hand_over(self, frames: Frames) -> bool:
        try:
            self.socket.send_multipart([*self._prefix, *frames], flags=zmq.NOBLOCK, copy=True)
        except zmq.ZMQError:
            return False
        return True


class Receiver:
    """Checks that a peer's messages come one after another."""

    def __init__(self) -> None:
        self._expected = 0

    def check(self, envelope: Envelope) -> None:
        """Raises `PeerError` when messages are missing before this one or it came before."""
        if envelope.sequence != self._expected:
            raise PeerError(
                f"expected message {self._expected} of {envelope.sender}, got {envelope.sequence}: frames were lost or replayed"
            )
        self._expected += 1


def receive(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    """The next message's frames, or None when none is waiting."""
    try:
        return socket.recv_multipart(flags=zmq.NOBLOCK)
    except zmq.Again:
        return None


def patience_ms(due_s: float, now_s: float, most_ms: int) -> int:
    """How long a poll may wait for what is due at `due_s` (infinity: nothing is); it ends less than half a millisecond off."""
    return max(0, int(min(most_ms, (due_s - TIMER_EARLY_S - now_s) * 1000 + 1)))


class Monitor:
    """What happens to a socket's connections: peers lost, and handshakes that failed."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket: zmq.Socket[bytes] = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILED)

    def drain(self) -> tuple[int, int]:
        """(connections lost, handshakes failed) since the last call."""
        lost = failed = 0
        while (frames := receive(self.socket)) is not None:
            event = parse_monitor_message(frames)["event"]
            lost += event == zmq.EVENT_DISCONNECTED
            failed += bool(event & _HANDSHAKE_FAILED)
        return lost, failed


class Wake:
    """Lets another thread (or a signal handler) end a poll: a pipe with at most a few bytes in it."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        os.set_blocking(self._write_fd, False)

    def set(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: the reader has been woken already
            os.write(self._write_fd, b"!")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self.read_fd, 4096):
                pass

    def close(self) -> None:
        os.close(self.read_fd)
        os.close(self._write_fd)


def ready_sources(ready: Sequence[tuple[Any, int]]) -> set[Any]:
    """The sockets and descriptors of a poll that have something, as a set."""
    return {source for source, _ in ready}
