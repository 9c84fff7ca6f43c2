"""One pipeline after another in virtual time: `core.cluster.forming` as the runtime's `Pipelines` drives it,
over connections that break."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from flowspec import __version__
from flowspec.core.cluster.forming import (
    CONTROL,
    DATA,
    AddressNotFound,
    AskPlan,
    Assignment,
    ConnectionClosed,
    DeviceBrokeProtocol,
    DeviceMessageArrived,
    Dial,
    DialRefused,
    EndSession,
    FormingCommand,
    FormingEvent,
    HangUp,
    OpenPipeline,
    PipelineCore,
    PlanFailed,
    PlanMade,
    SendControl,
    StartPipeline,
    StopPipeline,
)
from flowspec.core.cluster.incarnation import incarnation_of
from flowspec.core.cluster.membership import DeviceSurveyed, Note, Probe, ProbeAnswered, SurveyDevice, Tick
from flowspec.core.driving import Driver
from flowspec.core.head.events import PipelineLost, PipelineReformed
from flowspec.core.protocol.cluster_messages import Hello, Reset, Welcome
from flowspec.sim.clock import Alarm, Clock
from flowspec.sim.link import Frames
from flowspec.wire.codec import Envelope
from lab.faults.daemon import SimDaemon
from lab.faults.network import Connection, Network

HEAD = "head"
DIALLED_S = 0.01
"""How long it takes to hear that a device cannot be dialled."""
SURVEY_S = 0.3
"""What it takes to ask a device what a plan must know of it."""


class Process:
    """The head's: all that it does happens in one, which may be stopped, and whose clock may jump."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.events = 0
        """What its cores were given so far."""
        self.skew_s = 0.0
        self.is_stopped = False
        self._backlog: list[Callable[[], None]] = []

    @property
    def now_s(self) -> float:
        """By its own clock, which may have jumped."""
        return self.clock.now_s + self.skew_s

    def do(self, action: Callable[[], None]) -> None:
        """Now, or when a stopped process goes on."""
        if self.is_stopped:
            self._backlog.append(action)
        else:
            action()

    def at(self, time_s: float, action: Callable[[], None]) -> Alarm:
        """The same, at an instant of its own clock as it goes now."""
        return self.clock.at(time_s - self.skew_s, lambda: self.do(action))

    def later(self, after_s: float, action: Callable[[], None]) -> Alarm:
        return self.clock.at(self.clock.now_s + after_s, lambda: self.do(action))

    def stop(self) -> None:
        """What comes waits."""
        self.is_stopped = True

    def go_on(self) -> None:
        self.is_stopped = False
        backlog, self._backlog = self._backlog, []
        for each in backlog:
            self.do(each)


@dataclass(slots=True)
class Lines:
    """The connections of one pipeline, by device and role."""

    incarnation: int
    parts: tuple[Assignment, ...]
    dialled: dict[tuple[str, str], Connection] = field(default_factory=dict)

    @property
    def first_data(self) -> Connection:
        return self.dialled[self.parts[0].device, DATA]


class SimPipelines:
    """Those of one session of a head, whose probes are of the session after it.

    Who makes one says how to `plan`, how things `stand`, and what follows from a pipeline's loss or its being
    there (`on_change`), from the session's end (`on_give_up`), and from what came on a device's connection:
    `take` says whether that was all that there is to do about it.
    """

    def __init__(
        self,
        process: Process,
        network: Network,
        daemons: Mapping[str, SimDaemon],
        forming: PipelineCore,
        *,
        session: int,
        plan: Callable[[AskPlan], PlanMade | PlanFailed],
        stand: Callable[[float], Tick],
        on_change: Callable[[PipelineLost | PipelineReformed], None],
        on_give_up: Callable[[str], None],
        take: Callable[[str, str, Envelope], bool],
        tell: Callable[[str, str], None],
        is_honest: bool,
    ) -> None:
        self.process = process
        self.forming = forming
        self.count = 0
        self._network = network
        self._daemons = daemons
        self._session = session
        self._plan = plan
        self._stand = stand
        self._on_change = on_change
        self._on_give_up = on_give_up
        self._take = take
        self._tell = tell
        self._is_honest = is_honest
        self._driver: Driver[tuple[FormingEvent, float], FormingCommand] = Driver(self._handle, self._do)
        self._lines: dict[int, Lines] = {}
        self._due: Alarm | None = None
        self._is_over = False

    @property
    def lines(self) -> Lines:
        """Those of the pipeline that is there."""
        assert self.forming.is_formed, "something is sent, but the pipeline is not formed"
        return self._lines[self.forming.number]

    def give(self, event: FormingEvent, due_s: float = float("-inf")) -> None:
        """Gives the core an event, and has done what it says; a timer's never comes before it was `due_s`,
        though a clock that jumped may be a rounding error off."""
        self._driver.give((event, due_s))
        if self._due is not None:
            self._due.cancel()
        if self._is_over:
            return
        due_s = self.forming.due_s
        self._due = self.process.at(due_s, lambda: self.give(self._stand(self.process.now_s), due_s))

    def wronged(self, pipeline: int, device: str, text: str) -> None:
        """A device (empty: one that cannot be told) said what no honest one says."""
        assert not self._is_honest, text
        self.give(DeviceBrokeProtocol(pipeline=pipeline, device=device, text=text))

    def _handle(self, given: tuple[FormingEvent, float]) -> list[FormingCommand]:
        event, due_s = given
        self.process.events += 1
        commands = self.forming.handle(event, max(self.process.now_s, due_s))
        self.forming.validate()
        return commands

    def _do(self, command: FormingCommand) -> None:
        if isinstance(command, Note):
            self._tell(HEAD, command.text)
        elif isinstance(command, AskPlan):
            self.give(self._plan(command))
        elif isinstance(command, OpenPipeline):
            devices = ", ".join(part.device for part in command.parts)
            if not command.is_beside:
                self.count += 1
                self._tell(HEAD, f"forms generation {command.pipeline} of {devices}")
            else:
                self._tell(HEAD, f"has devices make ready for a pipeline of {devices}")
            self._lines[command.pipeline] = Lines(
                incarnation_of(self._session, command.pipeline), command.parts
            )
        elif isinstance(command, Dial):
            self._dial(command.pipeline, command.device, command.role)
        elif isinstance(command, SendControl):
            self._lines[command.pipeline].dialled[command.device, CONTROL].send(HEAD, command.message)
        elif isinstance(command, StartPipeline):
            self._tell(HEAD, "the pipeline is formed")
            self._on_change(
                PipelineReformed(
                    stage_count=command.stage_count, rooms=command.rooms, capturing=command.capturing
                )
            )
        elif isinstance(command, StopPipeline):
            self._on_change(PipelineLost(silent_s=command.silent_s))
        elif isinstance(command, HangUp):
            self._hang_up(command.pipeline)
        elif isinstance(command, Probe):
            self._probe(command.device)
        elif isinstance(command, EndSession):
            self._is_over = True
            for pipeline in tuple(self._lines):
                for (_, role), connection in self._lines[pipeline].dialled.items():
                    if role == CONTROL:
                        connection.send(HEAD, Reset())
                self._hang_up(pipeline)
            self._on_give_up(command.text)
        elif isinstance(command, SurveyDevice):
            self.process.later(SURVEY_S, lambda: self._survey(command.device))

    def _hang_up(self, pipeline: int) -> None:
        for connection in self._lines.pop(pipeline).dialled.values():
            self._network.close(connection, by=HEAD)

    def _dial(self, pipeline: int, name: str, role: str) -> None:
        lines, process = self._lines[pipeline], self.process

        def lost() -> None:
            self.give(ConnectionClosed(pipeline=pipeline, device=name))

        def take(connection: Connection, envelope: Envelope, frames: Frames) -> None:
            del frames
            if connection.is_open:  # what waits in a socket that is closed is never read
                self._heard(pipeline, name, role, envelope)

        def refuse(connection: Connection, text: str) -> None:
            if connection.is_open:
                self.give(
                    DeviceBrokeProtocol(pipeline=pipeline, device=name if role == CONTROL else "", text=text)
                )

        daemon = self._daemons[name]
        connection = lines.dialled[name, role] = self._network.connect(
            HEAD,
            name,
            role,
            lines.incarnation,
            {HEAD: lambda *arrived: process.do(lambda: take(*arrived)), name: daemon.take},
            {HEAD: lambda: process.do(lost)},
            {HEAD: lambda *arrived: process.do(lambda: refuse(*arrived)), name: daemon.refuse},
        )
        connection.send(HEAD, Hello(name=HEAD, version=__version__, role=role))
        if not self._network.is_resolved(HEAD, name):
            unknown = AddressNotFound(pipeline=pipeline, device=name, text="no such name")
            process.later(DIALLED_S, lambda: self.give(unknown))
        elif daemon.is_locked:
            refused = DialRefused(
                pipeline=pipeline, device=name, text="it does not know our key", is_final=True
            )
            process.later(DIALLED_S, lambda: self.give(refused))

    def _heard(self, pipeline: int, name: str, role: str, envelope: Envelope) -> None:
        """A message of a device, on a connection that is open."""
        if envelope.incarnation != self._lines[pipeline].incarnation:
            self.wronged(pipeline, name, "a word of another incarnation on a pipeline's own connection")
        elif not self._take(name, role, envelope):
            self.give(
                DeviceMessageArrived(pipeline=pipeline, device=name, role=role, message=envelope.message)
            )

    def _survey(self, name: str) -> None:
        """Whoever is there now has told what a plan needs."""
        daemon, network = self._daemons[name], self._network
        is_reached = network.is_reached(HEAD, name) and network.is_reached(name, HEAD)
        is_there = daemon.is_up and not daemon.is_stopped and is_reached and network.is_resolved(HEAD, name)
        self.give(DeviceSurveyed(device=name, trouble="" if is_there else "it did not answer"))

    def _probe(self, name: str) -> None:
        """A Hello on a connection of its own; whoever answers it is there."""

        def take(connection: Connection, envelope: Envelope, frames: Frames) -> None:
            del frames
            if connection.is_open:
                if isinstance(envelope.message, Welcome):
                    self.give(ProbeAnswered(device=name, is_held=bool(envelope.message.holder)))
                else:
                    assert not self._is_honest, "Hello is answered with Welcome"
                self._network.close(connection, by=HEAD)

        daemon, process = self._daemons[name], self.process
        if daemon.is_locked:
            return
        received = {HEAD: lambda *arrived: process.do(lambda: take(*arrived)), name: daemon.take}
        incarnation = incarnation_of(self._session + 1, 1)
        connection = self._network.connect(
            HEAD, name, CONTROL, incarnation, received, {}, {name: daemon.refuse}
        )
        connection.send(HEAD, Hello(name=HEAD, version=__version__, role=CONTROL))
