"""A daemon in virtual time that can crash, stop, be slow and be stuck: `core.cluster.daemon` as the runtime
drives it, with stand-ins for tensors."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from zlib import crc32

from msgspec import structs

from flowspec import __version__
from flowspec.core.cluster.daemon import (
    Attach,
    Ban,
    Caller,
    CallerBrokeProtocol,
    CallerConnected,
    CallerMessageArrived,
    CommandFailed,
    Compute,
    ComputeFailed,
    ComputeReported,
    DaemonCommand,
    DaemonCore,
    DaemonEvent,
    DaemonLimits,
    DaemonTick,
    Deliver,
    EndAssignment,
    EndPreparation,
    Gather,
    Loaded,
    NextHopLost,
    NextHopMessageArrived,
    PrepareSlice,
    Send,
    SendOn,
    SendPong,
    SendReady,
    SendWelcome,
    SliceRoom,
    StartAssignment,
    room_for,
)
from flowspec.core.driving import Driver, Log, turn
from flowspec.core.protocol.cluster_messages import (
    Arithmetics,
    AskArithmetics,
    Assign,
    Hello,
    Loading,
    Ping,
    Pong,
    Ready,
    Reset,
    Welcome,
)
from flowspec.core.protocol.messages import Expand, Proposal, Proposed, Release, Segment
from flowspec.core.protocol.types import Message
from flowspec.core.stage.events import (
    ClearSlots,
    CloseCache,
    LayerEnded,
    LayersDone,
    OpenCache,
    RunLayers,
    SendFeatures,
    SendSegment,
    SendVerified,
    Trim,
)
from flowspec.core.stage.slots import cache_size
from flowspec.core.stage.stage import StageCore
from flowspec.plan.timing import INSTANT, Curve
from flowspec.sim.clock import Clock
from flowspec.sim.device import DeviceSpec, SimulatedDevice
from flowspec.sim.drafter import FakeDrafter
from flowspec.sim.fake_layers import FakeLayers
from flowspec.sim.language import HashLanguage
from flowspec.sim.link import Frames
from flowspec.wire.codec import Envelope, Tensor, join_rows
from lab.faults.network import Connection, Network

LEASE_S = 3.0
LINK_S = 2.0
CHECK_S = 0.5
"""How often a daemon that is held looks at its deadlines."""
TRY_S = 0.002
"""What it takes to find out which arithmetics it has."""
KEPT_S = 0.001
"""How long a slice that is there already takes to load."""
SLOW = 20.0
NO_NUMBER = "the drafter computed no number"
SHORT_SLOTS = 1
"""Room that is left where memory is short: less than any conversation takes."""


Span = tuple[int, int, str]
"""Layers `[first, end)`, and the arithmetic that they are computed with."""
PLAIN = "plain"
"""The arithmetic of the language itself, which every device has that is not told otherwise."""


def spoken(language: HashLanguage, arithmetic: str) -> HashLanguage:
    """What a model says that is computed with this arithmetic: a token shows who said it."""
    return language if arithmetic in ("", PLAIN) else language.other(crc32(arithmetic.encode()))


@dataclass(eq=False, slots=True)
class _Peer(Caller):
    """A caller, and the connection that it is."""

    connection: Connection


@dataclass(slots=True)
class _Cache:
    """What a request's cache may take, and takes: it never shrinks."""

    capacity: int
    size: int = 0


@dataclass(slots=True)
class _Part:
    """What the daemon computes with, and sends to, for one assignment."""

    assignment_id: int
    assign: Assign
    core: StageCore | None
    layers: FakeLayers
    device: SimulatedDevice
    next_hop: Connection | None = None
    caches: dict[int, _Cache] = field(default_factory=dict)
    began_s: float | None = None
    """When the job that runs began (None: none runs)."""
    further_s: float = 0.0
    """When a job last got further, as it tells."""
    drafted_s: float = 0.0
    """The longest job of a drafter that has ended."""


class SimDaemon:
    """Serves one pipeline after another. `layers_max` is how many layers fit, `load_s` what a layer takes to
    load.

    While it serves `spare_layers` more fit.

    It has memory for `cache_slots` of all conversations, as it says; what needs more fails at once. `fired`
    counts the rules of its lives. Whatever is wrong with it is set from outside: what it would load
    `is_damaged`, what its drafter computes `is_numb` (no number), memory `is_short` of what one conversation
    takes, it `is_doomed` to be killed over what it loads next, it `is_locked` for everybody, it `babbles`
    where it should show life, its passes take `heat` times as long, it `is_poor` and has lost the best of its
    `arithmetics`. With a `drafter` it can be assigned that, whose jobs take as long as `drafting` says. Where
    those who speak to it may not be honest, whatever it is told is possible. Where a device `is_by_layers`,
    its curve is that of all layers of the model together.
    """

    def __init__(
        self,
        name: str,
        clock: Clock,
        network: Network,
        language: HashLanguage,
        spec: DeviceSpec,
        *,
        layers_max: int,
        cache_slots: int,
        load_s: float,
        queued_max: int,
        spare_layers: int,
        messages_max: int,
        daemons: Mapping[str, SimDaemon],
        tell: Callable[[str], None],
        is_honest: bool = True,
        drafter: FakeDrafter | None = None,
        drafting: Curve = INSTANT,
    ) -> None:
        self.name = name
        self.layers_max = layers_max
        self.cache_slots = cache_slots
        self.spare_layers = spare_layers
        self.is_up = True
        self.is_stopped = self.is_stuck = self.is_by_layers = self.has_babbled = False
        self.arithmetics: tuple[str, ...] = (PLAIN,)
        self.fired: Counter[str] = Counter()
        self.stage_fired: Counter[str] = Counter()
        self._clock = clock
        self._network = network
        self._language = language
        self._spec = spec
        self._load_s = load_s
        self._is_honest = is_honest
        self._drafter = drafter
        self._drafting = drafting
        self._limits = DaemonLimits(
            lease_s=LEASE_S, link_s=LINK_S, queued_max=queued_max, messages_max=messages_max
        )
        self._daemons = daemons
        self._tell = tell
        self._lives = 0
        self._begin()
        self.recover()

    def _begin(self) -> None:
        """A new life, with nothing."""
        self._core = DaemonCore(self._limits)
        self._driver: Driver[DaemonEvent, DaemonCommand] = Driver(self._handle, self._execute)
        self._part: _Part | None = None
        self._results: deque[Callable[[], None]] = deque()
        self._inbox: deque[tuple[Connection, Callable[[], None]]] = deque()
        self._onward: deque[Callable[[], None]] = deque()
        self._is_due = False
        self._peers: dict[int, _Peer] = {}
        self._kept: Span | None = None
        self._spare: Span | None = None
        self._preparing = 0

    @property
    def offers(self) -> tuple[str, ...]:
        """The arithmetics that it has now, the best first."""
        return self.arithmetics[1:] or self.arithmetics if self.is_poor else self.arithmetics

    @property
    def computes_with(self) -> str:
        """The arithmetic of what it holds; empty where it holds nothing."""
        return "" if self._part is None else self._part.assign.arithmetic

    @property
    def rules(self) -> Counter[str]:
        """How often each rule of holding fired, in all its lives."""
        return self.fired + self._core.fired

    @property
    def stage_rules(self) -> Counter[str]:
        """The same, of the stages that heads made of it."""
        return self.stage_fired + _fired(self._part)

    @property
    def at_work_s(self) -> tuple[float, float]:
        """For how long the pass that runs has got no further (0: none runs), and what the longest of this
        assignment's that ended took."""
        part = self._part
        if self._core.assignment is None or part is None:
            return 0.0, 0.0
        further = part.device.further
        since_s = part.further_s if self.is_stuck or further is None else further[1]
        running_s = 0.0 if part.began_s is None else self._clock.now_s - max(part.began_s, since_s)
        return running_s, max(part.device.longest_s, part.drafted_s)

    # ------------------------------------------------------------------------------------------- its faults

    def crash(self) -> None:
        """Gone with all it held, its cache, its slice and its memory of who held it."""
        self.is_up = self.is_stopped = self.is_stuck = False
        self._lives += 1
        self.fired.update(self._core.fired)
        self.stage_fired.update(_fired(self._part))
        self._begin()
        self._network.close_all(self.name)

    def start(self) -> None:
        """Runs again where it does not."""
        self.is_up = True

    def stop(self) -> None:
        self.is_stopped = self.is_up

    def go_on(self) -> None:
        """What came in the meantime is taken now."""
        self.is_stopped = False
        self._is_due = True
        self._turn()

    def be_slow(self, times: float) -> None:
        """Passes of the assignment that is take so many times as long, from the next layer or draft on; 1 is
        as before."""
        self._times = times
        if self._part is not None:
            self._part.device.spec = self._spec_at(self._part.assign, times)

    def be_hot(self, times: float) -> None:
        """The same, for later assignments as well."""
        self.heat = times
        self.be_slow(times)

    def recover(self) -> None:
        """Nothing is wrong with it any more, but what went wrong already."""
        self.is_damaged = self.is_short = self.is_doomed = self.is_locked = False
        self.babbles = self.is_numb = self.is_poor = False
        self.be_hot(1.0)

    def _spec_at(self, assign: Assign, times: float) -> DeviceSpec:
        share = (assign.end_layer - assign.first_layer) / assign.layer_count if self.is_by_layers else 1.0
        return replace(self._spec, curve=self._spec.curve.scaled(times * share))

    def hang(self) -> None:
        """The pass that runs, or the next one, never ends."""
        self._note_further()
        self.is_stuck = True

    def _fail(self, assignment_id: int, text: str, *, is_part: bool = True) -> None:
        """A job fails at once."""
        failed = ComputeFailed(assignment_id=assignment_id, text=text, is_part=is_part)
        self._later(0.0, self._results, lambda: self._give(failed))

    def _report(self, assignment_id: int, result: Any) -> None:
        self._give(ComputeReported(assignment_id=assignment_id, result=result))

    def _later(self, after_s: float, queue: deque[Callable[[], None]], action: Callable[[], None]) -> None:
        """Something waits on a queue then, if the daemon lives until then."""
        life = self._lives

        def wait() -> None:
            if life == self._lives:
                self._put(queue, action)

        self._clock.at(self._clock.now_s + after_s, wait)

    # ------------------------------------------------------------------------------------------------- loop

    def _put(self, queue: deque[Any], item: Any) -> None:
        """Something came, or was done: it is taken at once by a process that runs."""
        if self.is_up:
            queue.append(item)
            if not self.is_stopped:
                self._turn()

    def _turn(self) -> None:
        """A turn of the daemon's loop, and soon another where something was left over."""
        if not self.is_up or self.is_stopped:
            return
        life = self._lives
        is_read = turn(self._take_result, self._take_message, self._look, self._limits.messages_max)
        if not is_read and life == self._lives and (self._inbox or self._is_due):
            self._clock.at(self._clock.now_s, lambda: self._turn() if life == self._lives else None)

    def _take_result(self) -> bool:
        if self._results:
            self._results.popleft()()
            return True
        return False

    def _take_message(self) -> bool:
        if self._inbox:
            self._inbox.popleft()[1]()
            return True
        return False

    def _look(self, is_read: bool) -> None:
        """What the next hop said; and now and then the time."""
        while self._onward:
            self._onward.popleft()()
        if not self._is_due:
            return
        self._is_due = not is_read
        self._note_further()
        assignment, lapsed = self._core.assignment, self._core.fired["lapsed"]
        assign = None if assignment is None else assignment.assign
        is_known = (
            assign is None or not assign.next_hop or self._network.is_resolved(self.name, assign.next_name)
        )
        trouble = "" if is_known or assign is None else f"{assign.next_name}: no such name"
        self._give(DaemonTick(next_trouble=trouble, is_read=is_read))
        if assignment is not None and self._core.fired["lapsed"] > lapsed:
            unread = [line for line, _ in self._inbox if self._peers.get(id(line)) is assignment.control]
            assert not unread, f"{self.name} lets its head's lease lapse, though words of it wait to be read"

    def _note_further(self) -> None:
        """How far the pass that runs has come by now."""
        part = self._part
        if (
            part is None
            or self.is_stuck
            or (further := part.device.further) is None
            or further[1] <= part.further_s
        ):
            return
        job, part.further_s = further
        self._report(part.assignment_id, LayerEnded(job=job, at_s=part.further_s))

    # -------------------------------------------------------------------------------------------- messages

    def refuse(self, connection: Connection, text: str) -> None:
        """What came on a connection is no message."""
        self._put(self._inbox, (connection, lambda: self._refuse(connection, text)))

    def _refuse(self, connection: Connection, text: str) -> None:
        if (caller := self._peers.get(id(connection))) is not None:  # else a stranger, who is not listened to
            self._give(CallerBrokeProtocol(caller=caller, text=text))

    def take(self, connection: Connection, envelope: Envelope, frames: Frames) -> None:
        """A message of a head or of the stage before."""
        del frames
        self._put(self._inbox, (connection, lambda: self._take(connection, envelope)))

    def _take(self, connection: Connection, envelope: Envelope) -> None:
        message = envelope.message
        known = self._peers.get(id(connection))
        if known is not None and (envelope.incarnation != known.incarnation or isinstance(message, Hello)):
            assert not self._is_honest, "Hello came twice, or another incarnation on an open connection"
            self._give(
                CallerBrokeProtocol(caller=known, text="it says Hello twice, or is of another session")
            )
        elif isinstance(message, Hello):
            peer = self._peers[id(connection)] = _Peer(
                message.name, message.role, envelope.incarnation, connection
            )
            self._give(CallerConnected(caller=peer))
        elif known is not None:  # else its Hello came when nobody was there to hear it
            if isinstance(message, Ping):
                self._note_further()
            tensor = envelope.tensor
            size = 0 if tensor is None else len(tensor.data)
            self._give(
                CallerMessageArrived(caller=known, message=message, payload=tensor, payload_bytes=size)
            )

    def _give(self, event: DaemonEvent) -> None:
        """Gives the core an event, and has done what it says."""
        self._driver.give(event)
        self._validate_caches()

    def _handle(self, event: DaemonEvent) -> list[DaemonCommand]:
        commands = self._core.handle(event, self._clock.now_s)
        self._core.validate(is_honest=self._is_honest)
        return commands

    def _validate_caches(self) -> None:
        """A slice that runs nothing holds what the core believes."""
        assignment, part = self._core.assignment, self._part
        if (
            assignment is not None
            and part is not None
            and assignment.number == part.assignment_id
            and part.device.is_idle
        ):
            core = assignment.core
            if isinstance(core, StageCore) and part.began_s is None:
                part.layers.validate(part.assign.stage, core)

    def _execute(self, command: DaemonCommand) -> None:
        if isinstance(command, Log):
            self._tell(command.text)
        elif isinstance(command, SendWelcome):
            welcome = Welcome(
                name=self.name,
                version=__version__,
                device="cpu",
                pid=1,
                memory_bytes=1,
                count=0,
                holder=command.holder,
                lease_s=command.lease_s,
            )
            self._send(command.caller, welcome)
        elif isinstance(command, Send):
            message = command.message
            if self.babbles and isinstance(message, Proposed):
                message = self._nonsense(message)
            if not self._send(command.caller, message) and command.assignment_id:
                self._driver.give(CommandFailed(assignment_id=command.assignment_id, message=command.message))
        elif isinstance(command, SendOn):
            self._send_on(command)
        elif isinstance(command, SendPong):
            running_s, arrived = command.running_s, command.arrived
            pong = Pong(
                queued=command.queued, done=command.done, memory_bytes=0, running_s=running_s, arrived=arrived
            )
            is_nonsense = self.babbles and self._drafter is None  # of a drafter what it proposes is
            self._send(command.caller, Reset() if is_nonsense else pong)
        elif isinstance(command, SendReady):
            slots, load_s = command.loaded.cache_slots, command.loaded.load_s
            ready = Ready(weight_bytes=1, memory_bytes=1, cache_slots=slots, load_s=load_s)
            self._send(command.caller, ready)
        elif isinstance(command, StartAssignment):
            self._start_assignment(command)
        elif isinstance(command, PrepareSlice):
            self._prepare(command)
        elif isinstance(command, EndPreparation):
            self._preparing = 0
        elif isinstance(command, Compute):
            if self._part is not None and self._part.assignment_id == command.assignment_id:
                self._compute(self._part, command.work)
        elif isinstance(command, EndAssignment):
            part, self._part = self._part, None
            self.stage_fired.update(_fired(part))
            if part is not None and part.next_hop is not None:
                self._network.close(part.next_hop, by=self.name)
        elif isinstance(command, Ban):
            self._send(command.caller, command.error)
            self._peers = {key: peer for key, peer in self._peers.items() if peer is not command.caller}
        elif isinstance(command, Gather) and isinstance(command.question, AskArithmetics):
            told = Arithmetics(dtype=command.question.dtype, names=self.offers)
            self._later(TRY_S, self._results, lambda: self._tell_back(command.caller, told))
        else:
            is_expected = isinstance(command, Attach) or (
                not self._is_honest and isinstance(command, Deliver | Gather)
            )
            assert is_expected, f"nobody here does {type(command).__name__}"

    def _send(self, caller: Caller, message: Message, tensor: Tensor | None = None) -> bool:
        """Whether the connection was there; what is on its way may still be lost with it."""
        assert isinstance(caller, _Peer), "every caller is a connection"
        caller.connection.send(self.name, message, tensor)
        return caller.connection.is_open

    def _tell_back(self, caller: Caller, told: Arithmetics) -> None:
        self._send(caller, told)

    def _send_on(self, command: SendOn) -> None:
        part, work = self._part, command.work
        if part is None or part.assignment_id != command.assignment_id:
            return
        message: Message
        if isinstance(work, SendSegment):
            assert part.next_hop is not None, "a stage that is ready has its next hop"
            has_rows = work.payload is not None and work.rows
            part.next_hop.send(self.name, work.segment, work.payload.select(work.rows) if has_rows else None)
            return
        message, tensor = work.verified if isinstance(work, SendVerified) else work.features, None
        if isinstance(work, SendFeatures):
            tensor = join_rows([(row,) for row in work.rows])
        assert command.caller is not None, "the head is told"
        if not self._send(command.caller, message, tensor):
            self._driver.give(CommandFailed(assignment_id=command.assignment_id, message=message))

    # --------------------------------------------------------------------------------------------- holding

    def _start_assignment(self, command: StartAssignment) -> None:
        assign, assignment_id, life = command.assign, command.assignment_id, self._lives
        count = assign.end_layer - assign.first_layer
        span = (assign.first_layer, assign.end_layer, assign.arithmetic)
        taken = self._core.assignment
        core = None if taken is None else taken.core
        is_able, is_last = assign.arithmetic in ("", *self.offers), not assign.next_hop
        language = spoken(self._language, assign.arithmetic if is_able else "")
        layers = FakeLayers(
            assign.stages, language, sliding_window=assign.sliding_window, is_honest=self._is_honest
        )
        device = SimulatedDevice(
            self._clock,
            self._spec_at(assign, self.heat),
            assign.stage,
            layers,
            is_last,
            lambda done: self._done(life, assignment_id, done),
            captures=assign.captured,
        )
        part = self._part = _Part(
            assignment_id, assign, core if isinstance(core, StageCore) else None, layers, device
        )
        self._times = self.heat
        if assign.next_hop and assign.next_name not in self._daemons:
            assert not self._is_honest, f"there is no device {assign.next_name}"
            lost = NextHopLost(assignment_id=assignment_id, text="cannot be dialled: no such name")
            self._later(0.0, self._onward, lambda: self._give(lost))
        elif assign.next_hop:
            part.next_hop = self._dial(assignment_id, assign, command.caller.incarnation)
        if assign.drafting is not None and self._drafter is not None:
            self._drafter.restart()
        is_known = assign.dtype == "float32" and (assign.drafting is None or self._drafter is not None)
        if not is_known:
            assert not self._is_honest, f"a head assigns {assign.summary}"
            self._fail(assignment_id, f"no {assign.summary} here")
        elif not is_able:
            assert not self._is_honest or self.is_poor, f"{assign.arithmetic} is assigned, which it lacks"
            self._fail(assignment_id, f"no arithmetic {assign.arithmetic} here")
        elif count > self.layers_max:
            self._fail(assignment_id, f"{count} layers do not fit here")
        else:
            self._preparing = 0
            lacking = 0 if self._has(span) else self._lacking(span)
            for layer in range(1, lacking):
                tell = partial(self._layer_loaded, assignment_id, layer / lacking)
                self._later(self._load_s * layer, self._results, tell)
            load_s = self._load_s * lacking if lacking else KEPT_S
            self._later(load_s, self._results, lambda: self._loaded(assignment_id, span))
        self._check_later(assignment_id)

    def _dial(self, assignment_id: int, assign: Assign, incarnation: int) -> Connection:
        other = self._daemons[assign.next_name]

        def hear(event: DaemonEvent) -> None:
            self._put(self._onward, lambda: self._give(event))

        def lose(text: str) -> None:
            hear(NextHopLost(assignment_id=assignment_id, text=text))

        def take(connection: Connection, envelope: Envelope, frames: Frames) -> None:
            del connection, frames
            hear(NextHopMessageArrived(assignment_id=assignment_id, message=envelope.message))

        found = self._network.connect(
            self.name,
            other.name,
            "stage",
            incarnation,
            {self.name: take, other.name: other.take},
            {self.name: lambda: lose("was lost: its connection closed")},
            {self.name: lambda _, text: lose(f"broke the protocol: {text}"), other.name: other.refuse},
        )
        found.send(self.name, Hello(name=self.name, version=__version__, role="stage"))
        return found

    def _has(self, span: Span) -> bool:
        """Whether these layers are in memory, as one slice."""
        return span in (self._kept, self._spare)

    def _lacking(self, span: Span) -> int:
        """How many of these layers are not in memory, ready for their arithmetic."""
        first, end, arithmetic = self._kept or (0, 0, "")
        kept = range(first, end) if arithmetic == span[2] else range(0)
        return len(set(range(*span[:2])) - set(kept))

    def _layer_loaded(self, assignment_id: int, share: float) -> None:
        if not self.is_stuck:
            self._report(assignment_id, Loading(doing="loading", share=share))

    def _loaded(self, assignment_id: int, span: Span) -> None:
        if self._may_load(assignment_id, span):
            self._kept, self._spare = span, None
            self._report(assignment_id, self._result())

    def _may_load(self, assignment_id: int, span: Span) -> bool:
        """Whether loading comes to an end, and a good one."""
        if self.is_stuck:
            return False
        if self.is_damaged and not self._has(span):
            self._give(ComputeFailed(assignment_id=assignment_id, text="a tensor differs from the head's"))
            return False
        if self.is_doomed and not self._has(span):
            self._tell("is killed: out of memory")
            self.crash()
            return False
        return True

    def _result(self, load_s: float = 0.0) -> Loaded:
        slots = SHORT_SLOTS if self.is_short else self.cache_slots
        return Loaded(
            weight_bytes=1,
            cache_slots=slots,
            received_bytes=0,
            hidden_size=1,
            vocabulary_size=self._language.vocabulary_size,
            reused=False,
            load_s=load_s,
        )

    def _prepare(self, command: PrepareSlice) -> None:
        """Loads what it lacks of another slice beside the one that it runs, or only fetches it."""
        assign, assignment_id = command.assign, command.assignment_id
        span = (assign.first_layer, assign.end_layer, assign.arithmetic)
        self._preparing, self._spare = assignment_id, None
        own = 0 if self._kept is None else self._kept[1] - self._kept[0]
        lacking = self._lacking(span)
        kept = span[1] - span[0] - lacking
        free = min(self.layers_max - own, self.spare_layers)
        given_up = self.layers_max - kept - free  # what it does not keep, and the caches
        room = room_for(new=lacking, cache=0, free=free, growth=0, given_up=given_up)
        if room is SliceRoom.NONE or assign.dtype != "float32":
            self._fail(assignment_id, f"{assign.summary} do not fit here")
            return

        def made() -> None:
            if self._preparing != assignment_id or not self._may_load(assignment_id, span):
                return
            if room is SliceRoom.BESIDE:
                self._spare = span
            later_s = 0.0 if room is SliceRoom.BESIDE else self._load_s * lacking
            self._report(assignment_id, self._result(later_s))

        self._later(self._load_s * lacking, self._results, made)

    def _check_later(self, assignment_id: int) -> None:
        """Deadlines are looked at now and then, as long as the assignment lasts."""
        life = self._lives

        def check() -> None:
            if life == self._lives and self._core.number == assignment_id:
                self._is_due = True
                self._turn()
                self._check_later(assignment_id)

        self._clock.at(self._clock.now_s + CHECK_S, check)

    # ------------------------------------------------------------------------------------------- computing

    def _done(self, life: int, assignment_id: int, done: LayersDone) -> None:
        """A pass ends: that of an earlier life tells nobody, though its assignment may have had the same
        number."""
        if self.is_stuck or life != self._lives:
            return

        def tell() -> None:
            if self._part is not None and self._part.assignment_id == assignment_id:
                self._part.began_s = None
            self._report(assignment_id, done)

        self._put(self._results, tell)

    def _compute(self, part: _Part, work: Any) -> None:
        if isinstance(work, RunLayers):
            part.began_s = self._clock.now_s
            if not self._reserve(part, work):
                self._fail(part.assignment_id, "no room for these caches")
                return
            part.device.run(work)
        elif isinstance(work, Trim):
            if not part.device.is_idle:  # of a stopped process the job may be done while nobody was told
                part.device.trim(work)
        elif isinstance(work, Expand):
            self._draft(part, work)
        elif isinstance(work, Release):
            assert self._drafter is not None, "no drafter here"
            self._drafter.release(work)
        else:
            assert isinstance(work, OpenCache | ClearSlots | CloseCache), (
                f"nobody here does {type(work).__name__}"
            )
            if isinstance(work, OpenCache):
                part.caches[work.request] = _Cache(work.slots)
            elif isinstance(work, CloseCache):
                del part.caches[work.request]
            part.device.change_cache(work)

    def _draft(self, part: _Part, work: Expand) -> None:
        """What is proposed depends on the order of jobs and releases alone: it is made at once, and told when
        the job is done."""
        assert self._drafter is not None, "no drafter here"
        life, segment = self._lives, work.segment
        context = sum(min(each.positions, default=0) for each in segment.parts)
        if self.is_numb:
            self._fail(part.assignment_id, NO_NUMBER, is_part=False)
            return
        seconds = self._drafting.seconds(segment.row_count, context) * self._times
        proposals = (
            self._drafter.draft(segment, work.width)
            if self._is_honest
            else wild_proposals(segment, work.width)
        )
        part.began_s = self._clock.now_s

        def tell() -> None:
            if self._part is part:
                part.began_s, part.drafted_s = None, max(part.drafted_s, seconds)
            proposed = Proposed(job=segment.segment, proposals=proposals, compute_s=seconds)
            self._report(part.assignment_id, proposed)

        def done() -> None:
            if not self.is_stuck and life == self._lives:
                self._put(self._results, tell)

        self._clock.at(self._clock.now_s + seconds, done)

    def _nonsense(self, answer: Proposed) -> Proposed:
        """In its place: an answer to another job, or with a token that the target lacks."""
        self.has_babbled = True
        if answer.job % 2:
            return structs.replace(answer, job=answer.job + 1)
        lacking = Proposal(
            request=0, epoch=0, node=0, tokens=(self._language.vocabulary_size,), confidences=(0.5,)
        )
        return structs.replace(answer, proposals=(*answer.proposals, lacking))

    def _reserve(self, part: _Part, job: RunLayers) -> bool:
        """As `model.slice.Slice` does before it runs a job: whether there is memory for it, as there is for
        all that an honest head asks."""
        for each in job.parts:
            cache = part.caches[each.request]
            cache.size = max(cache.size, cache_size(len(each.key_positions), cache.capacity))
        taken = sum(cache.size for cache in part.caches.values())
        has_room = taken <= self.cache_slots
        assert has_room or not self._is_honest, (
            f"{self.name} has memory for {self.cache_slots} cache slots, {taken} are needed"
        )
        return has_room


def wild_proposals(segment: Segment, width: int) -> tuple[Proposal, ...]:
    """What a drafter might make of any job, of a head that may not be honest."""
    return tuple(
        Proposal(
            request=part.commit.request,
            epoch=part.commit.epoch,
            node=node,
            tokens=tuple(range(width)),
            confidences=(1 / width,) * width,
        )
        for part in segment.parts
        for node in part.ids
    )


def _fired(part: _Part | None) -> Counter[str]:
    """How often each rule of a stage fired."""
    return Counter() if part is None or part.core is None else part.core.fired
