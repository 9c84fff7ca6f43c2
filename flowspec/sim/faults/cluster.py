"""A head whose cluster fails, in virtual time: `HeadCore` and `Forming` as the runtime drives them, over connections that break.

What the runtime's `Head` and `Pipelines` do with sockets and threads is done here with a virtual clock. Every token is compared with the
plain answer when it is emitted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from flowspec import __version__
from flowspec.core import limits
from flowspec.core.cluster_messages import Hello, Welcome
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
    Timed,
    TimerFired,
    ToDrafter,
    ToPipeline,
    ToStages,
    VerifiedArrived,
)
from flowspec.core.forming import (
    CONTROL,
    DATA,
    Closed,
    Dial,
    Forming,
    FormingCommand,
    FormingEvent,
    GiveUp,
    HangUp,
    Lose,
    Open,
    Part,
    Passed,
    Plan,
    Planned,
    Refused,
    Said,
    Start,
    Tell,
    Terms,
    Unfound,
    Unplanned,
    Unsent,
    Use,
    Wronged,
)
from flowspec.core.head import HeadCore
from flowspec.core.incarnation import incarnation_of
from flowspec.core.membership import Answered, Begin, Membership, Note, Probe, Survey, Surveyed, Tick
from flowspec.core.messages import Release, Verified
from flowspec.errors import PeerError
from flowspec.plan.placement import ClusterPlan, StagePlan, assigns_of
from flowspec.plan.split import weighted_split
from flowspec.plan.timing import Curve
from flowspec.sim.clock import Alarm, Clock
from flowspec.sim.conduct import Conduct
from flowspec.sim.drafter import FakeDrafter
from flowspec.sim.faults.daemon import SimDaemon
from flowspec.sim.faults.drafters import SimDrafters
from flowspec.sim.faults.network import Connection, Network
from flowspec.sim.link import Frames
from flowspec.sim.record import Answer
from flowspec.wire.codec import Envelope

HEAD = "head"
SESSION = 1
TERMS = Terms(connect_s=2.0, reconnect_s=2.0, held_s=4.0, ping_s=0.5, watch_s=0.25, settle_s=0.1)
ROW_BYTES = 12000
"""Of what goes from stage to stage."""
DIALLED_S = 0.01
"""How long it takes to hear that a device cannot be dialled."""
SURVEY_S = 0.3
"""What it takes to ask a device what a plan must know of it."""


@dataclass(slots=True)
class _Lines:
    """The connections of one pipeline, by device and role."""

    incarnation: int
    parts: tuple[Part, ...]
    dialled: dict[tuple[str, str], Connection] = field(default_factory=dict)

    @property
    def first_data(self) -> Connection:
        return self.dialled[self.parts[0].device, DATA]


class Cluster:
    """Devices and the head that forms pipelines of them. `expect` gives the plain answer to a question.

    Where nothing passes, a data connection takes `frames_max` frames and no more.
    Where what devices say may not be honest, tokens may be wrong; all else is as ever.
    Those that are `absent` are down when the head begins, which knows it.
    """

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
        devices_max: int,
        drafters: Sequence[FakeDrafter],
        drafting: Sequence[Curve],
        frames_max: int,
        expect: Callable[[Submit], Sequence[int]],
        tell: Callable[[str, str], None],
        terms: Terms = TERMS,
        is_honest: bool = True,
        absent: Sequence[str] = (),
    ) -> None:
        self.clock = clock
        self.network = network
        self.daemons = daemons
        self.head = head
        self.membership = membership
        self.forming = Forming(membership, terms, start=Start.ANY)
        self.answers: dict[int, list[Answer]] = {}
        self.on_end: Callable[[int], None] = lambda request: None
        self.on_give_up: Callable[[str], None] = lambda text: None
        self.events = 0
        self.pipelines = 0
        self.skew_s = 0.0
        self.is_stopped = False
        self._layer_count = layer_count
        self._frames_max = frames_max
        self._devices_min = devices_min
        self._devices_max = devices_max
        self._drafters = drafters
        self.drafters = SimDrafters(clock, drafters, drafting, self._do, self._step)
        self._expect = expect
        self._tell = tell
        self._is_honest = is_honest
        self._conduct = Conduct(is_honest=is_honest)
        self._expected: dict[int, Sequence[int]] = {}
        self._tokens = 0
        self._lines: dict[int, _Lines] = {}
        self._timer: Alarm | None = None
        self._due: Alarm | None = None
        self._backlog: list[Callable[[], None]] = []
        self._stalled = head.handle(PipelineLost(), 0.0)
        self._give(Begin(absent=tuple((name, "it is down") for name in absent)))

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
        commands = self.head.handle(event, max(self.now_s, due_s))
        self.head.validate()
        self._conduct.check(self.head, event, commands)
        for command in commands:
            if isinstance(command, ToStages):
                if isinstance(command.message, Release) and command.message.epoch < limits.ID_MAX:
                    self._tell(HEAD, f"gives up the caches of request {command.message.request}")
                for (_, role), connection in self._formed().dialled.items():
                    if role == CONTROL:
                        connection.send(HEAD, command.message)
            elif isinstance(command, ToPipeline):
                self._tell(f"{[part.commit.request for part in command.segment.parts]}", f"sends {command.segment.row_count} rows")
                self._send(command)
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
            elif isinstance(command, Timed):
                self._give(Passed(pipeline=self.forming.number, hops=command.hops, context=command.context))
            elif isinstance(command, Finished):
                answer = self.answers[command.request][-1]
                answer.end, answer.ended_s = command, self.now_s
                self._tell(f"request {command.request}", f"ends: {command.reason}, {len(answer.tokens)} tokens")
                self.on_end(command.request)
        admission = self.head.admission
        if isinstance(event, Submit) and self.head.is_formed and event.request in admission.waiting:
            self._tell(f"request {event.request}", "waits for room")

    def _send(self, command: ToPipeline) -> None:
        """A segment for the first stage; where its connection takes no more that is told a moment later."""
        lines = self._formed()
        if lines.first_data.link_of(HEAD).is_full(self._frames_max):
            unsent = Unsent(pipeline=self.forming.number, device=lines.parts[0].device, what="segments")
            self.clock.at(self.clock.now_s, partial(self._do, partial(self._give, unsent)))
        else:
            lines.first_data.send(HEAD, command.segment)

    def _emit(self, command: Emit) -> None:
        answer = self.answers[command.request][-1]
        answer.tokens += command.tokens
        answer.logprobs += command.logprobs
        self._tokens += len(command.tokens)
        self._tell(f"request {command.request}", f"emits {list(command.tokens)}")
        assert max(command.tokens) < self.head.vocabulary, f"token {max(command.tokens)} was emitted"
        if not self._is_honest:
            return
        expected = self._expected[command.request]
        assert answer.text == list(expected[: len(answer.text)]), f"request {command.request} has a wrong token: {answer.text}"

    def _formed(self) -> _Lines:
        assert self.forming.is_formed, "something is sent, but the pipeline is not formed"
        return self._lines[self.forming.number]

    # --------------------------------------------------------------------------------------------- pipelines

    def _give(self, event: FormingEvent, due_s: float = float("-inf")) -> None:
        """Gives the core an event and does what it says; `due_s` is as for `_step`."""
        self.events += 1
        commands = self.forming.handle(event, max(self.now_s, due_s))
        self.forming.validate()
        for command in commands:
            self._execute(command)
        if self._due is not None:
            self._due.cancel()
        due_s = self.forming.due_s
        self._due = self.clock.at(due_s - self.skew_s, lambda: self._do(lambda: self._look(due_s)))

    def _look(self, due_s: float) -> None:
        flight, rows = self.head.flights.oldest
        self._give(
            Tick(
                flight_s=self.head.flight_s(self.now_s),
                flight=flight,
                flight_bytes=rows * ROW_BYTES,
                left_s=self.head.left_s(),
                tokens=self._tokens,
            ),
            due_s,
        )

    def _execute(self, command: FormingCommand) -> None:
        if isinstance(command, Note):
            self._tell(HEAD, command.text)
        elif isinstance(command, Plan):
            self._plan(command)
        elif isinstance(command, Open):
            devices = ", ".join(part.device for part in command.parts)
            if not command.is_beside:
                self.pipelines += 1
                self._tell(HEAD, f"forms generation {command.pipeline} of {devices}")
            else:
                self._tell(HEAD, f"has devices make ready for a pipeline of {devices}")
            self._lines[command.pipeline] = _Lines(incarnation_of(SESSION, command.pipeline), command.parts)
        elif isinstance(command, Dial):
            self._dial(command.pipeline, command.device, command.role)
        elif isinstance(command, Tell):
            self._lines[command.pipeline].dialled[command.device, CONTROL].send(HEAD, command.message)
        elif isinstance(command, Use):
            self._tell(HEAD, "the pipeline is formed")
            self._step(Reformed(stage_count=command.stage_count, cache_slots=command.cache_slots))
        elif isinstance(command, Lose):
            self._step(PipelineLost(silent_s=command.silent_s))
        elif isinstance(command, HangUp):
            for connection in self._lines.pop(command.pipeline).dialled.values():
                self.network.close(connection, by=HEAD)
        elif isinstance(command, Probe):
            self._probe(command.device)
        elif isinstance(command, GiveUp):
            self.on_give_up(command.text)
        elif isinstance(command, Survey):
            self.clock.at(self.clock.now_s + SURVEY_S, lambda: self._do(lambda: self._survey(command.device)))

    def _plan(self, command: Plan) -> None:
        devices = command.devices[: self._devices_max]
        if not self._devices_min <= len(devices) <= self._layer_count:
            self._give(Unplanned(text=f"{self._layer_count} layers on {len(devices)} devices", is_beside=command.is_beside))
            return
        counts = weighted_split(self._layer_count, [1 / command.slowness.get(device, 1.0) for device in devices])
        plan = ClusterPlan(
            model="model",
            fingerprint="fingerprint",
            dtype="float32",
            context=self.head.context,
            stages=tuple(
                StagePlan(name=device, address=f"{device}:1", first=sum(counts[:index]), end=sum(counts[: index + 1]))
                for index, device in enumerate(devices)
            ),
            captures=tuple(sorted({layer for drafter in self._drafters for layer in drafter.captures})),
        )
        parts = [Part(device=device, place=device, assign=assign) for device, assign in zip(devices, assigns_of(plan), strict=True)]
        gain = self._gain(parts, command.slowness) if command.is_beside else None
        self._give(Planned(parts=tuple(parts), is_beside=command.is_beside, gain=gain))

    def _gain(self, parts: Sequence[Part], slowness: Mapping[str, float]) -> float:
        """How many times as fast as the pipeline that works these would be, by their slowest stages."""
        before_s, after_s = (
            max(slowness.get(part.device, 1.0) * (part.assign.end_layer - part.assign.first_layer) for part in each)
            for each in (self._formed().parts, parts)
        )
        return before_s / after_s

    def _dial(self, pipeline: int, name: str, role: str) -> None:
        lines = self._lines[pipeline]

        def lost() -> None:
            self._give(Closed(pipeline=pipeline, device=name))

        def take(connection: Connection, envelope: Envelope, frames: Frames) -> None:
            del frames
            if connection.is_open:  # what waits in a socket that is closed is never read
                self._take(pipeline, name, role, envelope)

        def refuse(connection: Connection, text: str) -> None:
            if connection.is_open:
                self._give(Wronged(pipeline=pipeline, device=name if role == CONTROL else "", text=text))

        daemon = self.daemons[name]
        connection = lines.dialled[name, role] = self.network.connect(
            HEAD,
            name,
            role,
            lines.incarnation,
            {HEAD: lambda *arrived: self._do(lambda: take(*arrived)), name: daemon.take},
            {HEAD: lambda: self._do(lost)},
            {HEAD: lambda *arrived: self._do(lambda: refuse(*arrived)), name: daemon.refuse},
        )
        connection.send(HEAD, Hello(name=HEAD, version=__version__, role=role))
        trouble: FormingEvent | None = None
        if not self.network.is_resolved(HEAD, name):
            trouble = Unfound(pipeline=pipeline, device=name, text="no such name")
        elif daemon.is_locked:
            trouble = Refused(pipeline=pipeline, device=name, text="it does not know our key", is_final=True)
        if trouble is not None:
            self.clock.at(self.clock.now_s + DIALLED_S, partial(self._do, partial(self._give, trouble)))

    def _survey(self, name: str) -> None:
        """Whoever is there now has told what a plan needs."""
        daemon = self.daemons[name]
        is_reached = self.network.is_reached(HEAD, name) and self.network.is_reached(name, HEAD)
        is_there = daemon.is_up and not daemon.is_stopped and is_reached and self.network.is_resolved(HEAD, name)
        self._give(Surveyed(device=name, trouble="" if is_there else "it did not answer"))

    def _probe(self, name: str) -> None:
        """A Hello on a connection of its own; whoever answers it is there."""

        def take(connection: Connection, envelope: Envelope, frames: Frames) -> None:
            del frames
            if connection.is_open:
                if isinstance(envelope.message, Welcome):
                    self._give(Answered(device=name, is_held=envelope.message.is_held))
                else:
                    assert not self._is_honest, "Hello is answered with Welcome"
                self.network.close(connection, by=HEAD)

        if self.daemons[name].is_locked:
            return
        received = {HEAD: lambda *arrived: self._do(lambda: take(*arrived)), name: self.daemons[name].take}
        refuse = {name: self.daemons[name].refuse}
        connection = self.network.connect(HEAD, name, CONTROL, incarnation_of(SESSION + 1, 1), received, {}, refuse)
        connection.send(HEAD, Hello(name=HEAD, version=__version__, role=CONTROL))

    def _take(self, pipeline: int, name: str, role: str, envelope: Envelope) -> None:
        """A message of a device, on a connection that is open."""
        message = envelope.message
        if envelope.incarnation != self._lines[pipeline].incarnation:
            self._wronged(pipeline, name, "a word of another incarnation on a pipeline's own connection")
            return
        if not isinstance(message, Verified) or role != DATA:
            self._give(Said(pipeline=pipeline, device=name, role=role, message=message))
            return
        if not self.head.is_formed:
            return
        if envelope.tensor is not None:
            first = 0
            for part in message.parts:
                rows = range(first, first + len(part.ids))
                for drafter in self._drafters:
                    if drafter.captures:
                        drafter.take_features(part.request, part.epoch, part.ids, cast(Any, envelope.tensor.select(rows)))
                first += len(part.ids)
        try:
            self._step(VerifiedArrived(verified=message))
        except PeerError as error:
            self._wronged(pipeline, "", str(error))

    def _wronged(self, pipeline: int, device: str, text: str) -> None:
        """A device said what no honest one says."""
        assert not self._is_honest, text
        self._give(Wronged(pipeline=pipeline, device=device, text=text))
