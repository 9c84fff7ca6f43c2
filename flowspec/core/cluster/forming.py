"""A head's pipelines, one after another: whom to dial, who gets which layers, when a pipeline is there, and
whom to blame when it is not.

Events in, commands out, as with the other cores: no sockets, no clock. `Membership`, which this owns, decides
of whom a pipeline is formed; here it is formed, watched and given up. The runtime's `Pipelines` and the
cluster of the fault simulator carry out the same commands.

- Every pipeline has a number of its own, its generation, and connections of its own. Words on the connections
  of another one count for nothing.
- First every device is dialled, and asked which arithmetics it has (`core.cluster.agreement`). When all have
  answered and agree, both ends, and whoever captures features, get a second connection for data, and each
  device its part. The pipeline is there when all are ready and have answered on the data connections.
- Where the first pipeline is formed a device whose head died is waited for until that one's lease is over. A
  device that another head uses is left out until it is free.
- A device that was absent at the start, and answers now, is surveyed before it is planned with: nothing is
  known of it.
- A device that is back makes ready beside the pipeline that works: it is assigned what it would have to do,
  on connections of its own, and let go of when it is ready. It keeps what it loaded, so that the switch to a
  pipeline with it is short.
- Members whose layers are others in the next pipeline make ready for them in the same way, beside their work,
  and the switch is made when all are. Who has no memory for both says how long it will load then; that
  counts in what the switch is worth.
- What passes take is watched (`core.cluster.slowing`). Where devices have become slower or faster another
  plan is made, by what they take now; whoever is in that plan and in no pipeline makes ready in the same way.
- A plan that is made beside a pipeline is gone over to only if it is foretold to be faster, where anything is
  foretold (`PlanMade.gain`).
- What a device says went wrong is believed after `settle_s`: if a connection closes meanwhile, its device is
  the better explanation.
- The first pipeline is what the user asked for: how much of it must be there is for the user to say
  (`Start`). Any failure of a pipeline that `is_only` is an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from msgspec import structs

from flowspec.core.cluster.agreement import Agreement, Lack
from flowspec.core.cluster.holder import Holder
from flowspec.core.cluster.membership import (
    WAITING,
    DevicesPrepared,
    DeviceSurveyed,
    Disband,
    GiveUp,
    HeartbeatArrived,
    LinkBroken,
    MemberProgressed,
    MembersChosen,
    Membership,
    MembershipEvent,
    NoPlanFound,
    Note,
    PipelineBroken,
    PipelineFormed,
    PlanRejected,
    PreparationFailed,
    Prepare,
    Probe,
    ProbeAnswered,
    Reform,
    SessionStarted,
    SpeedChanged,
    SurveyDevice,
    Tick,
)
from flowspec.core.cluster.slowing import Slowing
from flowspec.core.driving import Log
from flowspec.core.protocol import limits
from flowspec.core.protocol.cluster_messages import (
    Arithmetics,
    AskArithmetics,
    Assign,
    Error,
    Loading,
    Ping,
    Pong,
    Ready,
    Reset,
    Welcome,
    capturing_of,
)
from flowspec.core.protocol.device_messages import AskModel, AskTokens
from flowspec.core.protocol.messages import Features, Hop, Proposed, Verified
from flowspec.core.protocol.types import Message
from flowspec.core.stage.slots import CacheRoom

CONTROL, DATA = "head-control", "head-data"
RETRY_S_MAX = 1.0
"""How often a device that another head holds is asked again, at least."""
LOOK_S = 0.1
"""How often a pipeline that is being formed is looked at."""
STEP_BEGINNINGS_MAX = 4
"""How often a device may begin the same step of loading: kernels, say, are tried for each precision that it
needs."""
LOADED_SHARE_MIN = 0.001
"""What a device must have got further with loading for it to count as progress."""
RULES = {
    "fenced word": "a word of a pipeline that is over is ignored",
    "absent": "a device did not answer when it was dialled",
    "no address": "a device's name cannot be looked up, and no address of it is known",
    "refused at the door": "a device does not let the head in",
    "closed": "a device's connection closed",
    "waited for": "another head holds a device, which is waited for, for that head may have died",
    "held elsewhere": "another head uses a device, which is left out",
    "settled": "what a device said went wrong is believed, for no connection closed meanwhile",
    "better explained": "what a device said went wrong is explained by a connection that closed",
    "no room": "a device has no room for one conversation",
    "lacks": "a device lacks the arithmetic of the others, and is left out",
    "lacks beside": "a device that makes ready lacks the arithmetic of the pipeline that works",
    "misspoke": "a device broke the protocol",
    "unsent": "a device takes no more messages",
    "member not ready": "a member cannot make ready for other layers, and the pipeline that works stays",
    "waited too long": "nothing changed for as long as the user wanted to wait",
}
"""What is decided here, by name; `PipelineCore.fired` counts."""


class Start(Enum):
    """What must be there for the first pipeline; what is missing then is an error that names it."""

    WHOLE = "whole"
    """All devices that were planned with."""
    SHORT = "short"
    """As many as the model needs: it begins without those that do not answer. A drafter is not needed."""
    ANY = "any"
    """None: devices are waited for as they are later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormingTimeouts:
    """How long what may take, in seconds.

    A device may take `connect_s` to answer at all, where it was there a moment ago `reconnect_s`. The first
    pipeline waits `held_s` at most for one whose head may have died. Leases are kept by a Ping every
    `ping_s`, devices looked at every `watch_s`. `wait_s` is how long a user waits for devices where there is
    no pipeline (None: for ever; 0: that is an error at once). A stage that is slower for `changed_s` of work
    leads to another plan.
    """

    connect_s: float
    reconnect_s: float
    held_s: float
    ping_s: float
    watch_s: float
    settle_s: float
    wait_s: float | None = None
    changed_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What a device is to be assigned; `place` is how to name it to people."""

    device: str
    place: str
    assign: Assign

    @property
    def question(self) -> AskArithmetics | None:
        """What the device is asked before it is assigned this: nothing if that is a drafter."""
        return None if self.assign.drafting is not None else AskArithmetics(dtype=self.assign.dtype)

    def is_answer(self, told: Arithmetics) -> bool:
        return self.question is not None and told.dtype == self.assign.dtype


# --------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMade:
    """The plan that `AskPlan` asked for, in pipeline order; `is_beside` is as there.

    By its forecast it is `gain` times as fast as the pipeline that works (None: there is none, or nothing
    foretells it).
    """

    parts: tuple[Assignment, ...]
    is_beside: bool = False
    gain: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFailed:
    """There is no plan for those devices: `text` says why."""

    text: str
    is_beside: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMessageArrived:
    """A message that a device of pipeline `pipeline` sent on its connection for `role`."""

    pipeline: int
    device: str
    role: str
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionClosed:
    """A connection to a device closed, for whatever reason."""

    pipeline: int
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DialRefused:
    """A device cannot be dialled, or hangs up on us: `text` says why. It `is_final` where trying again is
    useless."""

    pipeline: int
    device: str
    text: str
    is_final: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressNotFound:
    """A device has no address: its name cannot be looked up. `text` says why."""

    pipeline: int
    device: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBrokeProtocol:
    """What came of a device (empty: of one that cannot be told) is no message, or not what can be said."""

    pipeline: int
    device: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SendFailed:
    """A device takes no more `what`."""

    pipeline: int
    device: str
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentReturned:
    """A segment came back through pipeline `pipeline`: what its stages spent on it; its rows saw `context`
    earlier tokens."""

    pipeline: int
    hops: tuple[Hop, ...]
    context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsUnavailable:
    """The weights cannot be read, or sent."""

    pipeline: int
    text: str


_ConnectionEvent = (
    DeviceMessageArrived
    | ConnectionClosed
    | DialRefused
    | AddressNotFound
    | DeviceBrokeProtocol
    | SendFailed
    | WeightsUnavailable
)
FormingEvent = (
    SessionStarted
    | PlanMade
    | PlanFailed
    | SegmentReturned
    | _ConnectionEvent
    | ProbeAnswered
    | DeviceSurveyed
    | Tick
)

# ------------------------------------------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True, kw_only=True)
class AskPlan:
    """Find out what these devices shall run, and say `PlanMade` or `PlanFailed`; `is_first` is the plan that
    the user has seen.

    `is_beside` says that another pipeline works meanwhile. Devices that are named in `slowness` take so many
    times what they took at first.
    """

    devices: tuple[str, ...]
    is_first: bool
    is_beside: bool = False
    slowness: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPipeline:
    """Pipeline `pipeline` is to have these parts: nothing is dialled yet. With `is_beside` some of them make
    ready beside another one."""

    pipeline: int
    parts: tuple[Assignment, ...]
    is_beside: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Dial:
    """Open a connection to a device and say Hello on it."""

    pipeline: int
    device: str
    role: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SendControl:
    """A message to a device, on its control connection."""

    pipeline: int
    device: str
    message: Assign | AskArithmetics | Ping | Reset


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeWeights:
    """A device asks for the weights of its part."""

    pipeline: int
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SendTokens:
    """A device asks for the bytes of the model's tokens, from `offset` on."""

    pipeline: int
    device: str
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPipeline:
    """The pipeline is there, with this room for caches at each stage: nobody needs weights any more. The
    stages `capturing` send features.

    All its stages compute with this `arithmetic` (empty: it is a drafter's).
    """

    pipeline: int
    stage_count: int
    rooms: tuple[CacheRoom, ...]
    arithmetic: str = ""
    capturing: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StopPipeline:
    """The pipeline that was there is there no more; `silent_s` is what was heard last ago."""

    silent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HangUp:
    """Close all connections of a pipeline; those of `device` without waiting for what is on its way."""

    pipeline: int
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowProgress:
    """How far a device has come with what it is doing."""

    device: str
    doing: str
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EndSession:
    """There is nothing that could be tried: the session ends with this error."""

    text: str


FormingCommand = (
    AskPlan
    | OpenPipeline
    | Dial
    | SendControl
    | ServeWeights
    | SendTokens
    | StartPipeline
    | StopPipeline
    | HangUp
    | ShowProgress
    | Log
    | EndSession
    | Note
    | Probe
    | SurveyDevice
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fault:
    """Why a pipeline cannot go on: because of `device` (empty: of none in particular), or of the link from
    `device` to `other`.

    `why` is for a note, `text` for an error that ends the session; with `is_final` no other pipeline could do
    better.
    """

    text: str
    why: str
    device: str = ""
    other: str = ""
    is_refusal: bool = False
    is_held: bool = False
    is_final: bool = False


@dataclass(slots=True)
class _LoadingProgress:
    """How far a device has come with loading: its step, how often it began each, and how far it has come with
    each."""

    step: str = ""
    begun: Counter[str] = field(default_factory=Counter)
    shares: dict[str, float] = field(default_factory=dict)

    def gets_further(self, loading: Loading) -> bool:
        """Whether this is progress. The same again, less, or a step that begins once more too often is a sign
        of life alone."""
        begins, self.step = loading.doing != self.step, loading.doing
        self.begun[self.step] += begins
        is_anew = begins and self.begun[self.step] <= STEP_BEGINNINGS_MAX
        if not is_anew and loading.share < self.shares.get(self.step, 0.0) + LOADED_SHARE_MIN:
            return False
        self.shares[self.step] = loading.share
        return True


@dataclass(slots=True)
class _Pipeline:
    """One pipeline, on its way or at work."""

    number: int
    parts: tuple[Assignment, ...]
    began_s: float
    connect_s: float
    welcomed: set[tuple[str, str]] = field(default_factory=set)
    ready: dict[str, Ready] = field(default_factory=dict)
    loaded: dict[str, _LoadingProgress] = field(default_factory=dict)
    again_s: dict[str, float] = field(default_factory=dict)
    held: dict[str, Holder] = field(default_factory=dict)
    waited: set[str] = field(default_factory=set)
    trouble: dict[str, str] = field(default_factory=dict)
    fault: _Fault | None = None
    fault_due_s: float = 0.0
    told: set[str] = field(default_factory=set)
    arithmetic: str = ""
    is_assigned: bool = False
    is_formed: bool = False

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(part.device for part in self.parts)

    @property
    def with_data(self) -> tuple[str, ...]:
        """The devices that data goes to and comes from: none of a drafter, whose answers come on control."""
        if self.parts[0].assign.drafting is not None:
            return ()
        ends = {self.parts[0].device, self.parts[-1].device}
        return tuple(part.device for part in self.parts if part.device in ends or part.assign.captured)

    def part(self, device: str) -> Assignment:
        return next(part for part in self.parts if part.device == device)

    def is_welcome(self, device: str) -> bool:
        return (device, CONTROL) in self.welcomed

    def waits_for(self, device: str, told: Arithmetics) -> bool:
        """Whether the device was asked this, and nothing is assigned yet."""
        return not self.is_assigned and self.part(device).is_answer(told)


@dataclass(slots=True)
class _Preparation:
    """Devices that make ready for their parts, beside the pipeline that works: who is in none, and members.

    Of those that have no room for it yet `load_s` tells how long they will load.
    """

    number: int
    parts: tuple[Assignment, ...]
    returning: tuple[str, ...]
    began_s: float
    progressed_s: float
    gain: float | None = None
    welcomed: set[str] = field(default_factory=set)
    ready: set[str] = field(default_factory=set)
    loaded: dict[str, _LoadingProgress] = field(default_factory=dict)
    load_s: float = 0.0

    def part(self, device: str) -> Assignment:
        return next(part for part in self.parts if part.device == device)


class PipelineCore:
    """See the module. With `is_only` the first pipeline is the only one: what goes wrong with it is an error.

    An `arithmetic` is kept that an earlier session began with (empty: that of the first pipeline).
    """

    def __init__(
        self,
        membership: Membership,
        timeouts: FormingTimeouts,
        *,
        start: Start = Start.WHOLE,
        is_only: bool = False,
        arithmetic: str = "",
    ) -> None:
        self.membership = membership
        self.timeouts = timeouts
        self.agreement = Agreement(arithmetic)
        self.start = start
        self.is_only = is_only
        self.fired: Counter[str] = Counter()
        self.due_s = 0.0
        self._pipeline: _Pipeline | None = None
        self._preparation: _Preparation | None = None
        self._returning: tuple[str, ...] = ()
        self._beside: tuple[tuple[str, ...], dict[str, float]] | None = None
        self._slowing = Slowing(timeouts.changed_s)
        self._layers: dict[str, tuple[int, int]] = {}
        self._generation = 0
        self._was_formed = self._is_over = False
        self._pinged_s = self._watched_s = -1e9
        self._waiting_since_s: float | None = None
        self._note = self._first_text = ""
        self._commands: list[FormingCommand] = []

    @property
    def number(self) -> int:
        """Of the pipeline that is there or on its way; 0 while there is none."""
        return 0 if self._pipeline is None else self._pipeline.number

    @property
    def is_formed(self) -> bool:
        return self._pipeline is not None and self._pipeline.is_formed

    def handle(self, event: FormingEvent, now_s: float) -> list[FormingCommand]:
        """The only mutator; `due_s` tells when the next Tick is due at the latest."""
        commands: list[FormingCommand] = []
        self._commands = commands
        if self._is_over:
            return commands
        pipeline = self._pipeline
        if isinstance(event, SegmentReturned):
            if pipeline is not None and pipeline.number == event.pipeline:
                self._slowing.passed(event.hops, event.context)
            return commands
        if isinstance(event, Tick):
            self._tick(event, now_s)
        elif isinstance(event, SessionStarted | ProbeAnswered | DeviceSurveyed):
            self._decide(event, now_s)
        elif isinstance(event, PlanMade):
            if event.is_beside:
                self._planned_beside(event, now_s)
            else:
                self._planned(event.parts, now_s)
        elif isinstance(event, PlanFailed):
            beside = PreparationFailed(devices=self._returning, text=event.text)
            if not self._was_formed and self._first_text:
                self._first_text = f"{self._first_text}; without it {event.text}"
            self._decide(beside if event.is_beside else NoPlanFound(text=event.text), now_s)
        elif self._preparation is not None and self._preparation.number == event.pipeline:
            self._event_beside(self._preparation, event, now_s)
        elif pipeline is None or pipeline.number != event.pipeline:
            self.fired["fenced word"] += 1
        elif isinstance(event, DeviceMessageArrived):
            if event.role == CONTROL:
                self._message_arrived(pipeline, event.device, event.message, now_s)
            else:
                self._data_message_arrived(pipeline, event.device, event.message, now_s)
        elif isinstance(event, ConnectionClosed):
            self._closed(pipeline, event.device, now_s)
        elif isinstance(event, DialRefused):
            self._refused(pipeline, event, now_s)
        elif isinstance(event, AddressNotFound):
            self.fired["no address"] += 1
            place = pipeline.part(event.device).place
            self._break(_Fault(text=f"{place}: {event.text}", why=event.text, device=event.device), now_s)
        elif isinstance(event, DeviceBrokeProtocol):
            self.fired["misspoke"] += 1
            self._break(_Fault(text=event.text, why=event.text, device=event.device), now_s)
        elif isinstance(event, SendFailed):
            self.fired["unsent"] += 1
            place = pipeline.part(event.device).place
            self._break(
                _Fault(
                    text=f"{place} takes no more {event.what}",
                    why=f"it takes no more {event.what}",
                    device=event.device,
                ),
                now_s,
            )
        else:
            self._suspect(pipeline, _Fault(text=event.text, why=event.text, is_final=True), now_s)
        self._set_due(now_s)
        return commands

    def validate(self) -> None:
        """What is true between two events, whatever happened; raises `AssertionError`."""
        if self._is_over:
            return
        pipeline = self._pipeline
        self.membership.validate()
        assert self._preparation is None or self.is_formed, "devices make ready beside nothing"
        assert self.is_formed == self.membership.is_formed, (
            "there is a pipeline, and its members know nothing of it"
        )
        if pipeline is None:
            return
        assert set(pipeline.devices) == set(self.membership.members), (
            "the pipeline is of other devices than its members"
        )
        assert pipeline.ready.keys() <= {device for device, _ in pipeline.welcomed}, (
            "a device is ready, but never answered"
        )
        assert not pipeline.ready or pipeline.is_assigned, "a device is ready for what it was not assigned"
        names = {part.assign.arithmetic for part in pipeline.parts}
        assert len(names) == 1, f"the parts are computed with {names}"
        is_kept = not self.is_formed or pipeline.arithmetic == self.agreement.name
        assert is_kept, f"{pipeline.arithmetic} is not what is kept"
        assert not pipeline.is_formed or pipeline.ready.keys() == set(pipeline.devices), (
            "the pipeline is there, and not all are ready"
        )

    def _give_up(self, text: str) -> None:
        self._is_over = True
        self._commands.append(EndSession(text=text))

    def _set_due(self, now_s: float) -> None:
        pipeline = self._pipeline
        self.due_s = self._watched_s + self.timeouts.watch_s
        if pipeline is not None:
            self.due_s = min(self.due_s, self._pinged_s + self.timeouts.ping_s)
            if pipeline.fault is not None:
                self.due_s = min(self.due_s, pipeline.fault_due_s)
            if not pipeline.is_formed:
                self.due_s = min(self.due_s, now_s + LOOK_S)

    # ------------------------------------------------------------------------------------------- membership

    def _decide(self, event: MembershipEvent, now_s: float) -> None:
        """Lets membership decide, and does what it says."""
        cause = ""
        for command in self.membership.handle(event, now_s):
            if isinstance(command, Note):
                self._note = command.text
                cause = cause or command.text
                self._commands.append(command)
            elif isinstance(command, Probe | SurveyDevice):
                self._commands.append(command)
            elif isinstance(command, Prepare):
                self._returning = command.returning
                slowness = self._slowing.slowness
                self._beside = command.devices, slowness
                self._commands.append(
                    AskPlan(devices=command.devices, is_first=False, is_beside=True, slowness=slowness)
                )
            elif isinstance(command, Reform | Disband):
                is_wanted = isinstance(command, Reform)
                if self._generation and (
                    self.is_only or not (self._was_formed or self._may_begin_without(is_wanted))
                ):
                    self._commands[:] = [each for each in self._commands if not isinstance(each, Note)]
                    self._give_up(self._first_text or (cause or self._note).partition("; ")[0])
                    return
                if not is_wanted and self._note.endswith(WAITING):
                    wait_s = self.timeouts.wait_s
                    place = self._commands.index(Note(text=self._note))
                    if wait_s == 0:
                        del self._commands[place]
                        self._give_up(self._note.removesuffix(WAITING))
                        return
                    limit = "as long as it takes" if wait_s is None else f"for {wait_s:.0f} s at most"
                    self._commands[place] = Note(text=f"{self._note}, {limit}; start its daemon again")
                self._fence(command.silent_s)
                self._waiting_since_s = None if is_wanted else now_s
                beside, self._beside = self._beside, None
                if isinstance(command, Reform):
                    slowness = self._slowing.slowness
                    if beside is not None and beside[0] == command.devices:
                        slowness = beside[1]  # they have made ready for that plan, and no other
                    self._commands.append(
                        AskPlan(devices=command.devices, is_first=not self._generation, slowness=slowness)
                    )
            else:
                assert isinstance(command, GiveUp)
                self._give_up(command.text)

    def _may_begin_without(self, is_wanted: bool) -> bool:
        """Whether the first pipeline may lack devices; `is_wanted` says that another one is to be formed of
        the rest."""
        if self.start is Start.SHORT:
            return is_wanted or not self.membership.is_needed
        return self.start is Start.ANY

    def _fence(self, silent_s: float) -> None:
        """The pipeline is over: its devices are let go of, and what they still say is not heard."""
        self._end_preparation()
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is None:
            return
        if pipeline.is_formed:
            self._commands.append(StopPipeline(silent_s=silent_s))
        for device in pipeline.devices:
            if pipeline.is_welcome(device):
                self._commands.append(SendControl(pipeline=pipeline.number, device=device, message=Reset()))
        lost = [device for device in self.membership.lost if device in pipeline.devices]
        self._commands.append(HangUp(pipeline=pipeline.number, device=lost[-1] if lost else ""))

    def _planned(self, parts: tuple[Assignment, ...], now_s: float) -> None:
        self._generation += 1
        connect_s = self.timeouts.reconnect_s if self._was_formed else self.timeouts.connect_s
        pipeline = self._pipeline = _Pipeline(self._generation, parts, now_s, connect_s)
        self._decide(MembersChosen(devices=pipeline.devices), now_s)
        self._commands.append(OpenPipeline(pipeline=pipeline.number, parts=parts))
        self._commands += [
            Dial(pipeline=pipeline.number, device=device, role=CONTROL) for device in pipeline.devices
        ]

    def _break(self, fault: _Fault, now_s: float) -> None:
        is_wrong = (
            fault.is_refusal and self.start is not Start.ANY
        )  # whoever is there, but cannot do what was planned
        if not self._was_formed:
            self._first_text = self._first_text or fault.text
        if (
            fault.is_final
            or self.is_only
            or (not self._was_formed and (is_wrong or self.start is Start.WHOLE))
        ):
            self._give_up(fault.text)
        elif fault.other:
            self._decide(LinkBroken(first=fault.device, second=fault.other, text=fault.why), now_s)
        else:
            self._decide(
                PipelineBroken(
                    device=fault.device,
                    text=fault.why,
                    is_refusal=fault.is_refusal,
                    is_held=fault.is_held,
                ),
                now_s,
            )

    def _suspect(self, pipeline: _Pipeline, fault: _Fault, now_s: float) -> None:
        """A device says what went wrong: it is believed if nothing explains it better soon."""
        if pipeline.fault is None:
            pipeline.fault, pipeline.fault_due_s = fault, now_s + self.timeouts.settle_s

    # ---------------------------------------------------------------------------------------------- devices

    def _message_arrived(self, pipeline: _Pipeline, device: str, message: Message, now_s: float) -> None:
        if isinstance(message, Pong):
            self._slowing.heard(device, message)
            heard = HeartbeatArrived(
                device=device,
                running_s=message.running_s,
                queued=message.queued,
                done=message.done,
                arrived=message.arrived,
            )
            self._decide(heard, now_s)
            return
        if isinstance(message, Error) and message.retry_after_s > 0:
            self._held(pipeline, device, message, now_s)
            return
        is_progress = not isinstance(message, Loading) or pipeline.loaded.setdefault(
            device, _LoadingProgress()
        ).gets_further(message)
        self._decide(
            MemberProgressed(device=device, is_ready=isinstance(message, Ready))
            if is_progress
            else HeartbeatArrived(device=device),
            now_s,
        )
        if isinstance(message, Welcome):
            if pipeline.is_welcome(device):
                return
            pipeline.welcomed.add((device, CONTROL))
            if (ask := pipeline.part(device).question) is not None:
                self._commands.append(SendControl(pipeline=pipeline.number, device=device, message=ask))
            else:
                self._assign_all(pipeline)
        elif isinstance(message, Arithmetics) and pipeline.waits_for(device, message):
            self._arithmetics_arrived(pipeline, device, message, now_s)
        elif isinstance(message, Loading):
            self._commands.append(ShowProgress(device=device, doing=message.doing, share=message.share))
        elif isinstance(message, Ready) and pipeline.is_assigned:
            self._ready(pipeline, device, message, now_s)
        elif isinstance(message, AskModel):
            self._commands.append(ServeWeights(pipeline=pipeline.number, device=device))
        elif isinstance(message, AskTokens):
            sent = SendTokens(pipeline=pipeline.number, device=device, offset=message.offset)
            self._commands.append(sent)
        elif isinstance(message, Error):
            self._suspect(pipeline, fault_of(pipeline.parts, device, message), now_s)
        elif not (isinstance(message, Proposed) and pipeline.part(device).assign.drafting is not None):
            self.fired["misspoke"] += 1
            text = f"{pipeline.part(device).place} sent an unexpected {type(message).__name__}"
            self._break(_Fault(text=text, why=text), now_s)

    def _data_message_arrived(self, pipeline: _Pipeline, device: str, message: Message, now_s: float) -> None:
        if isinstance(message, Welcome):
            pipeline.welcomed.add((device, DATA))
            self._look_whether_formed(pipeline, now_s)
        elif isinstance(message, Error):
            self._suspect(pipeline, _Fault(text=message.text, why=message.text), now_s)
        elif not isinstance(message, Verified | Features):
            self.fired["misspoke"] += 1
            text = f"{device} sent an unexpected {type(message).__name__}"
            self._break(_Fault(text=text, why=text), now_s)

    def _arithmetics_arrived(self, pipeline: _Pipeline, device: str, told: Arithmetics, now_s: float) -> None:
        """A device says which arithmetics it has. When all have, they get their parts, or one has none."""
        self.agreement.hear(device, told)
        pipeline.told.add(device)
        if len(pipeline.told) < len(pipeline.parts):
            return
        found = self.agreement.agree(pipeline.devices)
        if isinstance(found, Lack):
            self.fired["lacks"] += 1
            text = f"{pipeline.part(found.device).place}: {found.text}"
            self._break(_Fault(text=text, why=found.text, device=found.device, is_refusal=True), now_s)
            return
        pipeline.arithmetic = found
        self._assign_all(pipeline)

    def _assign_all(self, pipeline: _Pipeline) -> None:
        pipeline.is_assigned = True
        pipeline.parts = computing(pipeline.parts, pipeline.arithmetic)
        self._commands += [
            Dial(pipeline=pipeline.number, device=device, role=DATA) for device in pipeline.with_data
        ]
        self._commands += [
            SendControl(pipeline=pipeline.number, device=part.device, message=part.assign)
            for part in pipeline.parts
        ]

    def _ready(self, pipeline: _Pipeline, device: str, ready: Ready, now_s: float) -> None:
        part = pipeline.part(device)
        # A drafter is not asked about what it has no room for.
        slots = part.assign.context + limits.TREE_NODES_MAX if part.assign.drafting is None else 0
        window = part.assign.sliding_window
        room = _room_of(part.assign, ready)
        needed = room.need(slots, slots if window is None else min(slots, window.slots))
        if room.bytes < needed:
            self.fired["no room"] += 1
            why = (
                f"expected room for {room.in_slots(needed)} cache slots, got {room.slots}; give it fewer "
                "layers, or use a smaller --context"
            )
            self._break(_Fault(text=f"{part.place}: {why}", why=why, device=device, is_refusal=True), now_s)
            return
        pipeline.ready[device] = ready
        self._commands.append(ShowProgress(device=device, doing="ready", share=1.0))
        self._look_whether_formed(pipeline, now_s)

    def _look_whether_formed(self, pipeline: _Pipeline, now_s: float) -> None:
        is_there = len(pipeline.ready) == len(pipeline.parts) and all(
            (device, DATA) in pipeline.welcomed for device in pipeline.with_data
        )
        if not is_there or pipeline.is_formed:
            return
        pipeline.is_formed = self._was_formed = True
        self.agreement.name = self.agreement.name or pipeline.arithmetic
        self._slowing.begin(pipeline.devices)
        before, self._layers = self._layers, layers_of(pipeline.parts)
        moved = tuple(device for device, span in self._layers.items() if before.get(device, span) != span)
        self._decide(PipelineFormed(moved=moved), now_s)
        rooms = tuple(_room_of(part.assign, pipeline.ready[part.device]) for part in pipeline.parts)
        self._commands.append(
            StartPipeline(
                pipeline=pipeline.number,
                stage_count=len(pipeline.parts),
                rooms=rooms,
                arithmetic=pipeline.arithmetic,
                capturing=capturing_of([part.assign for part in pipeline.parts]),
            )
        )

    def _held(self, pipeline: _Pipeline, device: str, error: Error, now_s: float) -> None:
        """Another head holds a device: the first pipeline waits where that one may have died, and a later one
        does without."""
        place = pipeline.part(device).place
        is_asked_again = device in pipeline.held
        holder = pipeline.held.setdefault(device, Holder())
        is_in_use = holder.is_there(error.retry_after_s, now_s)
        if not (self._was_formed or is_in_use) and now_s - pipeline.began_s < self.timeouts.held_s:
            self.fired["waited for"] += 1
            self._decide(MemberProgressed(device=device), now_s)
            if is_asked_again and device not in pipeline.waited:
                pipeline.waited.add(device)
                text = f"waiting for {place}, whose head seems to have died: {error.text}"
                self._commands.append(Log(text=text, level="warning"))
            pipeline.again_s[device] = now_s + min(error.retry_after_s, RETRY_S_MAX)
            return
        self.fired["held elsewhere"] += 1
        fault = _Fault(text=f"{place}: {error.text}", why=error.text, device=device, is_held=True)
        self._break(fault, now_s)

    def _closed(self, pipeline: _Pipeline, device: str, now_s: float) -> None:
        if not pipeline.is_welcome(device):
            return  # it has not answered yet, and may
        self.fired["closed"] += 1
        if pipeline.fault is not None:
            self.fired["better explained"] += 1
        doing = "answering" if device in pipeline.ready else "loading"
        text = (
            f"{pipeline.part(device).place} was lost while {doing}: its connection closed; see the daemon's "
            "log there"
        )
        self._break(_Fault(text=text, why="its connection closed", device=device), now_s)

    def _refused(self, pipeline: _Pipeline, event: DialRefused, now_s: float) -> None:
        if not event.is_final:
            pipeline.trouble[event.device] = event.text
            return
        self.fired["refused at the door"] += 1
        text = f"{pipeline.part(event.device).place} refuses: {event.text}"
        self._break(
            _Fault(text=text, why=event.text, device=event.device, is_refusal=not self._was_formed), now_s
        )

    # ----------------------------------------------------------------------------------------------- beside

    def _planned_beside(self, planned: PlanMade, now_s: float) -> None:
        """What those who are in no pipeline would have to do in a better one."""
        pipeline = self._pipeline
        if pipeline is None or not pipeline.is_formed:
            return  # it was lost meanwhile, and membership knows
        parts = computing(planned.parts, pipeline.arithmetic)
        theirs = tuple(part for part in parts if part.device not in pipeline.devices)
        now = layers_of(pipeline.parts)
        moved = tuple(
            replace(part, assign=structs.replace(part.assign, is_beside=True))
            for part in parts
            if now.get(part.device, span := (part.assign.first_layer, part.assign.end_layer)) != span
        )
        before, after = ([(part.device, part.assign) for part in each] for each in (pipeline.parts, parts))
        is_same = before == after
        if planned.gain is None:
            is_wanted = any(part.device in self._returning for part in theirs)
        else:
            is_wanted = not is_same and self.membership.is_worth(planned.gain)
        if not is_wanted:
            self._decide(PlanRejected(devices=self._returning), now_s)
            return
        makers = (*theirs, *moved)
        if not makers:
            self._decide(DevicesPrepared(devices=self._returning, gain=planned.gain), now_s)
            return
        # of the same session: the next pipeline may follow before the device has heard that this is over
        self._generation += 1
        preparation = _Preparation(self._generation, makers, self._returning, now_s, now_s, planned.gain)
        self._preparation = preparation
        self._commands.append(OpenPipeline(pipeline=preparation.number, parts=planned.parts, is_beside=True))
        number = preparation.number
        self._commands += [Dial(pipeline=number, device=part.device, role=CONTROL) for part in makers]

    def _event_beside(self, preparation: _Preparation, event: _ConnectionEvent, now_s: float) -> None:
        if isinstance(event, DeviceMessageArrived):
            self._message_arrived_beside(preparation, event.device, event.message, now_s)
        elif isinstance(event, ConnectionClosed):
            if event.device in preparation.welcomed:
                self._fail_beside(preparation, event.device, "its connection closed", now_s)
        elif isinstance(event, SendFailed):
            self._fail_beside(preparation, event.device, f"it takes no more {event.what}", now_s)
        elif not isinstance(event, DialRefused) or event.is_final:
            device = "" if isinstance(event, WeightsUnavailable) else event.device
            self._fail_beside(preparation, device, event.text, now_s)

    def _message_arrived_beside(
        self, preparation: _Preparation, device: str, message: Message, now_s: float
    ) -> None:
        if isinstance(message, Welcome):
            preparation.welcomed.add(device)
            preparation.progressed_s = now_s
            part = preparation.part(device)
            first = part.question or part.assign
            self._commands.append(SendControl(pipeline=preparation.number, device=device, message=first))
        elif isinstance(message, Arithmetics) and preparation.part(device).is_answer(message):
            self.agreement.hear(device, message)
            if (lack := self.agreement.lack(device)) is not None:
                self._leave_out_beside(preparation, lack, now_s)
                return
            preparation.progressed_s = now_s
            self._commands.append(
                SendControl(
                    pipeline=preparation.number, device=device, message=preparation.part(device).assign
                )
            )
        elif isinstance(message, Loading):
            if preparation.loaded.setdefault(device, _LoadingProgress()).gets_further(message):
                preparation.progressed_s = now_s
            if device in preparation.returning:  # a member that loads beside its work is at work
                shown = ShowProgress(device=device, doing=message.doing, share=message.share)
                self._commands.append(shown)
        elif isinstance(message, AskModel):
            self._commands.append(ServeWeights(pipeline=preparation.number, device=device))
        elif isinstance(message, AskTokens):
            self._commands.append(
                SendTokens(pipeline=preparation.number, device=device, offset=message.offset)
            )
        elif isinstance(message, Ready) and device in preparation.welcomed:
            preparation.ready.add(device)
            preparation.load_s = max(preparation.load_s, message.load_s)
            if len(preparation.ready) == len(preparation.parts):
                self._end_preparation()
                prepared = DevicesPrepared(
                    devices=preparation.returning, gain=preparation.gain, load_s=preparation.load_s
                )
                self._decide(prepared, now_s)
        elif not isinstance(message, Pong):
            text = (
                message.text
                if isinstance(message, Error)
                else f"it sent an unexpected {type(message).__name__}"
            )
            self._fail_beside(preparation, device, text, now_s)

    def _look_beside(self, preparation: _Preparation, now_s: float) -> None:
        devices = [part.device for part in preparation.parts]
        silent = next((device for device in devices if device not in preparation.welcomed), None)
        if silent is not None and now_s > preparation.began_s + self.timeouts.reconnect_s:
            self._fail_beside(
                preparation, silent, f"no answer within {self.timeouts.reconnect_s:.0f} s", now_s
            )
        elif now_s > preparation.progressed_s + (limit_s := self.membership.timeouts.loading_s):
            last = next(device for device in devices if device not in preparation.ready)
            self._fail_beside(preparation, last, f"no progress in loading for {limit_s:.0f} s", now_s)

    def _fail_beside(self, preparation: _Preparation, device: str, text: str, now_s: float) -> None:
        """One of them cannot make ready; a member is named, for it is not the one that is left out."""
        self._end_preparation()
        if device and device not in preparation.returning:
            self.fired["member not ready"] += 1
            text = f"{device} cannot make ready for it: {text}"
        self._decide(PreparationFailed(devices=preparation.returning, text=text), now_s)

    def _leave_out_beside(self, preparation: _Preparation, lack: Lack, now_s: float) -> None:
        """One of them cannot take part at all: the others make ready again, without it."""
        self.fired["lacks beside"] += 1
        if self._pipeline is not None and lack.device in self._pipeline.devices:  # it said otherwise before
            self._fail_beside(preparation, lack.device, lack.text, now_s)
            return
        self._end_preparation()
        self._decide(
            PreparationFailed(devices=preparation.returning, text=lack.text, unable=lack.device), now_s
        )

    def _end_preparation(self) -> None:
        """Lets go of those who made ready; they keep what they have loaded."""
        preparation, self._preparation = self._preparation, None
        if preparation is not None:
            for device in sorted(preparation.welcomed):
                self._commands.append(
                    SendControl(pipeline=preparation.number, device=device, message=Reset())
                )
            self._commands.append(HangUp(pipeline=preparation.number, device=""))

    # ------------------------------------------------------------------------------------------------- time

    def _tick(self, tick: Tick, now_s: float) -> None:
        pipeline = self._pipeline
        if pipeline is not None:
            if pipeline.fault is not None and now_s >= pipeline.fault_due_s:
                self.fired["settled"] += 1
                self._break(pipeline.fault, now_s)
                return
            if now_s >= self._pinged_s + self.timeouts.ping_s:
                self._pinged_s = now_s
                if (preparation := self._preparation) is not None:
                    self._commands += [
                        SendControl(pipeline=preparation.number, device=each, message=Ping())
                        for each in sorted(preparation.welcomed)
                    ]
                for device in pipeline.devices:
                    if pipeline.is_welcome(device):
                        self._commands.append(
                            SendControl(pipeline=pipeline.number, device=device, message=Ping())
                        )
            if not pipeline.is_formed and self._look_at_who_is_missing(pipeline, now_s):
                return
        if now_s >= self._watched_s + self.timeouts.watch_s:
            self._watched_s = now_s
            if changes := self._slowing.look(now_s):
                self._decide(SpeedChanged(text=", ".join(str(change) for change in changes)), now_s)
            if pipeline is not None and not pipeline.is_assigned:
                for device in pipeline.told:  # not held yet, it says nothing while others try their kernels
                    self._decide(MemberProgressed(device=device), now_s)
            self._decide(tick, now_s)
        if self._preparation is not None:
            self._look_beside(self._preparation, now_s)
        wait_s = self.timeouts.wait_s
        if (
            self._waiting_since_s is not None
            and wait_s is not None
            and now_s - self._waiting_since_s > wait_s
        ):
            self.fired["waited too long"] += 1
            self._give_up(f"{self._note}; nothing changed within {wait_s:.0f} s")

    def _look_at_who_is_missing(self, pipeline: _Pipeline, now_s: float) -> bool:
        """Asks those that are held again; whether somebody who did not answer is given up."""
        for device, again_s in list(pipeline.again_s.items()):
            if now_s >= again_s:
                del pipeline.again_s[device]
                self._commands.append(
                    SendControl(pipeline=pipeline.number, device=device, message=pipeline.part(device).assign)
                )
        if now_s <= pipeline.began_s + pipeline.connect_s:
            return False
        for device in pipeline.devices:
            if not pipeline.is_welcome(device):
                self.fired["absent"] += 1
                trouble = pipeline.trouble.get(device)
                why = trouble or f"no answer within {pipeline.connect_s:.0f} s"
                rest = f": {why}" if trouble else "; is `flowspec daemon` running there?"
                text = f"{pipeline.part(device).place} did not answer within {pipeline.connect_s:.0f} s{rest}"
                self._break(_Fault(text=text, why=why, device=device), now_s)
                return True
        return False


def computing(parts: Sequence[Assignment], arithmetic: str) -> tuple[Assignment, ...]:
    """The same parts, computed with this arithmetic."""
    return tuple(replace(part, assign=structs.replace(part.assign, arithmetic=arithmetic)) for part in parts)


def layers_of(parts: Sequence[Assignment]) -> dict[str, tuple[int, int]]:
    """What each device holds: layers `[first, end)`."""
    return {part.device: (part.assign.first_layer, part.assign.end_layer) for part in parts}


def fault_of(parts: Sequence[Assignment], device: str, error: Error) -> _Fault:
    """What a device's Error means for the pipeline."""
    index = next(index for index, part in enumerate(parts) if part.device == device)
    text = f"{parts[index].place}: {error.text}"
    if not error.cause:
        return _Fault(text=text, why=error.text, is_final=True)
    if error.cause == "next" and index + 1 < len(parts):
        return _Fault(text=text, why=f"lost by {device}", device=device, other=parts[index + 1].device)
    blamed = device if error.cause in ("part", "gone") else ""
    return _Fault(text=text, why=error.text, device=blamed, is_refusal=error.cause == "part")


def _room_of(assign: Assign, ready: Ready) -> CacheRoom:
    """What a stage that is ready has for caches."""
    windowed_bytes = 0 if assign.sliding_window is None else ready.windowed_bytes
    return CacheRoom(
        slots=ready.cache_slots,
        slot_bytes=ready.slot_bytes,
        windowed_bytes=windowed_bytes,
        state_bytes=ready.state_bytes,
    )
