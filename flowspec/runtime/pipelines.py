"""One pipeline after another: forms them of the devices that are there, gives them up when one is lost, takes
in who returns.

Carries out what `core/cluster/forming.py` decides, with sockets and the clock: a `PipelineConnections` for
each pipeline, probes for the lost. The head is told when a pipeline is lost and when another is there, and
gets its turn while one is formed. Without a `replan` the first pipeline is the only one, and its loss an
error.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq
from msgspec import structs

from flowspec.checking import check, is_on
from flowspec.core.cluster.forming import (
    CONTROL,
    AskPlan,
    Assignment,
    DeviceBrokeProtocol,
    Dial,
    DialRefused,
    EndSession,
    FormingCommand,
    FormingEvent,
    FormingTimeouts,
    HangUp,
    OpenPipeline,
    PipelineCore,
    PlanFailed,
    PlanMade,
    SegmentReturned,
    SendControl,
    SendTokens,
    ServeWeights,
    ShowProgress,
    Start,
    StartPipeline,
    StopPipeline,
    WeightsUnavailable,
)
from flowspec.core.cluster.incarnation import incarnation_of
from flowspec.core.cluster.membership import (
    DeviceSurveyed,
    Membership,
    MembershipTimeouts,
    Note,
    Probe,
    ProbeAnswered,
    SessionStarted,
    SurveyDevice,
    Tick,
)
from flowspec.core.driving import Driver, Log
from flowspec.core.head.events import FeaturesArrived, PipelineLost, PipelineReformed, VerifiedArrived
from flowspec.core.protocol.cluster_messages import AskArithmetics, Assign
from flowspec.core.protocol.messages import Hop
from flowspec.errors import BrokenError, ClusterError, FlowSpecError, InputError
from flowspec.plan.placement import ClusterPlan, assigns_of
from flowspec.runtime import timeouts
from flowspec.runtime.addresses import ADDRESSES
from flowspec.runtime.cluster import Device
from flowspec.runtime.device.links import ask
from flowspec.runtime.emulation import Emulation
from flowspec.runtime.heap import give_back
from flowspec.runtime.pipeline_connections import (
    PipelineConnections,
    Progress,
    described,
    new_session,
    told_of,
)
from flowspec.runtime.security.keyring import Keyring
from flowspec.runtime.transport import Wake, poll_timeout_ms, ready_sources, split_address

POLL_MS = 100
"""How long a poll of the first pipeline may wait."""

log = logging.getLogger("flowspec.head")

Slowness = Mapping[str, float]
"""How many times as slow as the first plan took them for devices are by now, by name; those that are not
named are as they were."""
Replan = Callable[[Sequence[str], Slowness], ClusterPlan]
"""The plan for these devices of the cluster, by name; raises `InputError` or `ClusterError` where there is
none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """How a head goes on when a device is lost: `replan`, whom to tell in a line of text, and how long to
    wait for devices (None: for ever).

    `spares` are the devices that the first plan leaves out, with their addresses; of those the `absent` did
    not answer, each with why, or are `in_use` by others. When one answers, `survey` finds out what `replan`
    must know of it, in a thread of its own: it raises `FlowSpecError`. `start` tells what must be there for
    the first pipeline. `rate` foretells the tokens/s of a plan, where anything does. An `arithmetic` is kept
    that an earlier session began with (empty: that of the first pipeline).
    """

    replan: Replan
    rate: Callable[[ClusterPlan, Slowness], float] | None = None
    spares: Mapping[str, str] = field(default_factory=dict)
    on_note: Callable[[str], None] = lambda text: None
    wait_s: float | None = None
    start: Start = Start.WHOLE
    absent: Mapping[str, str] = field(default_factory=dict)
    in_use: tuple[str, ...] = ()
    survey: Callable[[str], None] | None = None
    arithmetic: str = ""


class Pipelines:
    """See the module. `on_change` is told of losses and new pipelines, `meanwhile` is called while one is
    formed; it says whether to go on.

    With a `drafter` the plan is that model's, on its one device.
    """

    def __init__(
        self,
        plan: ClusterPlan,
        wake: Wake,
        progress: Progress,
        emulation: Emulation | None,
        recovery: Recovery | None,
        keys: Keyring | None = None,
        *,
        on_change: Callable[[PipelineLost | PipelineReformed], None],
        meanwhile: Callable[[], bool],
        drafter: str = "",
    ) -> None:
        self.plan = plan
        self.connections: PipelineConnections | None = None
        spares = {} if recovery is None else recovery.spares
        self._addresses = {stage.name: stage.address for stage in plan.stages} | dict(spares)
        self._wake = wake
        self._progress = progress
        self._emulation = emulation
        self._recovery = recovery
        self._keys = keys
        self._on_change = on_change
        self._meanwhile = meanwhile
        start = Start.WHOLE if recovery is None else recovery.start
        membership_timeouts = MembershipTimeouts(
            silent_s=timeouts.SILENT_S,
            loading_silent_s=timeouts.LOADING_SILENT_S,
            loading_s=timeouts.LOADING_S,
            stuck_s=timeouts.STUCK_S,
            probe_s=timeouts.PROBE_EVERY_S,
            back_s=timeouts.BACK_S,
            forgive_s=timeouts.FORGIVE_S,
            again_s=timeouts.AGAIN_S,
        )
        forming_timeouts = FormingTimeouts(
            connect_s=timeouts.ABSENT_S if drafter and start is Start.SHORT else timeouts.CONNECT_S,
            reconnect_s=timeouts.RECONNECT_S,
            held_s=timeouts.HELD_S,
            ping_s=timeouts.PING_EVERY_S,
            watch_s=timeouts.WATCH_EVERY_S,
            settle_s=timeouts.SETTLE_S,
            wait_s=None if recovery is None else recovery.wait_s,
            changed_s=timeouts.CHANGED_S,
        )
        membership = Membership(list(self._addresses), membership_timeouts, drafter)
        self._core = PipelineCore(
            membership,
            forming_timeouts,
            start=start,
            is_only=recovery is None,
            arithmetic="" if recovery is None else recovery.arithmetic,
        )
        self._is_checked = is_on()
        self._driver: Driver[FormingEvent, FormingCommand] = Driver(self._handle, self._do)
        self._give = self._driver.give
        self._answers: deque[ProbeAnswered | DeviceSurveyed] = deque()
        self._session = new_session()
        self._open: dict[int, PipelineConnections] = {}
        self._answered: set[str] = set()
        self._planned = plan
        self._beside: tuple[tuple[tuple[str, ...], dict[str, float]], ClusterPlan] | None = None
        self._was_formed = False
        self._serving_error: BaseException | None = None
        self._note = ""
        self._loading: dict[str, tuple[str, float]] = {}
        self._poller = zmq.Poller()
        self._polled = [(0, 0)]

    def connect(self) -> None:
        """Forms the first pipeline; raises the error of whoever cannot take part."""
        started = SessionStarted()
        if (recovery := self._recovery) is not None:
            started = SessionStarted(absent=tuple(recovery.absent.items()), in_use=recovery.in_use)
        self._give(started)
        while self.connections is None:
            for _ in self.listen(POLL_MS):
                pass
            self.watch(lambda now_s: Tick())
            if not self._meanwhile():
                raise ClusterError("the head is closed")

    def listen(self, timeout_ms: int) -> Iterator[VerifiedArrived | FeaturesArrived]:
        """Waits for anything to happen and yields what is for the head's core; a pipeline that is wanted is
        formed on the way."""
        ready = self._poll(min(timeout_ms, poll_timeout_ms(self.due_s, time.monotonic(), timeout_ms)))
        now_s = time.monotonic()
        for connections in tuple(self._open.values()):
            for heard in connections.heard(ready, now_s):
                if isinstance(heard, VerifiedArrived | FeaturesArrived):
                    if connections is self.connections:
                        yield heard
                else:
                    self._give(heard)
                if connections.number not in self._open:
                    break  # that was the end of it

    @property
    def due_s(self) -> float:
        """When `listen` must be called again at the latest."""
        return min([self._core.due_s, *(connections.due_s for connections in self._open.values())])

    def passed(self, hops: tuple[Hop, ...], context: int) -> None:
        """A segment came back: what its stages spent on it, whose rows saw `context` earlier tokens."""
        self._give(SegmentReturned(pipeline=self._core.number, hops=hops, context=context))

    @property
    def arithmetic(self) -> str:
        """What all pipelines compute with; empty before there is one, and of a drafter's."""
        return self._core.agreement.name

    @property
    def lost(self) -> list[str]:
        """The devices that are lost now, by name; also for other threads."""
        return self._core.membership.lost

    @property
    def returning(self) -> list[str]:
        """Those of them that answer again and make ready, by name; also for other threads."""
        return self._core.membership.returning

    @property
    def loading(self) -> dict[str, tuple[str, float]]:
        """What devices do to make ready, and how far they have come, by name; also for other threads."""
        return dict(self._loading)

    @property
    def is_waiting(self) -> bool:
        """Whether there is no pipeline, and none on its way: devices are waited for."""
        return self._core.number == 0

    def broken(self, error: BrokenError) -> None:
        self._give(DeviceBrokeProtocol(pipeline=self._core.number, device=error.device, text=error.why))

    def watch(self, stand: Callable[[float], Tick]) -> None:
        """Looks who is silent and who is back, now and then; raises `ClusterError` when the wait for devices
        is over.

        `stand` tells how the answers stand at an instant.
        """
        now_s = time.monotonic()
        if now_s < self._core.due_s:
            return
        while self._answers:
            self._give(self._answers.popleft())
        for connections in tuple(self._open.values()):
            if connections.weights is not None and (error := connections.weights.error) is not None:
                self._serving_error = error
                self._give(WeightsUnavailable(pipeline=connections.number, text=str(error)))
        self._give(stand(now_s))

    def close(self) -> None:
        while self._open:
            _, connections = self._open.popitem()
            connections.release()
            connections.close()

    def _poll(self, timeout_ms: int) -> set[Any]:
        """Waits for anything to arrive; returns the sockets that have something."""
        sockets = [(number, connections.count) for number, connections in self._open.items()]
        if sockets != self._polled:
            self._polled, self._poller = sockets, zmq.Poller()
            for source in (
                self._wake.read_fd,
                *(source for connections in self._open.values() for source in connections.sources),
            ):
                self._poller.register(source, zmq.POLLIN)
        ready = ready_sources(self._poller.poll(timeout_ms))
        if self._wake.read_fd in ready:
            self._wake.clear()
        return ready

    # ---------------------------------------------------------------------------------------------- deciding

    def _handle(self, event: FormingEvent) -> list[FormingCommand]:
        commands = self._core.handle(event, time.monotonic())
        if self._is_checked:
            check(self._core, event)
        return commands

    def _do(self, command: FormingCommand) -> None:
        if isinstance(command, Note):
            self._note = command.text
            if self._recovery is not None:
                self._recovery.on_note(command.text)
        elif isinstance(command, Probe):
            if self._recovery is not None:
                self._in_thread(self._probe, command.device)
        elif isinstance(command, SurveyDevice):
            self._in_thread(self._survey, command.device)
        elif isinstance(command, AskPlan):
            self._make_plan(command)
        elif isinstance(command, OpenPipeline):
            give_back()  # what the last pipeline's sockets and the last drafter held
            incarnation = incarnation_of(self._session, command.pipeline)
            self._open[command.pipeline] = PipelineConnections(
                self._planned, command.pipeline, incarnation, self._wake, self._keys, self._answered
            )
        elif isinstance(command, ShowProgress):
            self._load(command)
        elif isinstance(command, Log):
            getattr(log, command.level)("%s", command.text)
        elif isinstance(command, EndSession):
            if self._serving_error is not None and command.text == str(self._serving_error):
                raise self._serving_error
            raise ClusterError(command.text)
        elif isinstance(command, StopPipeline):
            self.connections = None
            self._on_change(PipelineLost(silent_s=command.silent_s))
        elif isinstance(command, Dial):
            if command.role == CONTROL:
                self._begin(command.pipeline, command.device, "connecting")
            self._dial(self._open[command.pipeline], command)
        elif isinstance(command, SendControl):
            if isinstance(command.message, AskArithmetics | Assign):
                self._begin(command.pipeline, command.device, "starting")
            self._open[command.pipeline].say(command.device, command.message)
        elif isinstance(command, ServeWeights):
            self._open[command.pipeline].serve_weights(command.device)
        elif isinstance(command, SendTokens):
            self._open[command.pipeline].send_tokens(command.device, command.offset)
        elif isinstance(command, HangUp):
            self._end_loading()
            self._open.pop(command.pipeline).close(lost=command.device)
        else:
            self._use(self._open[command.pipeline], command)

    def _begin(self, pipeline: int, device: str, doing: str) -> None:
        """A device says nothing yet of what it begins, as importing what it computes with. Members that make
        ready beside the pipeline that works are at work all the same."""
        if pipeline == self._core.number or device in self._core.membership.lost:
            self._load(ShowProgress(device=device, doing=doing, share=0.0))

    def _end_loading(self) -> None:
        """Whoever loads does so for a pipeline that is let go of; the first is waited for, so that it is told
        of whom nobody waits for any more."""
        for device in [] if self._was_formed else self._loading:
            self._progress(told_of(device, "left out"), 1.0)
        self._loading.clear()

    def _load(self, progress: ShowProgress) -> None:
        self._progress(told_of(progress.device, progress.doing), progress.share)
        if progress.share < 1:
            self._loading[progress.device] = progress.doing, progress.share
        else:
            self._loading.pop(progress.device, None)

    def _in_thread(self, ask: Callable[[str], None], device: str) -> None:
        threading.Thread(target=ask, args=(device,), name=f"question to {device}", daemon=True).start()

    def _probe(self, device: str) -> None:
        """Asks a lost device whether it is there again, and can be had."""
        place = Device(name=device, address=self._addresses[device])
        (report,) = ask([place], self._keys, within_s=timeouts.PROBE_EVERY_S)
        if report.welcome is not None:
            self._answers.append(ProbeAnswered(device=device, is_held=bool(report.welcome.holder)))

    def _survey(self, device: str) -> None:
        """Asks a device what plans must know of it; tells what comes of it."""
        trouble = "it could not be asked; the traceback is above"
        try:
            survey = None if self._recovery is None else self._recovery.survey
            assert survey is not None, "only devices that were absent are asked"
            survey(device)
            trouble = ""
        except FlowSpecError as error:
            trouble = str(error)
        finally:
            self._answers.append(DeviceSurveyed(device=device, trouble=trouble))
            self._wake.set()

    def _make_plan(self, command: AskPlan) -> None:
        plan, gain = self.plan, None
        if not command.is_first:
            try:
                plan, gain = self._planned_again(command)
            except (InputError, ClusterError) as error:
                self._give(PlanFailed(text=str(error), is_beside=command.is_beside))
                return
        self._planned = plan
        hosts = {stage.name: split_address(stage.address)[0] for stage in plan.stages}
        assigns = []
        for stage, assign in zip(plan.stages, assigns_of(plan), strict=True):
            hint = ADDRESSES.hint(hosts[assign.next_name], hosts[stage.name]) if assign.next_name else ""
            assigns.append(structs.replace(assign, next_ip=hint))
        self._give(
            PlanMade(
                parts=tuple(
                    Assignment(device=stage.name, place=described(stage), assign=assign)
                    for stage, assign in zip(plan.stages, assigns, strict=True)
                ),
                is_beside=command.is_beside,
                gain=gain,
            )
        )

    def _planned_again(self, command: AskPlan) -> tuple[ClusterPlan, float | None]:
        """The plan for the devices of a command, and how many times as fast as the pipeline that works it is
        foretold to be.

        What was planned beside a pipeline is what it is gone over to: it is not planned twice.
        """
        recovery, asked = self._recovery, (command.devices, dict(command.slowness))
        assert recovery is not None, "without one the first pipeline is the only one"
        if not command.is_beside and self._beside is not None and self._beside[0] == asked:
            return self._beside[1], None
        plan = recovery.replan(command.devices, command.slowness)
        if not command.is_beside:
            return plan, None
        self._beside = asked, plan
        if recovery.rate is None:
            return plan, None
        return plan, recovery.rate(plan, command.slowness) / recovery.rate(self.plan, command.slowness)

    def _dial(self, connections: PipelineConnections, command: Dial) -> None:
        try:
            connections.dial(command.device, command.role)
        except InputError as error:
            self._give(
                DialRefused(
                    pipeline=connections.number, device=command.device, text=str(error), is_final=True
                )
            )

    def _use(self, connections: PipelineConnections, command: StartPipeline) -> None:
        is_first = not self._was_formed
        self._loading.clear()
        connections.begin(command.rooms, self._emulation)
        self.connections, self.plan, self._was_formed = connections, connections.plan, True
        if not is_first:
            self._on_change(
                PipelineReformed(
                    stage_count=command.stage_count, rooms=command.rooms, capturing=command.capturing
                )
            )
