"""A daemon's mind: who holds it, what its head made of it, and what it says to whom.

Events in, commands out, as with the other cores: no sockets, no clock, no tensors. The runtime's daemon, the
daemons of the fault simulator and those of the fuzzer carry out the same commands.

- A *caller* is a connection that said Hello. What it may say follows from its role; whoever says anything
  else is not listened to any more (`Ban`), and where it belongs to the pipeline that holds the daemon, that
  pipeline is over.
- An Assign gets the daemon's *lease*, as `core.cluster.incarnation.Lease` decides, and becomes its *active
  assignment*: a stage (`StageCore`) or a drafter (`DrafterCore`) is made of it, the next hop is dialled, the
  slice is loaded. When both are there it is ready, and says so once.
- Beside its work for one pipeline a daemon makes ready for a later one of the same head (`Assign.is_beside`):
  it loads what it lacks, or where there is no memory for both (`room_for`) has it here and checked, and says
  so. What it has made ready is found by the next Assign. It is given up with the pipeline that works.
- Words of a pipeline that does not hold the daemon change nothing. What was computed for an assignment that
  is over counts for nothing.
- The assignment ends with a Reset, a later pipeline of the same head, a lease that lapsed, or a failure; the
  head is told why, and what that means (`Error.cause`), unless it is the head that ended it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from flowspec.core.cluster.holder import head_called
from flowspec.core.cluster.incarnation import Claim, Lease
from flowspec.core.driving import Log
from flowspec.core.protocol import limits
from flowspec.core.protocol.cluster_messages import (
    AskArithmetics,
    Assign,
    Error,
    Loading,
    Ping,
    Reset,
    Welcome,
)
from flowspec.core.protocol.device_messages import (
    AskFacts,
    AskModel,
    AskTokens,
    ModelOffer,
    NameList,
    TensorBytes,
    TensorList,
    WeightAnswer,
    WeightQuestion,
)
from flowspec.core.protocol.messages import Commit, Expand, Open, Proposed, Release, Segment
from flowspec.core.protocol.precision import ACTIVATIONS
from flowspec.core.protocol.types import Message
from flowspec.core.stage.drafter import DrafterCore, DrafterEvent
from flowspec.core.stage.events import (
    ClearSlots,
    CloseCache,
    ControlArrived,
    LayerEnded,
    LayersDone,
    OpenCache,
    RunLayers,
    SegmentArrived,
    SendFeatures,
    SendSegment,
    SendVerified,
    StageCommand,
    Trim,
)
from flowspec.core.stage.stage import StageCore
from flowspec.errors import PeerError

RETRY_S = 0.5
"""When at the earliest a head may ask again for a daemon that another one holds."""
RULES = {
    "held": "another head holds the daemon: its Assign is put off",
    "stale": "an Assign of a pipeline that is over is ignored",
    "superseded": "a later pipeline of the same head takes the daemon",
    "lapsed": "the head was silent for longer than its lease",
    "held up": "no deadline is looked at, for words of others wait to be read",
    "next silent": "the next hop did not answer in time",
    "next lost": "the next hop was lost, or refuses",
    "fenced": "a word of a pipeline that does not hold the daemon is ignored",
    "late result": "what was computed for an assignment that is over is dropped",
    "unsent": "what was to leave could not",
    "misbehaved": "a caller broke the protocol, and is not listened to any more",
    "failed": "the slice could not be loaded, or run",
    "beside": "the slice of a later pipeline is made ready beside the one that works",
    "beside nothing": "no earlier pipeline of that head works here: there is nothing to make ready beside",
    "not made ready": "the slice of a later pipeline could not be had beside the one that works",
    "given up": "what was being made ready is given up: the pipeline that works is over, or the head says so",
}
"""What is decided here, by name; `DaemonCore.fired` counts."""


@dataclass(eq=False, slots=True)
class Caller:
    """A connection to this daemon that said Hello: who dialled, what for (`cluster_messages.ROLES`), and of
    which pipeline."""

    name: str
    role: str
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonLimits:
    """How long what may take, in seconds: a head may be silent for `lease_s`, the next hop may take `link_s`
    to answer.

    Of `queued_max` segments that wait none more is taken. Of what others say `messages_max` are read, before
    results have their turn.
    """

    lease_s: float
    link_s: float
    queued_max: int = limits.QUEUED_SEGMENTS_MAX
    messages_max: int = limits.MESSAGES_PER_TURN_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A slice is in memory; `reused` says that it was there already, `received_bytes` how much of it the head
    sent just now.

    There is room for `cache_slots` beside it. One takes `slot_bytes` in all its layers, `windowed_bytes` of
    these in layers with a sliding window; the states of a conversation take `state_bytes`. So many `carried`
    numbers come with each hidden state (`model_spec`). `grammars` is as in `Ready`. A slice that was made
    ready and had no room takes `load_s` to load.
    """

    weight_bytes: int
    cache_slots: int
    received_bytes: int
    hidden_size: int
    vocabulary_size: int
    reused: bool
    load_s: float = 0.0
    slot_bytes: int = 1
    windowed_bytes: int = 0
    state_bytes: int = 0
    carried: int = 0
    grammars: str = ""


class SliceRoom(Enum):
    """Where the slice of the next pipeline fits."""

    BESIDE = "beside the one that runs"
    AFTER = "once the one that runs is given up"
    NONE = "nowhere"


def room_for(*, new: int, cache: int, free: int, growth: int, given_up: int) -> SliceRoom:
    """Where a slice fits of which `new` bytes are not in memory, and which needs `cache` for a conversation.

    There are `free` bytes, of which the caches that are open may yet take `growth`; `given_up` are freed with
    the slice that runs.
    """
    if new + cache > free + given_up:
        return SliceRoom.NONE
    return SliceRoom.BESIDE if new + growth <= free else SliceRoom.AFTER


# --------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerConnected:
    """A new caller said Hello."""

    caller: Caller


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerMessageArrived:
    """A caller's later message, whose `payload` takes so many bytes."""

    caller: Caller
    message: Message
    payload: Any = None
    payload_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerBrokeProtocol:
    """What came of a caller was no message, or not the next one."""

    caller: Caller
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NextHopMessageArrived:
    """A message of the next hop, which was dialled for assignment `assignment_id`."""

    assignment_id: int
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class NextHopLost:
    """What became of the next hop: it `was lost: its connection closed`, or `refuses`."""

    assignment_id: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandFailed:
    """A command of assignment `assignment_id` could not be carried out: whom it was for takes nothing any
    more."""

    assignment_id: int
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeReported:
    """What the computing side did, or asks, for assignment `assignment_id`."""

    assignment_id: int
    result: Loaded | Loading | WeightQuestion | LayerEnded | LayersDone | Proposed


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeFailed:
    """The computing side cannot do what assignment `assignment_id` asks of it; with `is_part` another device
    may be able to.

    With `is_gone` it met an error that nobody foresaw: for the head it is as if the device had died.
    """

    assignment_id: int
    text: str
    is_part: bool = False
    is_gone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonStopping:
    """The daemon ends."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonTick:
    """Time passes; unless all that came `is_read`, the head's pings may be among what waits.

    `next_trouble` is why the next hop may not answer, where something tells.
    """

    next_trouble: str = ""
    is_read: bool = True


DaemonEvent = (
    CallerConnected
    | CallerMessageArrived
    | CallerBrokeProtocol
    | NextHopMessageArrived
    | NextHopLost
    | CommandFailed
    | ComputeReported
    | ComputeFailed
    | DaemonStopping
    | DaemonTick
)

# ------------------------------------------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True, kw_only=True)
class SendWelcome:
    """Answer a Hello with Welcome; `holder` is another head that holds the daemon, for `lease_s` more."""

    caller: Caller
    holder: str = ""
    lease_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """A message to a caller. With an `assignment_id` it must leave, or `CommandFailed` is told; else whoever
    is gone need not know."""

    caller: Caller
    message: Message
    assignment_id: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOn:
    """What a stage made goes on to `caller`, or to the next hop (None)."""

    assignment_id: int
    caller: Caller | None
    work: SendSegment | SendVerified | SendFeatures


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPong:
    """Answer a Ping with Pong; the memory and the temperature are the daemon's own."""

    caller: Caller
    queued: int
    done: int
    running_s: float
    arrived: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReady:
    """Tell the head that this part of its pipeline can begin."""

    caller: Caller
    loaded: Loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """Find out about the device what a caller asks."""

    caller: Caller
    question: AskFacts | AskArithmetics


@dataclass(frozen=True, slots=True, kw_only=True)
class Ban:
    """Listen to a caller no more; `error` says why, and goes out last."""

    caller: Caller
    error: Error


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAssignment:
    """Assignment `assignment_id` begins: load what is assigned, and dial `assign.next_hop` where there is
    one."""

    assignment_id: int
    caller: Caller
    assign: Assign


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareSlice:
    """Load what is assigned beside the slice that runs, under number `assignment_id`; nothing is dialled."""

    assignment_id: int
    caller: Caller
    assign: Assign


@dataclass(frozen=True, slots=True, kw_only=True)
class EndPreparation:
    """Nothing more is to be done for `assignment_id`; what is loaded stays until the next
    `StartAssignment`."""

    assignment_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Attach:
    """The head's data connection is there, on which assignment `assignment_id` answers if its stage is the
    last, and sends features."""

    assignment_id: int
    caller: Caller


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Work for the computing side; a Trim reaches into what runs, the rest is done in order."""

    assignment_id: int
    work: RunLayers | OpenCache | ClearSlots | CloseCache | Trim | Expand | Release


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliver:
    """An answer to a question about weights."""

    assignment_id: int
    answer: WeightAnswer | Error
    payload: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class EndAssignment:
    """Assignment `assignment_id` is over: close the connection to the next hop, and the caches of these
    requests."""

    assignment_id: int
    requests: Sequence[int]


_Reply = SendWelcome | Send | SendOn | SendPong | SendReady | Gather | Ban | Deliver | Log
DaemonCommand = _Reply | StartAssignment | PrepareSlice | EndPreparation | Attach | Compute | EndAssignment


@dataclass(slots=True)
class ActiveAssignment:
    """What the daemon does for the pipeline that has its lease: the stage or drafter that was made of it."""

    number: int
    control: Caller
    assign: Assign
    core: StageCore | DrafterCore
    next_ready: bool
    next_deadline_s: float
    data: Caller | None = None
    weights: Caller | None = None
    loaded: Loaded | None = None
    unanswered: int = 0
    is_ready: bool = False

    @property
    def next_device(self) -> str:
        """The next hop, for messages to people."""
        return f"the next device {self.assign.next_name} at {self.assign.next_hop}"


@dataclass(slots=True)
class Preparation:
    """A later pipeline of the head that holds the daemon, for which it makes ready; heard of at `heard_s`."""

    number: int
    control: Caller
    assign: Assign
    heard_s: float
    weights: Caller | None = None
    unanswered: int = 0
    is_ready: bool = False


class DaemonCore:
    """See the module. A daemon has one, for as long as it lives."""

    def __init__(self, limits: DaemonLimits) -> None:
        self.limits = limits
        self.lease = Lease(limits.lease_s)
        self.assignment: ActiveAssignment | None = None
        self.beside: Preparation | None = None
        self.fired: Counter[str] = Counter()
        self._assignments_begun = 0
        self._data: OrderedDict[int, Caller] = OrderedDict()
        self._commands: list[DaemonCommand] = []

    @property
    def number(self) -> int:
        """Of the assignment that is; 0 while there is none."""
        return 0 if self.assignment is None else self.assignment.number

    def handle(self, event: DaemonEvent, now_s: float) -> list[DaemonCommand]:
        """The only mutator; raises nothing that a peer can bring about."""
        commands: list[DaemonCommand] = []
        self._commands = commands
        if isinstance(event, ComputeReported):
            self._compute_reported(event, now_s)
        elif isinstance(event, CallerMessageArrived):
            try:
                self._message_arrived(event, now_s)
            except PeerError as error:
                self._protocol_broken(event.caller, str(error))
        elif isinstance(event, DaemonTick):
            self._tick(event, now_s)
        elif isinstance(event, CallerConnected):
            self._caller_connected(event.caller, now_s)
        elif isinstance(event, CallerBrokeProtocol):
            self._protocol_broken(event.caller, event.text)
        elif isinstance(event, NextHopMessageArrived):
            self._next_hop_message(event)
        elif isinstance(event, NextHopLost):
            self._next_hop_lost(event)
        elif isinstance(event, CommandFailed):
            self._unsent(event)
        elif isinstance(event, ComputeFailed):
            self._compute_failed(event)
        else:
            self._end_assignment(f"the daemon stops ({event.reason})", cause="gone")
        return commands

    def validate(self, *, is_honest: bool = True) -> None:
        """What is true between two events; raises `AssertionError`. Of a head that is not `is_honest` less
        can be said of its requests."""
        assignment = self.assignment
        assert (assignment is None) == (self.lease.holder is None), "held, and by nobody"
        self.lease.validate()
        assert len(self._data) <= limits.PEERS_MAX, f"{len(self._data)} data connections are remembered"
        beside = self.beside
        if assignment is None:
            assert beside is None, "something is made ready beside nothing"
            return
        if beside is not None:
            assert assignment.is_ready, "something is made ready beside a pipeline that is not there yet"
            assert beside.control.incarnation > assignment.control.incarnation, (
                "it is made ready for what is over"
            )
            assert beside.unanswered >= 0, "more answers than questions"
        assert self.lease.admits(assignment.control.incarnation), (
            "another pipeline holds the daemon than the one that it works for"
        )
        for caller in (assignment.data, assignment.weights):
            assert caller is None or caller.incarnation == assignment.control.incarnation, (
                "a connection of another pipeline"
            )
        assert assignment.next_ready or assignment.assign.next_hop, "the last stage waits for a next one"
        assert not assignment.is_ready or (assignment.loaded is not None and assignment.next_ready), (
            "ready, with nothing to run or nowhere to send it"
        )
        assert assignment.is_ready or assignment.core.done == 0, "work was done before all was there"
        assert assignment.unanswered >= 0, "more answers than questions"
        assignment.core.validate(is_honest=is_honest)

    def _log(self, text: str, level: str = "info") -> None:
        self._commands.append(Log(text=text, level=level))

    # ------------------------------------------------------------------------------------------- callers

    def _caller_connected(self, caller: Caller, now_s: float) -> None:
        assignment = self.assignment
        is_ours = assignment is not None and self.lease.admits(caller.incarnation)
        if caller.role == "head-data":
            self._data[caller.incarnation] = caller
            if len(self._data) > limits.PEERS_MAX:
                self._data.popitem(last=False)
            if assignment is not None and is_ours:
                self._attach_data(assignment, caller)
        elif caller.role == "head-weights" and assignment is not None and is_ours:
            assignment.weights = caller
        elif caller.role == "head-weights" and self._is_beside(caller) and self.beside is not None:
            self.beside.weights = caller
        elif caller.role == "stage":
            self._log(f"stage {caller.name} is connected")
        welcome = SendWelcome(caller=caller)
        if assignment is not None and not is_ours and not self.lease.is_over(now_s):
            holder, lease_s = assignment.control.name, self.lease.until_s - now_s
            welcome = SendWelcome(caller=caller, holder=holder, lease_s=lease_s)
        self._commands.append(welcome)

    def _protocol_broken(self, caller: Caller, text: str) -> None:
        """A caller broke the protocol. One of ours ends the assignment: the same devices may do better on new
        connections."""
        self.fired["misbehaved"] += 1
        is_ours = self.lease.admits(caller.incarnation) and caller.role != "measure"
        self._commands.append(Ban(caller=caller, error=Error.saying(text, cause="again" if is_ours else "")))
        if is_ours:
            self._fail(f"{caller.name}: {text}", "again")
        elif self._is_beside(caller) and caller.role != "stage":
            self._end_beside()

    def _message_arrived(self, said: CallerMessageArrived, now_s: float) -> None:
        caller, message, assignment = said.caller, said.message, self.assignment
        if caller.role == "head-control":
            self._from_head(caller, message, said.payload, now_s)
        elif caller.role == "head-weights":
            for asker in (assignment, self.beside):
                if asker is not None and asker.weights is caller:
                    answer = _checked_answer(asker, message)
                    self._commands.append(
                        Deliver(assignment_id=asker.number, answer=answer, payload=said.payload)
                    )
        elif not isinstance(message, Segment):
            raise PeerError(f"a {caller.role} connection carries segments, not {type(message).__name__}")
        elif caller.role == "measure":
            return  # it came to be timed, and for nothing else
        elif assignment is None or not self.lease.admits(caller.incarnation):
            self.fired["fenced"] += 1
            self._log(f"ignored a segment of {caller.name}, which does not hold this daemon", "debug")
        else:
            check_segment(assignment.assign, assignment.loaded, message, said.payload)
            if not assignment.is_ready:
                raise PeerError("a segment came before the next hop was reached")
            arrived = SegmentArrived(
                segment=message, payload=said.payload, received_s=now_s, payload_bytes=said.payload_bytes
            )
            self._step(assignment, arrived, now_s)

    def _from_head(self, caller: Caller, message: Message, payload: Any, now_s: float) -> None:
        if isinstance(message, Assign):
            return self._assign(caller, message, now_s)
        if isinstance(message, AskFacts | AskArithmetics):
            self._commands.append(Gather(caller=caller, question=message))
            return None
        assignment, beside = self.assignment, self.beside
        if beside is not None and beside.control is caller:
            return self._from_head_beside(beside, message, now_s)
        if assignment is None or assignment.control is not caller:
            if not isinstance(message, Ping):
                self.fired["fenced"] += 1
                name = type(message).__name__
                self._log(f"ignored a {name} of {caller.name}, which does not hold this daemon", "debug")
            return None
        self.lease.renew(now_s)
        if isinstance(message, Ping):
            core = assignment.core
            running_s, arrived = core.running_s(now_s), core.arrived
            life = SendPong(
                caller=caller, queued=core.queued, done=core.done, running_s=running_s, arrived=arrived
            )
            self._commands.append(life)
        elif isinstance(message, Open | Commit | Release) and isinstance(assignment.core, StageCore):
            self._step(assignment, ControlArrived(message=message), now_s)
        elif isinstance(message, Expand | Release) and isinstance(assignment.core, DrafterCore):
            if isinstance(message, Expand):
                check_expand(assignment.loaded, message)
            self._step(assignment, message, now_s)
        elif isinstance(message, Reset):
            self._end_assignment(f"{_holder(caller)} is done")
        elif isinstance(message, TensorBytes):
            answer = _checked_answer(assignment, message)
            self._commands.append(Deliver(assignment_id=assignment.number, answer=answer, payload=payload))
        else:
            raise PeerError(f"a head's control connection carries no {type(message).__name__}")
        return None

    # ------------------------------------------------------------------------------------------- holding

    def _assign(self, caller: Caller, assign: Assign, now_s: float) -> None:
        claim = self.lease.claim(caller.incarnation)
        if assign.is_beside:
            self._prepare(caller, assign, claim, now_s)
            return
        if claim is Claim.HELD and self.assignment is not None:
            self.fired["held"] += 1
            lease_s = self.limits.lease_s
            text = (
                f"in use by {head_called(self.assignment.control.name)}; a device serves one head at a time, "
                f"and is free at most {lease_s:.0f} s after that one stops"
            )
            self._commands.append(
                Send(caller=caller, message=Error.saying(text, max(RETRY_S, self.lease.until_s - now_s)))
            )
            return
        if claim is Claim.STALE:
            self.fired["stale"] += 1
            self._log(f"ignored an Assign of {caller.name} for a pipeline that is over", "debug")
            return
        if claim is Claim.SUPERSEDES:
            self.fired["superseded"] += 1
            self._end_assignment(f"{_holder(caller)} forms another pipeline")
        self._log(f"{_holder(caller)} assigns {assign.summary}")
        self._assignments_begun += 1
        core = core_of(assign, self.limits.queued_max)
        assignment = self.assignment = ActiveAssignment(
            self._assignments_begun, caller, assign, core, not assign.next_hop, now_s + self.limits.link_s
        )
        self.lease.take(caller.incarnation, now_s)
        self._commands.append(StartAssignment(assignment_id=assignment.number, caller=caller, assign=assign))
        if (data := self._data.get(caller.incarnation)) is not None:
            self._attach_data(assignment, data)

    def _prepare(self, caller: Caller, assign: Assign, claim: Claim, now_s: float) -> None:
        """For a later pipeline of the head whose pipeline works here."""
        assignment, before = self.assignment, self.beside
        if before is not None and before.control.incarnation >= caller.incarnation:
            self.fired["stale"] += 1
            self._log(f"ignored an Assign of {caller.name} for a pipeline that is over", "debug")
            return
        is_stage = assignment is not None and assignment.assign.drafting is None and assignment.is_ready
        if claim is not Claim.SUPERSEDES or not is_stage:
            self.fired["beside nothing"] += 1
            text = "no earlier pipeline of this head works here: there is nothing to make ready beside"
            self._commands.append(Send(caller=caller, message=Error.saying(text, cause="again")))
            return
        self._end_beside()
        self.fired["beside"] += 1
        self._log(f"{_holder(caller)} has this daemon make ready for {assign.summary}")
        self._assignments_begun += 1
        self.beside = Preparation(self._assignments_begun, caller, assign, now_s)
        self._commands.append(
            PrepareSlice(assignment_id=self._assignments_begun, caller=caller, assign=assign)
        )

    def _is_beside(self, caller: Caller) -> bool:
        """Whether a caller is of the pipeline for which something is made ready."""
        return self.beside is not None and self.beside.control.incarnation == caller.incarnation

    def _from_head_beside(self, beside: Preparation, message: Message, now_s: float) -> None:
        beside.heard_s = now_s
        if isinstance(message, Ping):
            self._commands.append(SendPong(caller=beside.control, queued=0, done=0, running_s=0.0))
        elif isinstance(message, Reset):
            self._end_beside()
        else:
            raise PeerError(f"a head for whom something is made ready says no {type(message).__name__}")

    def _worked_beside(self, beside: Preparation, result: Any) -> None:
        if isinstance(result, Loaded):
            beside.is_ready = True
            self._commands.append(SendReady(caller=beside.control, loaded=result))
        elif isinstance(result, Loading):
            self._commands.append(Send(caller=beside.control, message=result))
        else:
            caller = beside.control if isinstance(result, AskModel | AskTokens) else beside.weights
            if caller is None:
                self._fail_beside(beside, "the head's connection for weights is gone", "again")
            else:
                beside.unanswered += 1
                self._commands.append(Send(caller=caller, message=result, assignment_id=beside.number))

    def _fail_beside(self, beside: Preparation, text: str, cause: str) -> None:
        """Tells the head that it cannot be had; the pipeline that works goes on."""
        self.fired["not made ready"] += 1
        self._log(text, "error")
        self._commands.append(Send(caller=beside.control, message=Error.saying(text, cause=cause)))
        self._end_beside()

    def _end_beside(self) -> None:
        beside, self.beside = self.beside, None
        if beside is not None:
            self.fired["given up"] += not beside.is_ready
            self._commands.append(EndPreparation(assignment_id=beside.number))

    def _attach_data(self, assignment: ActiveAssignment, caller: Caller) -> None:
        assignment.data = caller
        self._commands.append(Attach(assignment_id=assignment.number, caller=caller))

    def _next_hop_message(self, event: NextHopMessageArrived) -> None:
        assignment = self.assignment
        if assignment is None or assignment.number != event.assignment_id:
            return
        if isinstance(event.message, Error):
            self._lose_next(assignment, f"refuses: {event.message.text}")
        elif not isinstance(event.message, Welcome) or assignment.next_ready:
            self._lose_next(assignment, f"said {type(event.message).__name__}, where one Welcome is expected")
        else:
            assignment.next_ready = True
            self._show_ready(assignment)

    def _next_hop_lost(self, event: NextHopLost) -> None:
        if self.assignment is not None and self.assignment.number == event.assignment_id:
            self._lose_next(self.assignment, event.text)

    def _lose_next(self, assignment: ActiveAssignment, text: str) -> None:
        self.fired["next lost"] += 1
        self._fail(f"{assignment.next_device} {text}", "next")

    def _tick(self, tick: DaemonTick, now_s: float) -> None:
        assignment, beside = self.assignment, self.beside
        if assignment is None:
            return
        if not tick.is_read:
            self.fired["held up"] += 1
            return
        if beside is not None and now_s > beside.heard_s + self.limits.lease_s:
            self._end_beside()  # its connection is gone, or the word that it is over was lost
        if self.lease.is_over(now_s):
            self.fired["lapsed"] += 1
            silent_s = self.limits.lease_s
            self._log(
                f"{_holder(assignment.control)} has been silent for {silent_s:.0f} s: it no longer holds "
                "this daemon",
                "warning",
            )
            self._end_assignment(f"no word of the head for {silent_s:.0f} s", cause="again")
        elif not assignment.next_ready and now_s > assignment.next_deadline_s:
            self.fired["next silent"] += 1
            why = f": {tick.next_trouble}" if tick.next_trouble else ""
            self._fail(
                f"{assignment.next_device} did not answer within {self.limits.link_s:.0f} s{why}", "next"
            )

    def _unsent(self, event: CommandFailed) -> None:
        assignment, beside = self.assignment, self.beside
        if beside is not None and beside.number == event.assignment_id:
            self._fail_beside(beside, "the head's connection for weights is gone", "again")
            return
        if assignment is None or assignment.number != event.assignment_id:
            return
        self.fired["unsent"] += 1
        if isinstance(event.message, Segment):
            self._fail(f"{assignment.next_device} takes no more frames", "next")
        elif isinstance(event.message, Proposed):
            pass  # a head that is gone is noticed by its lease
        elif isinstance(event.message, WeightQuestion):
            self._fail("the head's connection for weights is gone", "again")
        else:
            self._end_assignment(
                "the head's data connection is gone", cause="again"
            )  # it leaves, and does not wait for its last segments

    def _show_ready(self, assignment: ActiveAssignment) -> None:
        if assignment.loaded is not None and assignment.next_ready and not assignment.is_ready:
            assignment.is_ready = True
            self._commands.append(SendReady(caller=assignment.control, loaded=assignment.loaded))

    def _fail(self, text: str, cause: str = "") -> None:
        """Tells the head why its pipeline cannot go on, and lets go of it."""
        self._log(text, "info" if cause == "next" else "error")  # the head tells of a lost device itself
        if self.assignment is not None:
            self._commands.append(
                Send(caller=self.assignment.control, message=Error.saying(text, cause=cause))
            )
            self._end_assignment("its pipeline could not go on")

    def _end_assignment(self, reason: str, *, cause: str = "") -> None:
        """Ends the assignment; with a `cause` the head is told."""
        self._end_beside()
        assignment, self.assignment = self.assignment, None
        if assignment is None:
            return
        self.lease.release()
        if cause:
            self._commands.append(Send(caller=assignment.control, message=Error.saying(reason, cause=cause)))
        self._commands.append(
            EndAssignment(assignment_id=assignment.number, requests=tuple(assignment.core.requests()))
        )
        self._log(f"free again ({reason})")

    # ----------------------------------------------------------------------------------------- computing

    def _compute_reported(self, worked: ComputeReported, now_s: float) -> None:
        """Of an assignment that is over, what still ends counts for nothing."""
        assignment, beside, result = self.assignment, self.beside, worked.result
        if beside is not None and beside.number == worked.assignment_id:
            self._worked_beside(beside, result)
        elif assignment is None or assignment.number != worked.assignment_id:
            self.fired["late result"] += 1
        elif isinstance(result, LayersDone | LayerEnded | Proposed):
            try:
                self._step(assignment, result, now_s)
            except PeerError as error:  # of a segment that had waited in the queue
                self._fail(str(error), "again")
        elif isinstance(result, Loaded):
            assignment.loaded = result
            self._show_ready(assignment)
        elif isinstance(result, Loading):
            self._commands.append(Send(caller=assignment.control, message=result))
        else:
            assignment.unanswered += 1
            caller = assignment.control if isinstance(result, AskModel | AskTokens) else assignment.weights
            if caller is None:
                self._unsent(CommandFailed(assignment_id=assignment.number, message=result))
            else:
                self._commands.append(Send(caller=caller, message=result, assignment_id=assignment.number))

    def _compute_failed(self, event: ComputeFailed) -> None:
        assignment, beside = self.assignment, self.beside
        if beside is not None and beside.number == event.assignment_id:
            self._fail_beside(beside, event.text, "gone" if event.is_gone else "part")
        elif assignment is not None and assignment.number == event.assignment_id:
            self.fired["failed"] += 1
            is_part = event.is_part or not assignment.is_ready
            self._fail(event.text, "gone" if event.is_gone else "part" if is_part else "")

    def _step(self, assignment: ActiveAssignment, event: Any, now_s: float) -> None:
        """Gives the stage or the drafter an event of its own, and has done what it says."""
        core: Any = assignment.core
        for command in core.handle(event, now_s):
            self._pass_on(assignment, command)

    def _pass_on(self, assignment: ActiveAssignment, command: StageCommand | DrafterEvent) -> None:
        if isinstance(command, SendSegment):
            self._commands.append(SendOn(assignment_id=assignment.number, caller=None, work=command))
        elif isinstance(command, SendVerified | SendFeatures):
            if self.assignment is not assignment:
                return  # what was to be sent before it could not be
            if assignment.data is None:
                message = command.verified if isinstance(command, SendVerified) else command.features
                self._unsent(CommandFailed(assignment_id=assignment.number, message=message))
            else:
                self._commands.append(
                    SendOn(assignment_id=assignment.number, caller=assignment.data, work=command)
                )
        elif isinstance(command, Proposed):
            self._commands.append(Send(caller=assignment.control, message=command))
        elif self.assignment is assignment:
            self._commands.append(Compute(assignment_id=assignment.number, work=command))


def _holder(control: Caller) -> str:
    """The head whose connection this is, in a sentence of the daemon's log."""
    return head_called(control.name, "the head")


def core_of(assign: Assign, queued_max: int = limits.QUEUED_SEGMENTS_MAX) -> StageCore | DrafterCore:
    """The mind of what a head makes of a daemon."""
    if assign.drafting is not None:
        return DrafterCore()
    is_last = assign.stage == assign.stages - 1
    slots_max = assign.context + assign.nodes_max
    return StageCore(
        is_last=is_last,
        slots_max=slots_max,
        queued_max=queued_max,
        sliding_window=assign.sliding_window,
    )


def check_segment(assign: Assign, loaded: Loaded | None, segment: Segment, payload: Any) -> None:
    """Raises `PeerError` for a segment that this stage's slice cannot run."""
    if loaded is None or assign.drafting is not None:
        raise PeerError(
            "a segment came before the slice was loaded"
            if loaded is None
            else "a drafter takes no segments alone"
        )
    if len(segment.hops) != assign.stage:
        raise PeerError(f"expected a segment after {assign.stage} hops, got {len(segment.hops)}")
    _check_tokens(segment, loaded)
    if assign.stage == 0:
        if payload is not None:
            raise PeerError("the first stage takes tokens, but a payload came")
    elif segment.row_count:
        width = loaded.hidden_size + loaded.carried
        expected = (segment.row_count, width, ACTIVATIONS[assign.dtype])
        found = None if payload is None else (payload.rows, payload.width, payload.dtype)
        if found != expected:
            raise PeerError(f"expected a payload of {expected}, got {found}")


def check_expand(loaded: Loaded | None, message: Expand) -> None:
    """Raises `PeerError` for a job that this drafter cannot do."""
    if loaded is None:
        raise PeerError("a job came before the drafter was loaded")
    _check_tokens(message.segment, loaded)


def _check_tokens(segment: Segment, loaded: Loaded) -> None:
    most = max((token for part in segment.parts for token in part.tokens), default=0)
    if most >= loaded.vocabulary_size:
        raise PeerError(f"expected token ids below {loaded.vocabulary_size}, got {most}")


def _checked_answer(assignment: ActiveAssignment | Preparation, message: Message) -> WeightAnswer | Error:
    """An answer to one of the assignment's questions; raises `PeerError` for anything else."""
    if not isinstance(message, ModelOffer | NameList | TensorList | TensorBytes | Error):
        raise PeerError(f"a head's weights connection carries no {type(message).__name__}")
    if not assignment.unanswered:
        raise PeerError(f"a {type(message).__name__} came that nobody asked for")
    assignment.unanswered -= 1
    return message
