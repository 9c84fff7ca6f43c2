"""The head's sockets of one pipeline: connections to its devices, what comes in on them, and whether they
stand.

Decides nothing: whom to dial, what to say and what to make of what was heard is `core/cluster/forming.py`'s,
and `Pipelines` is between the two.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket as sockets
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import zmq

from flowspec.core.cluster.forming import (
    CONTROL,
    DATA,
    AddressNotFound,
    ConnectionClosed,
    DeviceBrokeProtocol,
    DeviceMessageArrived,
    DialRefused,
    SendFailed,
)
from flowspec.core.cluster.incarnation import SESSION_BITS
from flowspec.core.head.events import FeaturesArrived, VerifiedArrived
from flowspec.core.head.features import check_features
from flowspec.core.protocol import limits
from flowspec.core.protocol.cluster_messages import Error, Hello, Pong, Ready, Reset, Welcome
from flowspec.core.protocol.device_messages import TensorBytes
from flowspec.core.protocol.messages import (
    Commit,
    Expand,
    Features,
    Open,
    Proposed,
    Release,
    Segment,
    Verified,
)
from flowspec.core.protocol.types import Message
from flowspec.core.stage.slots import CacheRoom
from flowspec.errors import InputError, PeerError
from flowspec.plan.placement import ClusterPlan, StagePlan, assigns_of
from flowspec.runtime.emulation import Emulation
from flowspec.runtime.monitor import Monitor
from flowspec.runtime.security.keyring import Keyring
from flowspec.runtime.transport import Receiver, Sender, Wake, dealer, end_context, reach, receive
from flowspec.runtime.weights.transfer import WeightServer
from flowspec.version import __version__
from flowspec.wire.codec import BYTES, Envelope, Tensor, decode

KERNELS = ("compiling kernels", "trying kernels")
"""What is done once for a processor; the second is one of `LOADING_STEPS`."""
Progress = Callable[[str, float], None]
"""Called with a line of text, a device's name and after a colon what it is doing, and a share of that from 0
to 1."""
ConnectionEvent = (
    DeviceMessageArrived | ConnectionClosed | DialRefused | AddressNotFound | DeviceBrokeProtocol | SendFailed
)
"""What the sockets of a pipeline tell."""


def told_of(device: str, doing: str) -> str:
    """The text of a `Progress`."""
    return f"{device}: {doing}{', once' if doing in KERNELS else ''}"


def new_session() -> int:
    """A number that no other head has."""
    return secrets.randbits(SESSION_BITS)


def head_name(keys: Keyring | None) -> str:
    """What this head calls itself: that of its key, which daemons check; without one, where it runs."""
    return f"{sockets.gethostname()}-{os.getpid()}" if keys is None else keys.name


def described(stage: StagePlan) -> str:
    """A stage's device, for messages to people."""
    return f"device {stage.name} at {stage.address}"


@dataclass(slots=True)
class DeviceConnection:
    """One connection to a device: how to send on it, how what comes is counted, and what happens to it.

    It `is_dialled` once the device's address is known.
    """

    device: str
    role: str
    link: Sender
    receiver: Receiver
    monitor: Monitor
    is_dialled: bool = False

    @property
    def socket(self) -> zmq.Socket[bytes]:
        return self.link.socket


@dataclass(slots=True)
class StageStatus:
    """A stage as the head knows it: its part of the plan, and the last of each that it said."""

    plan: StagePlan
    connection: DeviceConnection | None = None
    welcome: Welcome | None = None
    ready: Ready | None = None
    pong: Pong | None = None


class PipelineConnections:
    """The devices of pipeline `number`, which have `incarnation` for it; one thread at a time uses it.

    With `keys` every connection is encrypted, and each device must have the key that they list for its name.
    `answered` are the names of those that ever answered in this session, which these join.
    Where the plan is a drafter's, its answers are gathered in `proposed`. `rooms` is what each has for
    caches, once they are ready.
    """

    def __init__(
        self,
        plan: ClusterPlan,
        number: int,
        incarnation: int,
        wake: Wake,
        keys: Keyring | None,
        answered: set[str],
    ) -> None:
        self.plan = plan
        self.number = number
        self.all = [StageStatus(stage) for stage in plan.stages]
        self.proposed: deque[Proposed] = deque()
        self.rooms: tuple[CacheRoom, ...] = ()
        self.weights: WeightServer | None = None
        self._by_name = {stage.plan.name: stage for stage in self.all}
        self._incarnation = incarnation
        self._keys = keys
        self._answered = answered
        self._name = head_name(keys)
        self._wake = wake
        self._context: zmq.Context[Any] = zmq.Context()
        self._connections: list[DeviceConnection] = []
        self._first_data: Sender | None = None
        self._shaped: list[tuple[str, Sender]] = []
        self._unsent: list[SendFailed] = []

    def dial(self, device: str, role: str) -> None:
        """A connection to a device, on which Hello is said when its address is known.

        Raises `InputError` for a device without a key.
        """
        stage = self._by_name[device]
        socket = dealer(self._context, device, self._keys, has_pulse=role == CONTROL)
        link = Sender(socket, incarnation=self._incarnation, sender=self._name)
        connection = DeviceConnection(device, role, link, Receiver(self._incarnation), Monitor(socket))
        self._connections.append(connection)
        if role == CONTROL:
            stage.connection = connection
        elif device == self.plan.stages[0].name:
            self._first_data = link
        with contextlib.suppress(InputError):  # `heard` tells of it
            self._greet(connection)

    def _greet(self, connection: DeviceConnection) -> None:
        """Says Hello, if the address is known by now."""
        connection.is_dialled = reach(
            connection.socket, self._by_name[connection.device].plan.address, self._wake
        )
        if connection.is_dialled:
            connection.link.send(Hello(name=self._name, version=__version__, role=connection.role))

    def say(self, device: str, message: Message) -> None:
        """A message to one device; whoever is gone is noticed otherwise."""
        connection = self._by_name[device].connection
        if connection is not None:
            connection.link.send(message)

    def tell(self, message: Open | Commit | Release | Expand) -> None:
        """A control message to every stage, or to a drafter what it has to do."""
        for stage in self.all:
            self.say(stage.plan.name, message)

    def send(self, segment: Segment) -> None:
        """A segment to the first stage; where that fails `heard` says so, for those who send have more to
        do."""
        assert self._first_data is not None, "a pipeline that is there has its data connections"
        if not self._first_data.send(segment):
            self._unsent.append(
                SendFailed(pipeline=self.number, device=self.all[0].plan.name, what="segments")
            )

    def serve_weights(self, device: str) -> None:
        """Has the device's questions about weights answered, by a thread of their own."""
        if self.weights is None:
            self.weights = WeightServer(
                self._context,
                self._wake,
                model=self.plan.model,
                fingerprint=self.plan.fingerprint,
                incarnation=self._incarnation,
                sender=self._name,
                keys=self._keys,
            )
        self.weights.serve(self._by_name[device].plan)

    def send_tokens(self, device: str, offset: int) -> None:
        """The next bytes of the model's tokens; a device that asks for what was not named gets none, and
        gives up."""
        tokens, connection = self.plan.tokens, self._by_name[device].connection
        data = b"" if tokens is None else tokens.packed[offset : offset + limits.TOKEN_CHUNK_BYTES]
        if tokens is None or connection is None or not data:
            self.say(device, Error.saying("tokens were asked for that were not offered"))
            return
        message = TensorBytes(digest=tokens.digest, offset=offset)
        connection.link.send(message, Tensor(rows=1, width=len(data), dtype=BYTES, data=data))

    def begin(self, rooms: tuple[CacheRoom, ...], emulation: Emulation | None) -> None:
        """The pipeline is there: nobody needs weights any more. An `emulation` shapes what is sent from now
        on."""
        self.rooms = rooms
        self._stop_serving()
        if emulation is None:
            return
        assert self._first_data is not None, "a pipeline that is there has its data connections"
        self._first_data.shape = emulation.first_hop_shaper()
        self._shaped.append((self.all[0].plan.name, self._first_data))
        for index, stage in enumerate(self.all):
            assert stage.connection is not None, "every device was dialled"
            stage.connection.link.shape = emulation.control_shaper(index)
            self._shaped.append((stage.plan.name, stage.connection.link))

    @property
    def due_s(self) -> float:
        """When `heard` must be asked again at the latest, because a message has come through an emulated
        link."""
        return min((link.due_s for _, link in self._shaped), default=float("inf"))

    @property
    def count(self) -> int:
        """How many connections there are; none is closed before all are."""
        return len(self._connections)

    @property
    def sources(self) -> list[zmq.Socket[bytes]]:
        return [
            source
            for connection in self._connections
            for source in (connection.socket, connection.monitor.socket)
        ]

    def heard(
        self, ready: set[Any], now_s: float
    ) -> Iterator[ConnectionEvent | VerifiedArrived | FeaturesArrived]:
        """What has come on the sockets that are `ready`, data first; what was verified, and features, are for
        the head's core."""
        for device, link in self._shaped:
            if not link.flush(now_s):
                self._unsent.append(SendFailed(pipeline=self.number, device=device, what="messages"))
        while self._unsent:
            yield self._unsent.pop(0)
        for connection in self._connections:
            if not connection.is_dialled:
                yield from self._greet_later(connection)
        for connection in reversed(self._connections):  # data connections are dialled last
            if connection.socket in ready:
                yield from self._read(connection)
        for connection in self._connections:
            if connection.monitor.socket in ready:
                yield from self._watched(connection)

    def _greet_later(self, connection: DeviceConnection) -> Iterator[ConnectionEvent]:
        try:
            self._greet(connection)
        except InputError as error:
            connection.is_dialled = True  # once is enough
            yield AddressNotFound(pipeline=self.number, device=connection.device, text=str(error))

    def _read(
        self, connection: DeviceConnection
    ) -> Iterator[ConnectionEvent | VerifiedArrived | FeaturesArrived]:
        stage = self._by_name[connection.device]
        for _ in range(limits.MESSAGES_PER_TURN_MAX):
            frames = receive(connection.socket)
            if frames is None:
                return
            try:
                envelope = decode(frames)
                connection.receiver.check(envelope)
                message = envelope.message
                if connection.role == DATA and isinstance(message, Verified):
                    yield VerifiedArrived(verified=message)
                    continue
                if connection.role == DATA and isinstance(message, Features):
                    yield self._features(connection.device, message, envelope.tensor)
                    continue
            except PeerError as error:
                device, text = (
                    (connection.device, f"{described(stage.plan)}: {error}")
                    if connection.role == CONTROL
                    else ("", f"a data connection: {error}")
                )
                yield DeviceBrokeProtocol(pipeline=self.number, device=device, text=text)
                return
            self._note(connection, stage, envelope)
            yield DeviceMessageArrived(
                pipeline=self.number, device=connection.device, role=connection.role, message=message
            )

    def _features(self, device: str, message: Features, tensor: Tensor | None) -> FeaturesArrived:
        """Raises `PeerError` for features that are not those that the stage was to capture."""
        index = next(at for at, stage in enumerate(self.plan.stages) if stage.name == device)
        assign = assigns_of(self.plan)[index]
        check_features(assign, self.plan.hidden_size, message, tensor)
        assert tensor is not None, "the codec refuses features without rows"
        return FeaturesArrived(stage=index, features=message, rows=tensor.apart())

    def _note(self, connection: DeviceConnection, stage: StageStatus, envelope: Envelope) -> None:
        """Keeps what others want to know of a device."""
        message = envelope.message
        if isinstance(message, Welcome):
            connection.link.count_from(message.count)
            self._answered.add(connection.device)
            if connection.role == CONTROL:
                stage.welcome = message
        elif isinstance(message, Pong):
            stage.pong = message
        elif isinstance(message, Ready):
            stage.ready = message
        elif isinstance(message, Proposed) and self.plan.drafting is not None:
            self.proposed.append(message)

    def _watched(self, connection: DeviceConnection) -> Iterator[ConnectionEvent]:
        lost, refusals = connection.monitor.drain()
        refusal = connection.monitor.refusal
        if refusal is not None and (refusals or refusal.is_final):
            yield DialRefused(
                pipeline=self.number,
                device=connection.device,
                text=refusal.told(self._keys, has_answered=connection.device in self._answered),
                is_final=refusal.is_final,
            )
        if lost:
            yield ConnectionClosed(pipeline=self.number, device=connection.device)

    def release(self) -> None:
        """Lets go of every device that has answered."""
        for stage in self.all:
            if stage.welcome is not None:
                self.say(stage.plan.name, Reset())

    def _stop_serving(self) -> None:
        if self.weights is not None:
            self.weights.close()
            self.weights = None

    def close(self, lost: str = "") -> None:
        """Closes all; what is on its way to others than the device that is `lost` may still leave."""
        self._stop_serving()
        for _, link in self._shaped:
            link.unshape()
        for connection in self._connections:
            if connection.device == lost:
                connection.monitor.close()
                connection.socket.close(linger=0)
        end_context(self._context, 200)
