"""A head whose cluster fails, in virtual time: `HeadCore` and `Membership` as the runtime drives them, over connections that break.

What the runtime's `Head` and `Stages` do with sockets and threads is done here with a virtual clock: pipelines are formed, fenced and
formed again, each with an incarnation and connections of its own. Every token is compared with the plain answer when it is emitted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from flowspec import __version__
from flowspec.core import limits
from flowspec.core.cluster_messages import Assign, Error, Hello, Ping, Pong, Ready, Reset, Welcome
from flowspec.core.events import (
    Cancel,
    Draft,
    Emit,
    Finished,
    Forget,
    HeadEvent,
    PipelineLost,
    Reformed,
    SetTimer,
    Submit,
    TimerFired,
    ToDrafter,
    ToPipeline,
    ToStages,
    VerifiedArrived,
)
from flowspec.core.head import HeadCore
from flowspec.core.incarnation import incarnation_of
from flowspec.core.membership import (
    Answered,
    Begin,
    Broken,
    Disband,
    Formed,
    GiveUp,
    Heard,
    Membership,
    MembershipEvent,
    Note,
    Probe,
    Progressed,
    Reform,
    Tick,
    Unfit,
)
from flowspec.core.messages import Release, Verified
from flowspec.plan.split import even_split
from flowspec.plan.timing import Curve
from flowspec.sim.clock import Alarm, Clock
from flowspec.sim.drafter import FakeDrafter
from flowspec.sim.faults.daemon import SimDaemon
from flowspec.sim.faults.drafters import SimDrafters
from flowspec.sim.faults.network import Connection, Network
from flowspec.sim.link import Frames
from flowspec.sim.record import Answer
from flowspec.wire.codec import Envelope

HEAD = "head"
SESSION = 1
TICK_S = 0.25
PING_S = 0.5
CONNECT_S = 2.0
LEFT_S = 0.2
"""What a token that is still to come is taken to need."""


@dataclass(slots=True)
class _Pipeline:
    """One incarnation, as the head sees it: its connections, and who of it is ready, with how many cache slots."""

    incarnation: int
    devices: tuple[str, ...]
    control: dict[str, Connection] = field(default_factory=dict)
    data: dict[str, Connection] = field(default_factory=dict)
    welcome: list[str] = field(default_factory=list)
    ready: dict[str, int] = field(default_factory=dict)


class Cluster:
    """Devices and the head that forms pipelines of them. `expect` gives the plain answer to a question."""

    def __init__(
        self,
        clock: Clock,
        network: Network,
        daemons: Mapping[str, SimDaemon],
        head: HeadCore,
        membership: Membership,
        *,
        layer_count: int,
        devices_min: int,
        drafters: Sequence[FakeDrafter],
        drafting: Sequence[Curve],
        expect: Callable[[Submit], Sequence[int]],
        tell: Callable[[str, str], None],
    ) -> None:
        self.clock = clock
        self.network = network
        self.daemons = daemons
        self.head = head
        self.membership = membership
        self.answers: dict[int, list[Answer]] = {}
        self.on_end: Callable[[int], None] = lambda request: None
        self.events = 0
        self.pipelines = 0
        self.skew_s = 0.0
        self.is_stopped = False
        self._layer_count = layer_count
        self._devices_min = devices_min
        self._drafters = drafters
        self.drafters = SimDrafters(clock, drafters, drafting, self._do, self._step)
        self._expect = expect
        self._tell = tell
        self._expected: dict[int, Sequence[int]] = {}
        self._tokens = 0
        self._pipeline: _Pipeline | None = None
        self._timer: Alarm | None = None
        self._pinged_s = 0.0
        self._backlog: list[Callable[[], None]] = []
        self._stalled = head.handle(PipelineLost(), 0.0)
        self._decide(Begin())
        self._tick()

    @property
    def now_s(self) -> float:
        """The head's own clock, which may have jumped."""
        return self.clock.now_s + self.skew_s

    def at(self, time_s: float, event: Submit | Cancel | Forget) -> None:
        """Have someone at the head ask for something."""
        self.clock.at(time_s, lambda: self._do(lambda: self._step(event)))

    def stop(self) -> None:
        """The head's process is stopped; what comes waits."""
        self.is_stopped = True

    def go_on(self) -> None:
        self.is_stopped = False
        backlog, self._backlog = self._backlog, []
        for each in backlog:
            self._do(each)

    def _do(self, action: Callable[[], None]) -> None:
        if self.is_stopped:
            self._backlog.append(action)
        else:
            action()

    # --------------------------------------------------------------------------------------------- the core

    def _step(self, event: HeadEvent, due_s: float = 0.0) -> None:
        """Gives the core an event; a timer's never comes before it was `due_s`, though a clock that jumped may be a rounding error off."""
        self.events += 1
        if isinstance(event, Submit):
            self._expected[event.request] = self._expect(event)
            self.answers.setdefault(event.request, []).append(Answer(event, self.now_s))
        for command in self.head.handle(event, max(self.now_s, due_s)):
            if isinstance(command, ToStages):
                if isinstance(command.message, Release) and command.message.epoch < limits.ID_MAX:
                    self._tell(HEAD, f"gives up the caches of request {command.message.request}")
                for connection in self._formed().control.values():
                    connection.send(HEAD, command.message)
            elif isinstance(command, ToPipeline):
                self._tell(f"{[part.commit.request for part in command.segment.parts]}", f"sends {command.segment.row_count} rows")
                self._formed().data[self._formed().devices[0]].send(HEAD, command.segment)
            elif isinstance(command, Draft):
                self.drafters.draft(command, self.now_s)
            elif isinstance(command, ToDrafter):
                self.drafters.release(command)
            elif isinstance(command, SetTimer):
                if self._timer is not None:
                    self._timer.cancel()
                self._timer = self.clock.at(command.at_s - self.skew_s, partial(self._do, partial(self._step, TimerFired(), command.at_s)))
            elif isinstance(command, Emit):
                self._emit(command)
            elif isinstance(command, Finished):
                answer = self.answers[command.request][-1]
                answer.end, answer.ended_s = command, self.now_s
                self._tell(f"request {command.request}", f"ends: {command.reason}, {len(answer.tokens)} tokens")
                self.on_end(command.request)
        admission = self.head.admission
        if isinstance(event, Submit) and self.head.is_formed and event.request in admission.waiting:
            self._tell(f"request {event.request}", "waits for room")
        assert not self.head.is_formed or admission.room.has(admission.held), f"{admission.held} is held of {admission.room}"

    def _emit(self, command: Emit) -> None:
        answer = self.answers[command.request][-1]
        answer.tokens += command.tokens
        answer.logprobs += command.logprobs
        self._tokens += len(command.tokens)
        self._tell(f"request {command.request}", f"emits {list(command.tokens)}")
        expected = self._expected[command.request]
        assert answer.text == list(expected[: len(answer.text)]), f"request {command.request} has a wrong token: {answer.text}"

    def _formed(self) -> _Pipeline:
        assert self._pipeline is not None, "something is sent, but there is no pipeline"
        assert len(self._pipeline.ready) == len(self._pipeline.devices), "something is sent, but the pipeline is not formed"
        return self._pipeline

    # --------------------------------------------------------------------------------------------- membership

    def _decide(self, event: MembershipEvent) -> None:
        for command in self.membership.handle(event, self.now_s):
            if isinstance(command, Note):
                self._tell(HEAD, command.text)
            elif isinstance(command, Probe):
                self._probe(command.device)
            elif isinstance(command, Reform):
                self._fence(command.silent_s)
                self._form(command.devices)
            elif isinstance(command, Disband):
                self._fence(command.silent_s)
            else:
                assert isinstance(command, GiveUp)
                raise AssertionError(f"the head gives up: {command.text}")

    def _tick(self) -> None:
        self.clock.at(self.clock.now_s + TICK_S, self._tick)
        self._do(self._watch)

    def _watch(self) -> None:
        pipeline = self._pipeline
        if pipeline is not None and self.now_s - self._pinged_s >= PING_S:
            self._pinged_s = self.now_s
            for name in pipeline.welcome:
                pipeline.control[name].send(HEAD, Ping())
        oldest_s = self.head.flights.oldest_s
        left = sum(
            request.submit.new_tokens_max - len(request.new_tokens) for request in self.head.requests() if request.submit is not None
        )
        flight_s = 0.0 if oldest_s is None else self.now_s - oldest_s
        self._decide(Tick(flight_s=flight_s, left_s=left * LEFT_S, tokens=self._tokens))

    def _fence(self, silent_s: float) -> None:
        """The old pipeline is over: its devices are told, if they can be, and none of its words counts."""
        pipeline, self._pipeline = self._pipeline, None
        if self.head.is_formed:
            self._step(PipelineLost(silent_s=silent_s))
        if pipeline is not None:
            for connection in pipeline.control.values():
                connection.send(HEAD, Reset())
            for connection in (*pipeline.control.values(), *pipeline.data.values()):
                self.network.close(connection, by=HEAD)

    def _form(self, devices: tuple[str, ...]) -> None:
        if not self._devices_min <= len(devices) <= self._layer_count:
            self._decide(Unfit(text=f"{self._layer_count} layers on {len(devices)} devices"))
            return
        self.pipelines += 1
        pipeline = self._pipeline = _Pipeline(incarnation_of(SESSION, self.pipelines), devices)
        self._tell(HEAD, f"forms generation {self.pipelines} of {', '.join(devices)}")
        for name in devices:
            pipeline.control[name] = self._dial(pipeline, name, "head-control")
        for name in dict.fromkeys((devices[0], devices[-1])):
            pipeline.data[name] = self._dial(pipeline, name, "head-data")

        def check() -> None:
            missing = [name for name in devices if name not in pipeline.welcome]
            if missing and pipeline is self._pipeline:
                self._decide(Broken(device=missing[0], text="no answer"))

        self.clock.at(self.clock.now_s + CONNECT_S, lambda: self._do(check))

    def _dial(self, pipeline: _Pipeline, name: str, role: str) -> Connection:
        def lost() -> None:
            if pipeline is self._pipeline:
                self._decide(Broken(device=name, text="its connection closed"))

        def take(connection: Connection, envelope: Envelope, frames: Frames) -> None:
            del frames
            if pipeline is self._pipeline and connection.is_open:  # what waits in a socket that is closed is never read
                self._take(pipeline, name, role, envelope)

        connection = self.network.connect(
            HEAD,
            name,
            role,
            pipeline.incarnation,
            {HEAD: lambda *arrived: self._do(lambda: take(*arrived)), name: self.daemons[name].take},
            {HEAD: lambda: self._do(lost)},
        )
        connection.send(HEAD, Hello(name=HEAD, version=__version__, role=role))
        return connection

    def _probe(self, name: str) -> None:
        """A Hello on a connection of its own; whoever answers it is there."""

        def take(connection: Connection, envelope: Envelope, frames: Frames) -> None:
            del envelope, frames
            if connection.is_open:
                self._decide(Answered(device=name))
                self.network.close(connection, by=HEAD)

        received = {HEAD: lambda *arrived: self._do(lambda: take(*arrived)), name: self.daemons[name].take}
        connection = self.network.connect(HEAD, name, "head-control", incarnation_of(SESSION + 1, 1), received, {})
        connection.send(HEAD, Hello(name=HEAD, version=__version__, role="head-control"))

    # ------------------------------------------------------------------------------------------- the devices

    def _take(self, pipeline: _Pipeline, name: str, role: str, envelope: Envelope) -> None:
        message = envelope.message
        assert envelope.incarnation == pipeline.incarnation, "a word of another incarnation on a pipeline's own connection"
        if isinstance(message, Verified):
            if envelope.tensor is not None:
                first = 0
                for part in message.parts:
                    rows = range(first, first + len(part.ids))
                    for drafter in self._drafters:
                        if drafter.captures:
                            drafter.take_features(part.request, part.epoch, part.ids, cast(Any, envelope.tensor.select(rows)))
                    first += len(part.ids)
            self._step(VerifiedArrived(verified=message))
        elif isinstance(message, Pong):
            self._decide(Heard(device=name, running_s=message.running_s, queued=message.queued, done=message.done))
        elif isinstance(message, Welcome):
            if role == "head-control":
                self._welcomed(pipeline, name)
        elif isinstance(message, Ready):
            self._decide(Progressed(device=name, is_ready=True))
            pipeline.ready[name] = message.cache_slots
            if len(pipeline.ready) == len(pipeline.devices):
                self._tell(HEAD, "the pipeline is formed")
                self._decide(Formed())
                self._step(Reformed(stage_count=len(pipeline.devices), cache_slots=min(pipeline.ready.values())))
        else:
            assert isinstance(message, Error), f"an unexpected {type(message).__name__}"
            self._error(pipeline, name, message)

    def _welcomed(self, pipeline: _Pipeline, name: str) -> None:
        self._decide(Progressed(device=name))
        pipeline.welcome.append(name)
        if len(pipeline.welcome) == len(pipeline.devices) and not pipeline.ready:
            for index in range(len(pipeline.devices)):
                self._assign(pipeline, index)

    def _assign(self, pipeline: _Pipeline, index: int) -> None:
        devices = pipeline.devices
        counts = even_split(self._layer_count, len(devices))
        is_last = index == len(devices) - 1
        assign = Assign(
            model="model",
            fingerprint="fingerprint",
            stage=index,
            stages=len(devices),
            first_layer=sum(counts[:index]),
            end_layer=sum(counts[: index + 1]),
            layer_count=self._layer_count,
            next_hop="" if is_last else f"{devices[index + 1]}:1",
            next_name="" if is_last else devices[index + 1],
            dtype="float32",
            context=self.head.context,
            captures=tuple(sorted({layer for drafter in self._drafters for layer in drafter.captures})),
        )
        pipeline.control[devices[index]].send(HEAD, assign)

    def _error(self, pipeline: _Pipeline, name: str, error: Error) -> None:
        index = pipeline.devices.index(name)
        if error.retry_after_s > 0:
            self.clock.at(
                self.clock.now_s + error.retry_after_s,
                lambda: self._do(lambda: self._assign(pipeline, index) if pipeline is self._pipeline else None),
            )
        elif error.cause == "next":
            self._decide(Broken(device=pipeline.devices[index + 1], text=f"lost by {name}"))
        else:
            assert error.cause in ("part", "again"), f"{name} fails: {error.text}"
            is_part = error.cause == "part"
            self._decide(Broken(device=name if is_part else "", text=error.text, is_refusal=is_part))
