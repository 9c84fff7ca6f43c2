"""ZeroMQ sockets as FlowSpec uses them: one ROUTER per daemon, one DEALER per peer that is dialled.

A `Sender` sends enveloped messages to one peer and counts them; a `Receiver` checks that the counts of a peer
have no gap. A successful `send` is not delivery: what must arrive is repeated by the protocol above, not
here.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import signal
import socket as sockets
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any

import zmq

from flowspec.core.protocol import limits
from flowspec.core.protocol.cluster_messages import Error
from flowspec.core.protocol.types import Message
from flowspec.errors import InputError, PeerError
from flowspec.runtime import timeouts
from flowspec.runtime.addresses import ADDRESSES, not_ours
from flowspec.runtime.emulation import Frames, Shaper
from flowspec.runtime.security.keyring import Keyring
from flowspec.wire.codec import Envelope, Tensor, encode

TIMER_EARLY_S = 0.0005
"""What is due may happen up to this early: polls count in whole milliseconds."""


def end_context(context: zmq.Context[Any], linger_ms: int = 0) -> None:
    """Ends a context with all its sockets; what they have to send may leave for so long."""
    # ZeroMQ waits for every socket. One that was being made when Ctrl-C came is known to the traceback alone.
    traceback.clear_frames(sys.exc_info()[2])
    context.destroy(linger=linger_ms)


def _configure(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    # The codec refuses, and names, what is above the limit; ZeroMQ closes the connection silently on what is
    # far above it.
    socket.setsockopt(zmq.MAXMSGSIZE, 2 * limits.PAYLOAD_BYTES_MAX)
    socket.setsockopt(zmq.SNDHWM, limits.FRAMES_QUEUED_MAX)
    socket.setsockopt(zmq.RCVHWM, limits.FRAMES_UNREAD_MAX)


def _keep_pulse(socket: zmq.Socket[bytes]) -> None:
    """Has ZeroMQ close a connection over which no sign of life comes.

    Whoever dials asks for these, on connections that carry no long messages: one behind which a Ping had to
    wait would be closed.
    """
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(timeouts.HEARTBEAT_S * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(timeouts.HEARTBEAT_TIMEOUT_S * 1000))


def _close_unacknowledged(socket: zmq.Socket[bytes]) -> None:
    """Has the system close a connection of which nothing that was sent has been acknowledged for long.

    For connections that carry long messages. On a slow link acknowledgements come slowly; where large frames
    get lost, or all of them, none come.
    """
    socket.setsockopt(zmq.TCP_MAXRT, int(timeouts.UNACKNOWLEDGED_S * 1000))


def split_address(address: str) -> tuple[str, int]:
    """`host:port` (IPv6 hosts in brackets) as its two halves; raises `InputError` when it is not one."""
    host, _, port = address.rpartition(":")
    is_host, is_port = bool(host) and "/" not in host, port.isdecimal() and len(port) <= 5
    if not is_host or not is_port or not 0 < int(port) < 65536:
        raise InputError(
            "expected an address host:port with a port from 1 to 65535, as in 192.168.1.21:7700, got "
            f"{address!r:.80}"
        )
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can be meant; raises `InputError` for a host that is not known."""
    try:
        found = sockets.getaddrinfo(host.strip("[]"), None, type=sockets.SOCK_STREAM)
    except (sockets.gaierror, UnicodeError) as error:
        raise InputError(
            f"cannot find the host {host!r:.80}: {error.args[-1]}; check the name or use an IP address"
        ) from None
    return all(ipaddress.ip_address(address[0]).is_loopback for *_, address in found)


def _own_address(host: str, *, needs_loopback: bool) -> str:
    """The address to bind for a host; raises `InputError` for one that is none, or is not loopback if it
    needs to be."""
    try:
        *_, found = sockets.getaddrinfo(host, None, type=sockets.SOCK_STREAM)[0]
    except (sockets.gaierror, UnicodeError):
        raise InputError(f"--host: expected an address of this machine, got {host!r}") from None
    if needs_loopback and not ipaddress.ip_address(found[0]).is_loopback:
        raise InputError(
            f"without keys this daemon does not listen on {host}, where others could use it: copy its key "
            "here "
            "(flowspec keygen on the head tells how), or say --insecure"
        )
    return bracketed(str(found[0]))


def check_own(host: str) -> None:
    """Raises `InputError` for an address that is not this machine's."""
    address = _own_address(host, needs_loopback=False).strip("[]")
    family = sockets.AF_INET6 if ":" in address else sockets.AF_INET
    with sockets.socket(family, sockets.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise not_ours(host) from None
            raise InputError(f"cannot listen on {host}: {error.strerror}") from None


def bind_router(
    context: zmq.Context[Any], host: str, port: int, keys: Keyring | None = None, *, insecure: bool = False
) -> tuple[zmq.Socket[bytes], int]:
    """A bound ROUTER and its port (`port` 0 takes a free one).

    Without keys, which need a gate in the same context, it listens on loopback only, unless `insecure`.
    """
    socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    _configure(socket)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    if keys is not None:
        keys.listen(socket)
    try:
        socket.bind(f"tcp://{_own_address(host, needs_loopback=keys is None and not insecure)}:{port or '*'}")
    except (zmq.ZMQError, InputError) as error:
        socket.close()
        if isinstance(error, InputError):
            raise
        if error.errno == zmq.EADDRINUSE:
            raise InputError(
                f"port {port} on {host} is taken; stop what uses it or choose another with --port"
            ) from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise not_ours(host) from None
        raise InputError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return socket, int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])


def dial(
    context: zmq.Context[Any],
    address: str,
    device: str,
    keys: Keyring | None,
    *,
    queued_max: int = limits.FRAMES_QUEUED_MAX,
    has_pulse: bool = True,
) -> zmq.Socket[bytes]:
    """A DEALER on its way to `host:port`, with room for so many messages that wait to leave; without
    `has_pulse` silence is no loss.

    Waits for the host's address where it is not known (`dealer` and `reach` do not), no longer than a look-up
    may take. With keys only the device of that name is spoken to, and nobody else understands a word.
    """
    host, _ = split_address(address)
    ADDRESSES.wait_for(host)
    socket = dealer(context, device, keys, queued_max=queued_max, has_pulse=has_pulse)
    try:
        reach(socket, address)
    except InputError:
        socket.close()
        raise
    return socket


def dealer(
    context: zmq.Context[Any],
    device: str,
    keys: Keyring | None,
    *,
    queued_max: int = limits.FRAMES_QUEUED_MAX,
    has_pulse: bool = True,
) -> zmq.Socket[bytes]:
    """A DEALER as `dial` makes it, on its way to nowhere yet: nothing can be sent before `reach`.

    Raises `InputError` for a device without a key.
    """
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    _configure(socket)
    socket.setsockopt(zmq.SNDHWM, queued_max)
    if has_pulse:
        _keep_pulse(socket)
    else:
        _close_unacknowledged(socket)
    try:
        if keys is not None:
            keys.dial(socket, device)
    except (zmq.ZMQError, InputError) as error:
        socket.close()
        if isinstance(error, InputError):
            raise
        raise InputError(f"cannot dial {device}: {error.strerror}") from None
    return socket


def reach(socket: zmq.Socket[bytes], address: str, wake: Wake | None = None) -> bool:
    """Sends a `dealer` on its way to `host:port`; False while the host is being looked up, of which `wake`
    hears.

    Never waits, and has ZeroMQ look nothing up: it would do so in the thread that carries all its messages.
    Raises `InputError`.
    """
    host, port = split_address(address)
    found = ADDRESSES.look_up(host, None if wake is None else wake.set)
    if found is None:
        return False
    try:
        socket.connect(f"tcp://{bracketed(found)}:{port}")
    except zmq.ZMQError as error:
        raise InputError(f"cannot dial {address}: {error.strerror}") from None
    return True


def bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


class Sender:
    """The sending half of one connection: stamps and counts what goes out.

    With a `shape` messages wait in it, as on the emulated link, until `flush` finds that they have arrived.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], *, incarnation: int, sender: str, identity: bytes | None = None
    ) -> None:
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

    def count_from(self, number: int) -> None:
        """The next message bears this number, which the peer drew for this connection (`Welcome.count`)."""
        self._sent = number

    def send(self, message: Message, tensor: Tensor | None = None) -> bool:
        """Hands a message to ZeroMQ; False when the peer is gone or its queue is full."""
        envelope = Envelope(
            incarnation=self.incarnation,
            sender=self.sender,
            sequence=self._sent,
            message=message,
            tensor=tensor,
        )
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
        """Hands over what has come through the shape by now; False when that fails, and with it the
        connection."""
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
    """Checks that a peer's messages come one after another, and with an `incarnation` that they belong to
    it."""

    def __init__(self, incarnation: int | None = None) -> None:
        self._incarnation = incarnation
        self.expected = 0

    def check(self, envelope: Envelope) -> None:
        """Raises `PeerError` when messages are missing before this one, it came before, or it is of another
        session."""
        is_ours = self._incarnation in (None, envelope.incarnation) or isinstance(
            envelope.message, Error
        )  # a refusal may not know ours
        if not is_ours:
            raise PeerError(
                f"a {type(envelope.message).__name__} of {envelope.sender} belongs to another session: it is "
                "stale or replayed"
            )
        if envelope.sequence != self.expected:
            raise PeerError(
                f"expected message {self.expected} of {envelope.sender}, got {envelope.sequence}: frames "
                "were lost or replayed"
            )
        self.expected += 1


def receive(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    """The next message's frames, or None when none is waiting."""
    try:
        return socket.recv_multipart(flags=zmq.NOBLOCK)
    except zmq.Again:
        return None


def poll_timeout_ms(due_s: float, now_s: float, most_ms: int) -> int:
    """How long a poll may wait for what is due at `due_s` (infinity: nothing is); it ends less than half a
    millisecond off."""
    return max(0, int(min(most_ms, (due_s - TIMER_EARLY_S - now_s) * 1000 + 1)))


class Wake:
    """Lets another thread (or a signal handler) end a poll: a pipe with at most a few bytes in it.

    Whoever sets it may come after its reader has closed it, and is not heard then: the descriptor may be
    somebody else's by now.
    """

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        os.set_blocking(self._write_fd, False)
        self._lock = threading.RLock()  # a signal handler interrupts the thread that holds it
        self._is_closed = False

    def set(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):  # full: the reader has been woken already
            if not self._is_closed:
                os.write(self._write_fd, b"!")

    def on_signals(self) -> None:
        """Has every signal set it at once; to be called in the main thread.

        Handlers of Python run between two of its instructions. A signal that comes just before the poll, or
        in another thread, would not be handled until the poll ends by itself.
        """
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self.read_fd, 4096):
                pass

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            os.close(self.read_fd)
            os.close(self._write_fd)


def ready_sources(ready: Sequence[tuple[Any, int]]) -> set[Any]:
    """The sockets and descriptors of a poll that have something, as a set."""
    return {source for source, _ in ready}
