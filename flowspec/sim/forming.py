"""How a simulated cluster without faults begins: its pipeline is formed and its devices are held by the
product's own code, in no time.

From then on nobody is lost, silent or back, and each word is for a stage or for the head: `DaemonCore` would
hand all of them on as they are (`tests/sim/test_beginning.py` compares), and `PipelineCore` would say nothing
but Ping. So a `World` gives its events to `StageCore` and `HeadCore` themselves. Clusters that fail are
`lab.faults`.
"""

from __future__ import annotations

from functools import partial

from flowspec.core.cluster.daemon import (
    Caller,
    CallerConnected,
    CallerMessageArrived,
    ComputeReported,
    DaemonCommand,
    DaemonCore,
    DaemonEvent,
    DaemonLimits,
    Gather,
    Loaded,
    NextHopMessageArrived,
    SendReady,
    SendWelcome,
    StartAssignment,
)
from flowspec.core.cluster.forming import (
    CONTROL,
    AskPlan,
    Assignment,
    DeviceMessageArrived,
    Dial,
    FormingCommand,
    FormingEvent,
    FormingTimeouts,
    PipelineCore,
    PlanMade,
    SendControl,
)
from flowspec.core.cluster.incarnation import incarnation_of
from flowspec.core.cluster.membership import Membership, MembershipTimeouts, SessionStarted
from flowspec.core.driving import Driver
from flowspec.core.protocol.cluster_messages import Arithmetics, AskArithmetics, Ready, Welcome
from flowspec.core.protocol.limits import ID_MAX, VOCABULARY_MAX
from flowspec.core.stage.stage import StageCore
from flowspec.plan.placement import ClusterPlan, assigns_of
from flowspec.version import __version__

NEVER_S = 1e9
MEMBERSHIP_TIMEOUTS = MembershipTimeouts(
    silent_s=NEVER_S,
    loading_silent_s=NEVER_S,
    loading_s=NEVER_S,
    stuck_s=NEVER_S,
    probe_s=NEVER_S,
    back_s=NEVER_S,
    forgive_s=NEVER_S,
)
LOADED = Loaded(
    weight_bytes=1,
    cache_slots=ID_MAX,
    received_bytes=0,
    hidden_size=1,
    vocabulary_size=VOCABULARY_MAX,
    reused=False,
)
"""Memory is no limit, and every token id is known."""


class FormedPipeline:
    """A plan's pipeline as it is formed.

    `daemons` are its devices', in pipeline order, and `callers` who dialled them, by device and role.
    """

    def __init__(self, plan: ClusterPlan) -> None:
        parts = zip(plan.stages, assigns_of(plan), strict=True)
        self._parts = tuple(
            Assignment(device=stage.name, place=stage.name, assign=assign) for stage, assign in parts
        )
        forming_timeouts = FormingTimeouts(
            connect_s=NEVER_S, reconnect_s=NEVER_S, held_s=0.0, ping_s=1.0, watch_s=0.5, settle_s=0.0
        )
        self.forming = PipelineCore(
            Membership([stage.name for stage in plan.stages], MEMBERSHIP_TIMEOUTS), forming_timeouts
        )
        self.daemons = {
            stage.name: DaemonCore(DaemonLimits(lease_s=NEVER_S, link_s=NEVER_S)) for stage in plan.stages
        }
        self.callers: dict[tuple[str, str], Caller] = {}
        self._head: Driver[FormingEvent, FormingCommand] = Driver(
            lambda event: self.forming.handle(event, 0.0), self._do
        )
        self._devices = {name: self._driver(name, core) for name, core in self.daemons.items()}
        self._head.give(SessionStarted())
        assert self.forming.is_formed, "a pipeline whose devices all answer is there"

    @property
    def stages(self) -> list[StageCore]:
        cores = [None if core.assignment is None else core.assignment.core for core in self.daemons.values()]
        return [core for core in cores if isinstance(core, StageCore)]

    def _driver(self, name: str, core: DaemonCore) -> Driver[DaemonEvent, DaemonCommand]:
        return Driver(lambda event: core.handle(event, 0.0), partial(self._do_at, name))

    def _do(self, command: FormingCommand) -> None:
        """What the head is told to do; all else is for those who look on."""
        if isinstance(command, AskPlan):
            self._head.give(PlanMade(parts=self._parts))
        elif isinstance(command, Dial):
            self._dial(command.device, command.role, "head", incarnation_of(1, command.pipeline))
        elif isinstance(command, SendControl):
            self._devices[command.device].give(
                CallerMessageArrived(caller=self.callers[command.device, CONTROL], message=command.message)
            )

    def _dial(self, device: str, role: str, name: str, incarnation: int) -> None:
        caller = self.callers[device, role] = Caller(name, role, incarnation)
        self._devices[device].give(CallerConnected(caller=caller))

    def _do_at(self, name: str, command: DaemonCommand) -> None:
        if isinstance(command, SendWelcome):
            welcome = Welcome(name=name, version=__version__, device="cpu", pid=1, memory_bytes=1, count=0)
            caller = command.caller
            if caller.role == "stage":
                self._devices[caller.name].give(
                    NextHopMessageArrived(assignment_id=self.daemons[caller.name].number, message=welcome)
                )
            else:
                self._say(name, caller.role, welcome)
        elif isinstance(command, Gather) and isinstance(command.question, AskArithmetics):
            self._say(name, CONTROL, Arithmetics(dtype=command.question.dtype, names=("plain",)))
        elif isinstance(command, StartAssignment):
            if command.assign.next_hop:
                self._dial(command.assign.next_name, "stage", name, command.caller.incarnation)
            self._devices[name].give(ComputeReported(assignment_id=command.assignment_id, result=LOADED))
        elif isinstance(command, SendReady):
            self._say(name, CONTROL, Ready(weight_bytes=1, memory_bytes=1, cache_slots=LOADED.cache_slots))

    def _say(self, device: str, role: str, message: Welcome | Arithmetics | Ready) -> None:
        self._head.give(
            DeviceMessageArrived(pipeline=self.forming.number, device=device, role=role, message=message)
        )
