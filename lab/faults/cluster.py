"""A head whose cluster fails, in virtual time: `HeadCore`, its pipelines and its drafters, as the runtime's
`Head` drives them.

Every token is compared with the plain answer when it is emitted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from flowspec.core.cluster.forming import (
    CONTROL,
    DATA,
    AskPlan,
    Assignment,
    FormingTimeouts,
    PipelineCore,
    PlanFailed,
    PlanMade,
    SegmentReturned,
    SendFailed,
    Start,
)
from flowspec.core.cluster.membership import Membership, SessionStarted, Tick
from flowspec.core.head.events import (
    Cancel,
    Draft,
    DrafterLost,
    Emit,
    FeaturesArrived,
    Finished,
    Forget,
    HeadEvent,
    PipelineLost,
    PipelineReformed,
    SegmentTimed,
    SendToDrafter,
    SendToFirstStage,
    SendToStages,
    SetTimer,
    Submit,
    TimerFired,
    VerifiedArrived,
)
from flowspec.core.head.features import check_features
from flowspec.core.head.head import HeadCore
from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Features, Release, Verified
from flowspec.errors import PeerError
from flowspec.plan.placement import ClusterPlan, StagePlan, assigns_of, weighted_split
from flowspec.plan.timing import Curve
from flowspec.sim.clock import Alarm, Clock
from flowspec.sim.drafter import FakeDrafter
from flowspec.sim.head_checker import HeadChecker
from flowspec.sim.record import SimulatedAnswer
from flowspec.wire.codec import Envelope, Tensor
from lab.faults.daemon import SimDaemon
from lab.faults.drafters import LocalDrafters, Place, SimRemoteDrafter
from lab.faults.network import Network
from lab.faults.pipelines import HEAD, Process, SimPipelines

SESSION = 1
FORMING_TIMEOUTS = FormingTimeouts(
    connect_s=2.0, reconnect_s=2.0, held_s=4.0, ping_s=0.5, watch_s=0.25, settle_s=0.1
)
ROW_BYTES = 12000
"""Of what goes from stage to stage."""


class Cluster:
    """Devices and the head that forms pipelines of them. `expect` gives the plain answer to a question.

    Where nothing passes, a data connection takes `frames_max` frames and no more.
    Where what devices say may not be honest, tokens may be wrong; all else is as ever.
    Those that are `absent` are down when the head begins, which knows it. Drafters that have no place (None)
    are at the head.
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
        places: Sequence[Place | None],
        frames_max: int,
        expect: Callable[[Submit], Sequence[int]],
        tell: Callable[[str, str], None],
        forming_timeouts: FormingTimeouts = FORMING_TIMEOUTS,
        is_honest: bool = True,
        absent: Sequence[str] = (),
    ) -> None:
        self.clock = clock
        self.process = Process(clock)
        self._daemons = daemons
        self.head = head
        self.membership = membership
        self.forming = PipelineCore(membership, forming_timeouts, start=Start.ANY)
        self.answers: dict[int, list[SimulatedAnswer]] = {}
        self.on_end: Callable[[int], None] = lambda request: None
        self.on_give_up: Callable[[str], None] = lambda text: None
        self.on_drafter_given_up: Callable[[str], None] = lambda text: None
        self._layer_count = layer_count
        self._frames_max = frames_max
        self._devices_min = devices_min
        self._devices_max = devices_max
        self._drafters = drafters
        self._expect = expect
        self._tell = tell
        self._is_honest = is_honest
        self._checker = HeadChecker(is_honest=is_honest)
        self._expected: dict[int, Sequence[int]] = {}
        self._tokens = 0
        self._timer: Alarm | None = None
        self._pipelines = SimPipelines(
            self.process,
            network,
            daemons,
            self.forming,
            session=SESSION,
            plan=self._plan,
            stand=self._stand,
            on_change=self._step,
            on_give_up=lambda text: self.on_give_up(text),
            take=self._take,
            tell=tell,
            is_honest=is_honest,
        )
        head.handle(PipelineLost(), 0.0)
        local = LocalDrafters(self.process, drafters, drafting, self._step)
        self._drafting: list[LocalDrafters | SimRemoteDrafter] = []
        for number, place in enumerate(places):
            if place is None:
                self._drafting.append(local)
                continue
            head.handle(DrafterLost(drafter=number), 0.0)
            self._drafting.append(
                SimRemoteDrafter(
                    number,
                    place,
                    self.process,
                    network,
                    daemons,
                    membership_timeouts=membership.timeouts,
                    forming_timeouts=replace(forming_timeouts, wait_s=None),
                    context=head.context,
                    vocabulary=head.vocabulary,
                    step=self._step,
                    on_give_up=lambda text: self.on_drafter_given_up(text),
                    tell=tell,
                    is_honest=is_honest,
                )
            )
        self._pipelines.give(SessionStarted(absent=tuple((name, "it is down") for name in absent)))

    @property
    def events(self) -> int:
        """What all cores of the head were given so far."""
        return self.process.events

    @property
    def pipelines(self) -> int:
        """How many were formed, or tried."""
        return self._pipelines.count

    @property
    def parts(self) -> tuple[Assignment, ...]:
        """Who has which layers in the pipeline that is there."""
        return self._pipelines.lines.parts

    @property
    def remote_drafters(self) -> list[SimRemoteDrafter]:
        """Those on devices of their own."""
        return [each for each in self._drafting if isinstance(each, SimRemoteDrafter)]

    def at(self, time_s: float, event: Submit | Cancel | Forget) -> None:
        """Have someone at the head ask for something."""
        self.clock.at(time_s, lambda: self.process.do(lambda: self._step(event)))

    # --------------------------------------------------------------------------------------------- the core

    def _step(self, event: HeadEvent, due_s: float = 0.0) -> None:
        """Gives the core an event; a timer's never comes before it was `due_s`, though a clock that jumped
        may be a rounding error off."""
        self.process.events += 1
        if isinstance(event, Submit):
            self.answers.setdefault(event.request, []).append(SimulatedAnswer(event, self.process.now_s))
        elif isinstance(event, PipelineReformed):
            self._check_arithmetic()
        commands = self.head.handle(event, max(self.process.now_s, due_s))
        self.head.validate()
        self._checker.check(self.head, event, commands)
        for command in commands:
            if isinstance(command, SendToStages):
                if isinstance(command.message, Release) and command.message.epoch < limits.ID_MAX:
                    self._tell(HEAD, f"gives up the caches of request {command.message.request}")
                for (_, role), connection in self._pipelines.lines.dialled.items():
                    if role == CONTROL:
                        connection.send(HEAD, command.message)
            elif isinstance(command, SendToFirstStage):
                self._tell(
                    f"{[part.commit.request for part in command.segment.parts]}",
                    f"sends {command.segment.row_count} rows",
                )
                self._send(command)
            elif isinstance(command, Draft | SendToDrafter):
                self._drafting[command.drafter].post(command)
            elif isinstance(command, SetTimer):
                if self._timer is not None:
                    self._timer.cancel()
                self._timer = self.process.at(command.at_s, partial(self._step, TimerFired(), command.at_s))
            elif isinstance(command, Emit):
                self._emit(command)
            elif isinstance(command, SegmentTimed):
                self._pipelines.give(
                    SegmentReturned(pipeline=self.forming.number, hops=command.hops, context=command.context)
                )
            elif isinstance(command, Finished):
                answer = self.answers[command.request][-1]
                answer.end, answer.ended_s = command, self.process.now_s
                self._tell(
                    f"request {command.request}", f"ends: {command.reason}, {len(answer.tokens)} tokens"
                )
                self.on_end(command.request)
        admission = self.head.admission
        if isinstance(event, Submit) and self.head.is_formed and event.request in admission.waiting:
            self._tell(f"request {event.request}", "waits for room")

    def _send(self, command: SendToFirstStage) -> None:
        """A segment for the first stage; where its connection takes no more that is told a moment later."""
        lines = self._pipelines.lines
        if lines.first_data.link_of(HEAD).is_full(self._frames_max):
            unsent = SendFailed(pipeline=self.forming.number, device=lines.parts[0].device, what="segments")
            self.process.later(0.0, partial(self._pipelines.give, unsent))
        else:
            lines.first_data.send(HEAD, command.segment)

    def _emit(self, command: Emit) -> None:
        answer = self.answers[command.request][-1]
        if not answer.tokens:
            self._expected[command.request] = self._expect(answer.submit)
        answer.tokens += command.tokens
        answer.logprobs += command.logprobs
        self._tokens += len(command.tokens)
        self._tell(f"request {command.request}", f"emits {list(command.tokens)}")
        assert max(command.tokens) < self.head.vocabulary, f"token {max(command.tokens)} was emitted"
        if not self._is_honest:
            return
        expected = self._expected[command.request]
        assert answer.text == list(expected[: len(answer.text)]), (
            f"request {command.request} has a wrong token: {answer.text}"
        )

    # --------------------------------------------------------------------------------------------- pipelines

    def _stand(self, now_s: float) -> Tick:
        flight, rows = self.head.flights.oldest
        return Tick(
            flight_s=self.head.flight_s(now_s),
            flight=flight,
            flight_bytes=rows * ROW_BYTES,
            left_s=self.head.left_s(),
            tokens=self._tokens,
        )

    def _check_arithmetic(self) -> None:
        """All stages compute with the arithmetic of the session."""
        if not self._is_honest:
            return
        name = self.forming.agreement.name
        found = {self._daemons[part.device].computes_with for part in self.parts}
        # A device that was lost a moment ago computes nothing.
        assert found <= {name, ""}, f"stages compute with {found}, not {name}"

    def _plan(self, command: AskPlan) -> PlanMade | PlanFailed:
        devices = command.devices[: self._devices_max]
        if not self._devices_min <= len(devices) <= self._layer_count:
            return PlanFailed(
                text=f"{self._layer_count} layers on {len(devices)} devices", is_beside=command.is_beside
            )
        counts = weighted_split(
            self._layer_count, [1 / command.slowness.get(device, 1.0) for device in devices]
        )
        plan = ClusterPlan(
            model="model",
            fingerprint="fingerprint",
            dtype="float32",
            context=self.head.context,
            stages=tuple(
                StagePlan(
                    name=device,
                    address=f"{device}:1",
                    first=sum(counts[:index]),
                    end=sum(counts[: index + 1]),
                )
                for index, device in enumerate(devices)
            ),
            captures=tuple(sorted({layer for drafter in self._drafters for layer in drafter.captures})),
            sliding_window=self.head.sliding_window,
        )
        parts = [
            Assignment(device=device, place=device, assign=assign)
            for device, assign in zip(devices, assigns_of(plan), strict=True)
        ]
        gain = self._gain(parts, command.slowness) if command.is_beside else None
        return PlanMade(parts=tuple(parts), is_beside=command.is_beside, gain=gain)

    def _gain(self, parts: Sequence[Assignment], slowness: Mapping[str, float]) -> float:
        """How many times as fast as the pipeline that works these would be, by their slowest stages."""
        before_s, after_s = (
            max(
                slowness.get(part.device, 1.0) * (part.assign.end_layer - part.assign.first_layer)
                for part in each
            )
            for each in (self.parts, parts)
        )
        return before_s / after_s

    def _take(self, device: str, role: str, envelope: Envelope) -> bool:
        """What was verified, and features, are for the head's core."""
        message = envelope.message
        if not isinstance(message, Verified | Features) or role != DATA:
            return False
        if not self.head.is_formed:
            return True
        try:
            if isinstance(message, Verified):
                self._step(VerifiedArrived(verified=message))
            else:
                self._step(self._features(device, message, envelope.tensor))
        except PeerError as error:
            self._pipelines.wronged(self.forming.number, "", str(error))
        return True

    def _features(self, device: str, message: Features, tensor: Tensor | None) -> FeaturesArrived:
        """Raises `PeerError` for others than the stage was to capture."""
        stage = next(at for at, part in enumerate(self.parts) if part.device == device)
        check_features(self.parts[stage].assign, 1, message, tensor)
        assert tensor is not None, "the codec refuses features without rows"
        return FeaturesArrived(stage=stage, features=message, rows=tensor.apart())
