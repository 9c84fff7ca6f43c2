"""How far away other daemons are: latency and bandwidth of real connections, over the messages that daemons
take anyway.

Each look is a connection of its own, of no head and no cluster: Hello is answered with Welcome at once, which
is a round trip through the daemon's loop. A segment with a payload follows, which a daemon drops that this
connection does not hold, and then a second Hello, which it refuses: connections keep their order, so the
refusal proves that all of the payload has come. Whoever uses the daemon meanwhile loses nothing but the time
of the bytes.
"""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from flowspec.core.protocol.cluster_messages import Error, Hello, Welcome
from flowspec.core.protocol.messages import Commit, Segment, SegmentPart
from flowspec.core.protocol.types import Message
from flowspec.errors import ClusterError
from flowspec.runtime import timeouts
from flowspec.runtime.cluster import Device
from flowspec.runtime.monitor import Monitor
from flowspec.runtime.security.keyring import Keyring
from flowspec.runtime.transport import Receiver, Sender, dial, end_context
from flowspec.version import __version__
from flowspec.wire.codec import Tensor, decode

NAME = "a head or device without keys"

Step = Callable[[str], None]
"""Called once for each piece of work that is done, with what it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEffort:
    """Latency is the median of `looks`; then payloads of `sizes` bytes are sent until one takes long enough,
    `transfer_s` each at most."""

    sizes: tuple[int, ...] = (1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
    long_enough_s: float = 0.3
    looks: int = 9
    transfer_s: float = 60.0


BRIEF = LinkEffort(sizes=(1 << 18, 1 << 20, 1 << 22, 1 << 24), long_enough_s=0.1)
"""To see what is wrong with a link: a second at most, but for links slower than 2 Mbit/s."""
GLANCE = LinkEffort(sizes=(1 << 16, 1 << 19, 1 << 21), long_enough_s=0.02, looks=3, transfer_s=3.0)
"""To plan by: a gigabit link takes 30 ms, one of 10 Mbit/s 60 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPeer:
    """A daemon, as seen from here; `latency_s` is half a round trip."""

    name: str
    latency_s: float
    bandwidth_mbps: float


def measure_links(
    devices: Sequence[Device],
    step: Step = lambda done: None,
    effort: LinkEffort | None = None,
    keys: Keyring | None = None,
) -> list[MeasuredPeer]:
    """Measures the link to each daemon; raises `FlowSpecError` naming the first that does not answer. Two
    steps for each."""
    context: zmq.Context[Any] = zmq.Context()
    context.setsockopt(zmq.IMMEDIATE, 1)  # of its sockets: nothing can be sent before the connection stands
    try:
        return [_measure(context, device, step, effort or LinkEffort(), keys) for device in devices]
    finally:
        end_context(context)


def _measure(
    context: zmq.Context[Any], device: Device, step: Step, effort: LinkEffort, keys: Keyring | None
) -> MeasuredPeer:
    trips = []
    for _ in range(effort.looks):
        with _Look(context, device, keys) as look:
            trips.append(look.hello())
    round_trip_s = statistics.median(trips)
    step(f"bandwidth to {device.name}")
    for size in effort.sizes:
        with _Look(context, device, keys) as look:
            look.hello()
            spent_s = look.payload(size, effort.transfer_s)
        if spent_s - round_trip_s > effort.long_enough_s:
            break
    step(f"latency to {device.name}")
    return MeasuredPeer(
        name=device.name,
        latency_s=round_trip_s / 2,
        bandwidth_mbps=8e-6 * size / max(1e-6, spent_s - round_trip_s),
    )


class _Look:
    """One connection, from the moment it stands."""

    def __init__(self, context: zmq.Context[Any], device: Device, keys: Keyring | None) -> None:
        self._device = device
        self._context = context
        self._keys = keys
        self._name = NAME if keys is None else keys.name

    def __enter__(self) -> _Look:
        self._socket = dial(self._context, self._device.address, self._device.name, self._keys)
        monitor = Monitor(self._socket)
        self._link = Sender(self._socket, incarnation=secrets.randbits(48), sender=self._name)
        self._receiver = Receiver(self._link.incarnation)
        stands = monitor.await_ready(timeouts.CONNECT_S, zmq.POLLOUT)
        monitor.close()
        if not stands:
            self._socket.close(linger=0)
            why = (
                "; is its daemon running?"
                if monitor.refusal is None
                else f": {monitor.refusal.told(self._keys)}"
            )
            raise ClusterError(f"{self._device.name} at {self._device.address} does not answer{why}")
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close(linger=0)

    def hello(self) -> float:
        """Seconds from Hello to Welcome."""
        started_s = time.perf_counter()
        self._link.send(self._greeting())
        answer = self._answer(timeouts.CONNECT_S)
        if not isinstance(answer, Welcome):
            raise self._refused(answer)
        self._link.count_from(answer.count)
        return time.perf_counter() - started_s

    def payload(self, size: int, patience_s: float) -> float:
        """Seconds until so many bytes have come and the refusal of what follows them is back."""
        part = SegmentPart(
            commit=Commit(request=0, epoch=0, base=1, path=()),
            opening=None,
            ids=(0,),
            parents=(-1,),
            tokens=(0,),
            positions=(0,),
            committed=(False,),
        )
        payload = Tensor(rows=1, width=size // 4, dtype="float32", data=bytes(size))
        started_s = time.perf_counter()
        self._link.send(Segment(segment=0, parts=(part,)), payload)
        self._link.send(self._greeting())
        answer = self._answer(patience_s)
        if not isinstance(answer, Error) or "Hello" not in answer.text:
            raise self._refused(answer)
        return time.perf_counter() - started_s

    def _greeting(self) -> Hello:
        return Hello(name=self._name, version=__version__, role="measure")

    def _answer(self, patience_s: float) -> Message:
        if not self._socket.poll(int(1000 * patience_s)):
            raise ClusterError(
                f"{self._device.name} at {self._device.address} did not answer within {patience_s:g} s"
            )
        envelope = decode(self._socket.recv_multipart())
        self._receiver.check(envelope)
        return envelope.message

    def _refused(self, answer: Message) -> ClusterError:
        text = answer.text if isinstance(answer, Error) else f"a {type(answer).__name__} came"
        return ClusterError(f"{self._device.name} at {self._device.address}: {text}")
