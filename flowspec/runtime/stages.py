"""The head's connections to the daemons of one pipeline: dialling, handing out layers, listening, noticing whose connection closed.

Owns the sockets of one incarnation, its leases and its set-up; the next pipeline gets others. Who is lost because of silence, and
what then, is decided elsewhere (`core/membership.py`). Knows nothing of requests, trees or answers.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket as sockets
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import zmq

from flowspec import __version__
from flowspec.core import limits
from flowspec.core.cluster_messages import Assign, Error, Hello, Loading, Ping, Pong, Ready, Reset, Welcome
from flowspec.core.incarnation import SESSION_BITS, incarnation_of
from flowspec.core.membership import Heard, Progressed
from flowspec.core.messages import Commit, Expand, Message, Open, Proposed, Release, Segment, Verified
from flowspec.core.weight_messages import AskModel
from flowspec.errors import BrokenError, PeerError
from flowspec.plan.placement import ClusterPlan, StagePlan
from flowspec.runtime import timeouts
from flowspec.runtime.emulation import Emulation
from flowspec.runtime.monitor import Monitor
from flowspec.runtime.security.keyring import Keyring
from flowspec.runtime.stage_words import check_features, check_room, described, error_of, word_of
from flowspec.runtime.transport import Link, Receiver, Wake, dial, ready_sources, receive
from flowspec.runtime.weights.server import WeightServer
from flowspec.wire.codec import Tensor, decode

Progress = Callable[[str, float], None]
"""Called with a line of text, a device's name and after a colon what it is doing, and a share of that from 0 to 1."""
LOSS_SETTLES_S = 0.1
"""How long the closing of a lost device's connections may take to show on all of them."""

OnWord = Callable[[Heard | Progressed], None]
"""Told of every word of a device."""

log = logging.getLogger("flowspec.head")


def new_session() -> int:
    """A number that no other head has."""
    return secrets.randbits(SESSION_BITS)


def head_name(keys: Keyring | None) -> str:
    """What this head calls itself: that of its key, which daemons check; without one, where it runs."""
    return f"{sockets.gethostname()}-{os.getpid()}" if keys is None else keys.name


@dataclass(slots=True)
class Stage:
    """A stage as the head knows it."""

    plan: StagePlan
    control: Link
    receiver: Receiver
    monitor: Monitor
    data_monitor: Monitor | None = None
    welcome: Welcome | None = None
    ready: Ready | None = None
    pong: Pong | None = None

    def describe(self) -> str:
        return described(self.plan)


class Stages:
    """The stages of one pipeline, as connected by `connect`; one thread at a time uses it.

    An `emulation` shapes what it sends from then on. With `keys` every connection is encrypted, and each device must have the key that
    they list for its name. `incarnation` is the pipeline's number, by which daemons know it. Where the plan is a drafter's, its answers
    are gathered in `proposed`.
    """

    def __init__(
        self,
        plan: ClusterPlan,
        wake: Wake,
        progress: Progress,
        emulation: Emulation | None = None,
        keys: Keyring | None = None,
        *,
        incarnation: int | None = None,
        on_word: OnWord = lambda word: None,
    ) -> None:
        self.plan = plan
        self.all: list[Stage] = []
        self._incarnation = incarnation_of(new_session(), 1) if incarnation is None else incarnation
        self._on_word = on_word
        self.proposed: deque[Proposed] = deque()
        self._broken: BrokenError | None = None
        self._keys = keys
        self._name = head_name(keys)
        self._progress = progress
        self._context: zmq.Context[Any] = zmq.Context()
        self._wake = wake
        self._ping_due_s = 0.0
        self._data: dict[zmq.Socket[bytes], tuple[Link, Receiver]] = {}
        self._unwelcomed: set[zmq.Socket[bytes]] = set()
        self._poller: zmq.Poller | None = None
        self._emulation = emulation
        self._shaped: list[tuple[Stage, Link]] = []
        self._weights: WeightServer | None = None
        self._meanwhile: Callable[[], None] = lambda: None

    def connect(self, connect_s: float = timeouts.CONNECT_S, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Dials every daemon and has it load its layers; raises `BrokenError` for one that cannot, other errors where none could.

        A daemon has `connect_s` to answer at all. `meanwhile` is called again and again, and may raise to end it.
        """
        for plan in self.plan.stages:
            socket = dial(self._context, plan.address, plan.name, self._keys)
            stage = Stage(plan, self._link(socket), Receiver(self._incarnation), Monitor(socket))
            stage.control.send(Hello(name=self._name, version=__version__, role="head-control"))
            self.all.append(stage)
        self._meanwhile = meanwhile
        self._collect(lambda stage: stage.welcome is not None, connect_s, "is `flowspec daemon` running there?")
        ends = {id(s): s for s in (self.all[0], self.all[-1])} if self.plan.drafting is None else {}
        for stage in ends.values():
            socket = dial(self._context, stage.plan.address, stage.plan.name, self._keys)
            self._data[socket] = (self._link(socket), Receiver(self._incarnation))
            self._unwelcomed.add(socket)
            stage.data_monitor = Monitor(socket)
            self._data[socket][0].send(Hello(name=self._name, version=__version__, role="head-data"))
        for index in range(len(self.all)):
            self._assign(index)
        self._collect(lambda stage: stage.ready is not None and not self._unwelcomed, None, "")
        self._stop_serving()
        if self._emulation is not None:
            self._shape(self._emulation)

    def _shape(self, emulation: Emulation) -> None:
        first = self._first_data
        first.shape = emulation.first_hop_shaper()
        self._shaped = [(self.all[0], first), *((stage, stage.control) for stage in self.all)]
        for index, stage in enumerate(self.all):
            stage.control.shape = emulation.control_shaper(index)

    @property
    def _first_data(self) -> Link:
        return next(iter(self._data.values()))[0]

    def _link(self, socket: zmq.Socket[bytes]) -> Link:
        return Link(socket, incarnation=self._incarnation, sender=self._name)

    def _assign(self, index: int) -> None:
        stages = self.plan.stages
        plan = stages[index]
        self.all[index].control.send(
            Assign(
                model=self.plan.model,
                fingerprint=self.plan.fingerprint,
                stage=index,
                stages=len(stages),
                first_layer=plan.first,
                end_layer=plan.end,
                layer_count=self.plan.layer_count,
                next_hop=stages[index + 1].address if index + 1 < len(stages) else "",
                next_name=stages[index + 1].name if index + 1 < len(stages) else "",
                dtype=self.plan.dtype,
                context=self.plan.context,
                captures=self.plan.captures,
                drafting=self.plan.drafting,
            )
        )

    def _collect(self, is_done: Callable[[Stage], bool], timeout_s: float | None, advice: str) -> None:
        """Listens until every stage is done; answers its progress, retries those that are held by another head."""
        started_s = time.monotonic()
        again: dict[int, float] = {}
        waiting: set[int] = set()
        while not all(is_done(stage) for stage in self.all):
            ready = self._poll(100)
            self._meanwhile()
            now_s = time.monotonic()
            for socket in self._data:
                list(self._verified(socket))  # nothing was sent; a refusal is raised
            for index, stage in enumerate(self.all):
                for message in self._messages_of(stage):
                    if isinstance(message, Error) and message.retry_after_s > 0 and now_s - started_s < timeouts.HELD_S:
                        if index not in waiting:
                            log.warning("waiting for %s: %s", stage.describe(), message.text)
                        waiting.add(index)
                        again[index] = now_s + min(message.retry_after_s, 1.0)
                    else:
                        self._take(stage, message)
                if again.get(index, now_s) < now_s:
                    del again[index]
                    self._assign(index)
                if timeout_s is not None and not is_done(stage) and now_s - started_s > timeout_s:
                    refusal = stage.monitor.refusal
                    why = f"no answer within {timeout_s:.0f} s" if refusal is None else refusal.told(self._keys)
                    rest = f"; {advice}" if refusal is None else f": {why}"
                    raise BrokenError(f"{stage.describe()} did not answer within {timeout_s:.0f} s{rest}", stage.plan.name, why)
            self._check_peers(now_s, ready)

    def _take(self, stage: Stage, message: Message) -> None:
        self._on_word(word_of(stage.plan.name, message))
        if isinstance(message, Welcome):
            stage.welcome = message
            stage.control.count_from(message.count)
        elif isinstance(message, Loading):
            self._progress(f"{stage.plan.name}: {message.doing}", message.share)
        elif isinstance(message, Ready):
            check_room(self.plan, self.all.index(stage), message)
            stage.ready = message
            self._progress(f"{stage.plan.name}: ready", 1.0)
        elif isinstance(message, AskModel):
            self._serve_weights(stage)
        elif isinstance(message, Proposed) and self.plan.drafting is not None:
            self.proposed.append(message)
        elif isinstance(message, Error):
            self._blame_the_lost()
            raise error_of(self.plan, self.all.index(stage), message)
        elif isinstance(message, Pong):
            stage.pong = message
        else:
            raise PeerError(f"{stage.describe()} sent an unexpected {type(message).__name__}")

    def _serve_weights(self, stage: Stage) -> None:
        if self._weights is None:
            self._weights = WeightServer(
                self._context,
                self._wake,
                model=self.plan.model,
                fingerprint=self.plan.fingerprint,
                incarnation=self._incarnation,
                sender=self._name,
                keys=self._keys,
            )
        self._weights.serve(stage.plan)

    def _stop_serving(self) -> None:
        if self._weights is not None:
            self._weights.close()
            self._weights = None

    # --------------------------------------------------------------------------------------------- talking

    def send(self, segment: Segment) -> None:
        """A segment to the first stage; where that fails `listen` says so, for those who send have more to do."""
        if not self._first_data.send(segment):
            self._broken = BrokenError(f"{self.all[0].describe()} takes no more segments", self.all[0].plan.name)

    def tell(self, message: Open | Commit | Release | Expand) -> None:
        """A control message to every stage, or to a drafter what it has to do."""
        for stage in self.all:
            stage.control.send(message)

    @property
    def cache_slots(self) -> int:
        """What every stage has room for, of all conversations together; once all are ready."""
        return min(stage.ready.cache_slots for stage in self.all if stage.ready is not None)

    @property
    def due_s(self) -> float:
        """When `listen` must be called again at the latest, because a message has come through an emulated link."""
        return min((link.due_s for _, link in self._shaped), default=float("inf"))

    def _flush(self, now_s: float) -> None:
        for stage, link in self._shaped:
            if not link.flush(now_s):
                raise BrokenError(f"{stage.describe()} takes no more messages", stage.plan.name)

    def listen(self, timeout_ms: int) -> Iterator[tuple[Verified, Tensor | None]]:
        """Waits for anything to arrive, the wake-up included; yields what was verified. Keeps the leases alive.

        Raises `BrokenError` when a device is gone, gives up or breaks the protocol, `ClusterError` for what none can do.
        """
        if self._broken is not None:
            raise self._broken
        ready = self._poll(timeout_ms)
        self._flush(time.monotonic())
        for socket in self._data:
            if socket in ready:
                yield from self._verified(socket)
        for stage in self.all:
            if stage.control.socket in ready:
                for message in self._messages_of(stage):
                    self._take(stage, message)
        self._check_peers(time.monotonic(), ready)

    def _verified(self, socket: zmq.Socket[bytes]) -> Iterator[tuple[Verified, Tensor | None]]:
        link, receiver = self._data[socket]
        for _ in range(limits.MESSAGES_PER_TURN_MAX):
            frames = receive(socket)
            if frames is None:
                return
            try:
                envelope = decode(frames)
                receiver.check(envelope)
                if isinstance(envelope.message, Verified):
                    check_features(self.plan, envelope.message, envelope.tensor)
                elif not isinstance(envelope.message, Welcome | Error):
                    raise PeerError(f"{envelope.sender} sent an unexpected {type(envelope.message).__name__}")
            except PeerError as error:
                raise BrokenError(f"a data connection: {error}", "") from None
            if isinstance(envelope.message, Verified):
                yield envelope.message, envelope.tensor
            elif isinstance(envelope.message, Welcome):
                link.count_from(envelope.message.count)
                self._unwelcomed.discard(socket)
            elif isinstance(envelope.message, Error):
                raise BrokenError(envelope.message.text, "")

    # --------------------------------------------------------------------------------------------- sockets

    def _poll(self, timeout_ms: int) -> set[Any]:
        """Waits for anything to arrive; returns the sockets that have something."""
        monitors = [m.socket for s in self.all for m in (s.monitor, s.data_monitor) if m is not None]
        if self._poller is None or len(self._poller.sockets) != 1 + len(self.all) + len(monitors) + len(self._data):
            self._poller = zmq.Poller()
            for source in (self._wake.read_fd, *(s.control.socket for s in self.all), *monitors, *self._data):
                self._poller.register(source, zmq.POLLIN)
        ready = ready_sources(self._poller.poll(timeout_ms))
        if self._wake.read_fd in ready:
            self._wake.clear()
        return ready

    def _messages_of(self, stage: Stage) -> list[Message]:
        found: list[Message] = []
        for _ in range(limits.MESSAGES_PER_TURN_MAX):
            frames = receive(stage.control.socket)
            if frames is None:
                break
            try:
                envelope = decode(frames)
                stage.receiver.check(envelope)
            except PeerError as error:
                raise BrokenError(f"{stage.describe()}: {error}", stage.plan.name) from None
            found.append(envelope.message)
        return found

    def _blame_the_lost(self) -> None:
        """Before a stage's error is raised: a device that is gone is the better explanation, if there is one."""
        time.sleep(LOSS_SETTLES_S)
        for stage in self.all:
            self._check_connection(stage)

    def _check_connection(self, stage: Stage) -> None:
        monitors = [monitor for monitor in (stage.monitor, stage.data_monitor) if monitor is not None]
        lost = any([monitor.drain()[0] for monitor in monitors])
        for refusal in (monitor.refusal for monitor in monitors):
            if refusal is not None and refusal.is_final:
                why = refusal.told(self._keys)
                raise BrokenError(f"{stage.describe()} refuses: {why}", stage.plan.name, why)
        if lost and stage.welcome is not None:
            doing = "while loading" if stage.ready is None else "while answering"
            raise BrokenError(
                f"{stage.describe()} was lost {doing}: its connection closed; see the daemon's log there",
                stage.plan.name,
                "its connection closed",
            )

    def _check_peers(self, now_s: float, ready: set[Any]) -> None:
        """Keeps the leases alive; raises `BrokenError` for a device that is gone."""
        for stage in self.all:
            if stage.monitor.socket in ready or (stage.data_monitor is not None and stage.data_monitor.socket in ready):
                self._check_connection(stage)
        if self._weights is not None and self._weights.error is not None:
            self._blame_the_lost()
            raise self._weights.error
        if now_s < self._ping_due_s:
            return
        self._ping_due_s = now_s + timeouts.PING_EVERY_S
        for stage in self.all:
            if stage.welcome is not None:
                stage.control.send(Ping())

    def close(self, lost: str = "") -> None:
        """Lets go of the daemons; the one that is lost is told, but not waited for."""
        self._stop_serving()
        for _, link in self._shaped:
            link.unshape()
        for stage in self.all:
            if stage.welcome is not None:
                stage.control.send(Reset())
            if stage.plan.name == lost:
                stage.monitor.close()
                stage.control.socket.close(linger=0)
        self._context.destroy(linger=200)
