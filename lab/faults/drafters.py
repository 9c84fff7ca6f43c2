"""The models beside the target that a head draws on, in virtual time: at the head itself, or on devices that
fail as others do.

One at the head is part of its process, and so is never lost. One on a device is the product's:
`RemoteDrafterCore` at the head, and a pipeline of one device that `PipelineCore` forms and `DaemonCore`
holds. The head and whoever holds that connection are threads of one process: what one of them says the other
hears a moment later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from flowspec.core.cluster.forming import (
    CONTROL,
    AskPlan,
    Assignment,
    DeviceBrokeProtocol,
    FormingTimeouts,
    PipelineCore,
    PlanMade,
    Start,
)
from flowspec.core.cluster.membership import Membership, MembershipTimeouts, SessionStarted
from flowspec.core.driving import Driver
from flowspec.core.head.events import (
    CopyFeatures,
    Draft,
    Drafted,
    DrafterLost,
    DrafterRecovered,
    HeadEvent,
    SendToDrafter,
    TakeFeatures,
)
from flowspec.core.head.remote_drafter import (
    BreakPipeline,
    GivenUp,
    RemoteDrafterCommand,
    RemoteDrafterCore,
    RemoteDrafterEvent,
)
from flowspec.core.protocol.cluster_messages import Drafting
from flowspec.core.protocol.messages import Expand, Proposed, Release
from flowspec.plan.placement import ClusterPlan, StagePlan, assigns_of
from flowspec.plan.timing import Curve
from flowspec.sim.drafter import FakeDrafter
from flowspec.wire.codec import Envelope, join_rows
from lab.faults.daemon import SimDaemon
from lab.faults.network import Network
from lab.faults.pipelines import HEAD, Process, SimPipelines

FIRST_SESSION = 100
"""Of the drafters' pipelines; each has two numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A drafter's device. It hears of the head, and the head of it, `handover_s` later."""

    device: str
    handover_s: float


class LocalDrafters:
    """Runs jobs in the head's process; `step` gives its core an event."""

    def __init__(
        self,
        process: Process,
        drafters: Sequence[FakeDrafter],
        drafting: Sequence[Curve],
        step: Callable[[HeadEvent], None],
    ) -> None:
        self._process = process
        self._drafters = drafters
        self._drafting = drafting
        self._step = step

    def post(self, work: Draft | SendToDrafter) -> None:
        drafter = self._drafters[work.drafter]
        if isinstance(work, SendToDrafter):
            message = work.message
            if isinstance(message, CopyFeatures):
                drafter.copy_features(message)
            elif isinstance(message, TakeFeatures):
                rows = join_rows(message.rows)
                drafter.take_features(message.request, message.epoch, message.nodes, rows)
            else:
                drafter.release(message)
            return
        started_s = self._process.now_s
        ended_s = started_s + self._drafting[work.drafter].seconds(work.segment.row_count, work.context)
        proposals = drafter.draft(work.segment, work.width)
        done = Drafted(
            drafter=work.drafter, job=work.job, proposals=proposals, started_s=started_s, ended_s=ended_s
        )
        self._process.later(ended_s - started_s, lambda: self._step(done))


class SimRemoteDrafter:
    """The head's drafter `number`, on a device; as the runtime's `RemoteDrafter`."""

    def __init__(
        self,
        number: int,
        place: Place,
        process: Process,
        network: Network,
        daemons: Mapping[str, SimDaemon],
        *,
        membership_timeouts: MembershipTimeouts,
        forming_timeouts: FormingTimeouts,
        context: int,
        vocabulary: int,
        step: Callable[[HeadEvent], None],
        on_give_up: Callable[[str], None],
        tell: Callable[[str, str], None],
        is_honest: bool,
    ) -> None:
        self.core = RemoteDrafterCore(number, vocabulary)
        self.place = place
        self.is_given_up = False
        self._process = process
        self._daemon = daemons[place.device]
        self._is_honest = is_honest
        self._context = context
        self._step = step
        self._on_give_up = on_give_up
        self._driver: Driver[RemoteDrafterEvent, RemoteDrafterCommand] = Driver(self._handle, self._do)
        self.membership = Membership([place.device], membership_timeouts, f"drafter {number} on")
        self.pipelines = SimPipelines(
            process,
            network,
            daemons,
            PipelineCore(self.membership, forming_timeouts, start=Start.ANY),
            session=FIRST_SESSION + 2 * number,
            plan=self._plan,
            stand=self.core.tick,
            on_change=self._driver.give,
            on_give_up=self._given_up,
            take=self._take,
            tell=lambda who, text: tell(f"drafter {number}", text),
            is_honest=is_honest,
        )
        self.pipelines.give(SessionStarted())

    def post(self, work: Draft | SendToDrafter | DrafterRecovered) -> None:
        """The head wants something of it, or has heard that it is there."""
        self._process.later(self.place.handover_s, lambda: self._driver.give(work))

    def _handle(self, event: RemoteDrafterEvent) -> list[RemoteDrafterCommand]:
        self._process.events += 1
        commands = self.core.handle(event, self._process.now_s)
        self.core.validate()
        return commands

    def _do(self, command: RemoteDrafterCommand) -> None:
        if isinstance(command, BreakPipeline):
            assert self._daemon.has_babbled or not self._is_honest, command.text
            number, device = self.pipelines.forming.number, self.place.device
            self.pipelines.give(DeviceBrokeProtocol(pipeline=number, device=device, text=command.text))
        elif isinstance(command, Expand | Release):
            self.pipelines.lines.dialled[self.place.device, CONTROL].send(HEAD, command)
        else:
            self._process.later(self.place.handover_s, partial(self._tell, command))

    def _tell(self, result: Drafted | DrafterLost | DrafterRecovered) -> None:
        if isinstance(result, DrafterRecovered):
            self.post(result)
        self._step(result)

    def _take(self, device: str, role: str, envelope: Envelope) -> bool:
        """Proposals are for the core, of a pipeline that is there."""
        if not isinstance(envelope.message, Proposed) or not self.core.is_there:
            return False
        self._driver.give(envelope.message)
        return True

    def _plan(self, command: AskPlan) -> PlanMade:
        (device,) = command.devices
        plan = ClusterPlan(
            model="drafter",
            fingerprint="drafter",
            dtype="float32",
            context=self._context,
            stages=(StagePlan(name=device, address=f"{device}:1", first=0, end=1),),
            drafting=Drafting(vocabulary=self.core.vocabulary, coupled=True),
        )
        (assign,) = assigns_of(plan)
        return PlanMade(
            parts=(Assignment(device=device, place=device, assign=assign),), is_beside=command.is_beside
        )

    def _given_up(self, text: str) -> None:
        self.is_given_up = True
        self._driver.give(GivenUp())
        self._on_give_up(text)
