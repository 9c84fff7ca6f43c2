"""A daemon in virtual time that can crash, stop, be slow and be stuck: the runtime's rules of holding, around the real `StageCore`.

Whether a claim is granted and what is fenced is `core.incarnation.Lease`'s decision here as there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from flowspec import __version__
from flowspec.core import limits
from flowspec.core.cluster_messages import Assign, Error, Hello, Ping, Pong, Ready, Reset, Welcome
from flowspec.core.events import (
    ClearSlots,
    CloseCache,
    ControlArrived,
    LayersDone,
    OpenCache,
    RunLayers,
    SegmentArrived,
    SendSegment,
    StageEvent,
    Trim,
)
from flowspec.core.incarnation import Claim, Lease
from flowspec.core.messages import Commit, Open, Release, Segment
from flowspec.core.slots import cache_size
from flowspec.core.stage import StageCore
from flowspec.sim.clock import Clock
from flowspec.sim.device import Device, DeviceSpec
from flowspec.sim.fake_layers import FakeLayers
from flowspec.sim.faults.network import Connection, Network
from flowspec.sim.language import Language
from flowspec.sim.link import Frames
from flowspec.wire.codec import Envelope, Tensor

LEASE_S = 3.0
CHECK_S = 0.5
LINK_S = 2.0
SLOW = 20.0
BUSY_RETRY_S = 0.5


@dataclass(slots=True)
class _Cache:
    """What a request's cache may take, and takes: it never shrinks."""

    capacity: int
    size: int = 0


@dataclass(slots=True)
class _Hold:
    """The pipeline that holds the daemon; as `runtime.hold.Hold`, with stand-ins for tensors."""

    control: Connection
    assign: Assign
    core: StageCore
    device: Device
    is_loaded: bool = False
    next_hop: Connection | None = None
    is_next_ready: bool = False
    data: Connection | None = None
    caches: dict[int, _Cache] = field(default_factory=dict)


class SimDaemon:
    """Serves one pipeline after another. `layers_max` is how many layers fit, `load_s` what a layer takes to load.

    It has memory for `cache_slots` of all conversations, as it says; what needs more fails at once.
    """

    def __init__(
        self,
        name: str,
        clock: Clock,
        network: Network,
        language: Language,
        spec: DeviceSpec,
        *,
        layers_max: int,
        cache_slots: int,
        load_s: float,
        queued_max: int,
        daemons: dict[str, SimDaemon],
        tell: Callable[[str], None],
    ) -> None:
        self.name = name
        self.layers_max = layers_max
        self.cache_slots = cache_slots
        self.is_up = True
        self.is_stopped = False
        self.is_stuck = False
        self.lease = Lease(LEASE_S)
        self._clock = clock
        self._network = network
        self._language = language
        self._spec = spec
        self._load_s = load_s
        self._queued_max = queued_max
        self._daemons = daemons
        self._tell = tell
        self._hold: _Hold | None = None
        self._data: dict[int, Connection] = {}
        self._backlog: list[Callable[[], None]] = []
        self._kept: tuple[int, int] | None = None
        self._lives = 0

    @property
    def core(self) -> StageCore | None:
        return None if self._hold is None else self._hold.core

    @property
    def at_work_s(self) -> tuple[float, float]:
        """How long the pass that runs has been running (0: none does), and the longest of this hold's that ended took."""
        hold = self._hold
        return (0.0, 0.0) if hold is None else (hold.core.running_s(self._clock.now_s), hold.device.longest_s)

    # ------------------------------------------------------------------------------------------- its faults

    def crash(self) -> None:
        """Gone with all it held, its cache, its slice and its memory of who held it."""
        self.is_up = self.is_stopped = self.is_stuck = False
        self._lives += 1
        self._hold, self._kept = None, None
        self._data.clear()
        self._backlog.clear()
        self._network.close_all(self.name)

    def start(self) -> None:
        """Begins anew where it does not run."""
        if not self.is_up:
            self.is_up = True
            self.lease = Lease(LEASE_S)

    def stop(self) -> None:
        self.is_stopped = self.is_up

    def go_on(self) -> None:
        """What came in the meantime is taken now, in order."""
        self.is_stopped = False
        backlog, self._backlog = self._backlog, []
        for each in backlog:
            each()
        self._check()

    def be_slow(self, is_slow: bool) -> None:
        curve = self._spec.curve.scaled(SLOW) if is_slow else self._spec.curve
        if self._hold is not None:
            self._hold.device.spec = replace(self._spec, curve=curve)

    def _do(self, action: Callable[[], None]) -> None:
        """Now, or when a stopped process goes on; never in a later life."""
        life = self._lives

        def act() -> None:
            if life == self._lives and self.is_up:
                if self.is_stopped:
                    self._backlog.append(act)
                else:
                    action()

        act()

    def _later(self, after_s: float, action: Callable[[], None]) -> None:
        life = self._lives
        self._clock.at(self._clock.now_s + after_s, lambda: self._do(action) if life == self._lives else None)

    # -------------------------------------------------------------------------------------------- messages

    def take(self, connection: Connection, envelope: Envelope, frames: Frames) -> None:
        """A message of a head or of the stage before."""
        del frames
        self._do(lambda: self._take(connection, envelope))

    def _take(self, connection: Connection, envelope: Envelope) -> None:
        message, hold = envelope.message, self._hold
        if isinstance(message, Hello):
            self._welcome(connection, message)
        elif isinstance(message, Assign):
            self._assign(connection, message)
        elif hold is None or not self.lease.admits(envelope.incarnation):
            if not isinstance(message, Ping | Reset):
                self._tell(f"ignores a {type(message).__name__} of generation {envelope.incarnation & 0xFFFF}")
        elif isinstance(message, Segment):
            self._step(hold, SegmentArrived(segment=message, payload=envelope.tensor, received_s=self._clock.now_s))
        else:
            self.lease.renew(self._clock.now_s)
            if isinstance(message, Ping):
                running_s = hold.core.running_s(self._clock.now_s)
                connection.send(self.name, Pong(queued=hold.core.queued, done=hold.core.done, memory_bytes=0, running_s=running_s))
            elif isinstance(message, Reset):
                self._let_go("its head is done")
            else:
                assert isinstance(message, Open | Commit | Release)
                self._step(hold, ControlArrived(message=message))

    def _welcome(self, connection: Connection, hello: Hello) -> None:
        if hello.role == "head-data":
            self._data[connection.incarnation] = connection
            if self._hold is not None and self.lease.admits(connection.incarnation):
                self._hold.data = connection
        connection.send(self.name, Welcome(name=self.name, version=__version__, device="cpu", pid=1, memory_bytes=1, count=0))

    def _assign(self, connection: Connection, assign: Assign) -> None:
        claim = self.lease.claim(connection.incarnation)
        if claim is Claim.STALE:
            self._tell("ignores a stale Assign")
            return
        if claim is Claim.HELD:
            connection.send(self.name, Error(text="held by another head", retry_after_s=BUSY_RETRY_S))
            return
        if claim is Claim.SUPERSEDES:
            self._let_go("superseded")
        count = assign.end_layer - assign.first_layer
        if count > self.layers_max:
            self._tell(f"refuses {count} layers")
            connection.send(self.name, Error(text=f"{count} layers do not fit here", cause="part"))
            return
        self.lease.take(connection.incarnation, self._clock.now_s)
        is_last = assign.stage == assign.stages - 1
        core = StageCore(
            is_last=is_last,
            slots_max=assign.context + limits.TREE_NODES_MAX,
            returns_features=bool(assign.captures) and is_last,
            queued_max=self._queued_max,
        )
        layers = FakeLayers(assign.stages, self._language)
        hold = _Hold(
            connection, assign, core, Device(self._clock, self._spec, assign.stage, layers, is_last, lambda done: self._done(hold, done))
        )
        hold.data = self._data.get(connection.incarnation)
        self._hold = hold
        if is_last:
            hold.is_next_ready = True
        else:
            self._dial(hold)
        span = (assign.first_layer, assign.end_layer)
        self._later(0.001 if self._kept == span else self._load_s * count, lambda: self._loaded(hold, span))
        self._later(CHECK_S, self._check)

    def _dial(self, hold: _Hold) -> None:
        other = self._daemons[hold.assign.next_name]

        def lost() -> None:
            self._do(lambda: self._next_lost(hold))

        take = {self.name: lambda connection, envelope, frames: self._do(lambda: self._next_ready(hold, envelope)), other.name: other.take}
        hold.next_hop = self._network.connect(self.name, other.name, "stage", hold.control.incarnation, take, {self.name: lost})
        hold.next_hop.send(self.name, Hello(name=self.name, version=__version__, role="stage"))
        self._later(LINK_S, lambda: None if hold.is_next_ready else self._next_lost(hold))

    def _next_ready(self, hold: _Hold, envelope: Envelope) -> None:
        assert isinstance(envelope.message, Welcome)
        hold.is_next_ready = True
        self._ready(hold)

    def _next_lost(self, hold: _Hold) -> None:
        if hold is self._hold:
            hold.control.send(self.name, Error(text=f"the next device {hold.assign.next_name} was lost", cause="next"))
            self._let_go("the next device was lost")

    def _loaded(self, hold: _Hold, span: tuple[int, int]) -> None:
        if hold is self._hold and not self.is_stuck:
            self._kept = span
            hold.is_loaded = True
            self._ready(hold)

    def _ready(self, hold: _Hold) -> None:
        if hold is self._hold and hold.is_loaded and hold.is_next_ready:
            hold.control.send(self.name, Ready(weight_bytes=1, memory_bytes=1, cache_slots=self.cache_slots))

    def _check(self) -> None:
        hold = self._hold
        if hold is None:
            return
        if self.lease.is_over(self._clock.now_s):
            hold.control.send(self.name, Error(text=f"no word of the head for {LEASE_S:.0f} s", cause="again"))
            self._let_go("the head is silent")
        else:
            self._later(CHECK_S, lambda: self._check() if hold is self._hold else None)

    def _let_go(self, reason: str) -> None:
        hold, self._hold = self._hold, None
        self.lease.release()
        if hold is not None:
            self._tell(f"lets go of generation {hold.control.incarnation & 0xFFFF}: {reason}")
            if hold.next_hop is not None:
                self._network.close(hold.next_hop, by=self.name)

    # ------------------------------------------------------------------------------------------- computing

    def _done(self, hold: _Hold, done: LayersDone) -> None:
        if not self.is_stuck:
            self._do(lambda: self._step(hold, done))

    def _step(self, hold: _Hold, event: StageEvent) -> None:
        """Of a hold that is over, what still ends counts for nothing."""
        if hold is not self._hold:
            return
        for command in hold.core.handle(event, self._clock.now_s):
            if isinstance(command, RunLayers):
                self._reserve(hold, command)
                hold.device.run(command)
            elif isinstance(command, Trim):
                if not hold.device.is_idle:  # of a stopped process the job may be done while nobody was told
                    hold.device.trim(command)
            elif isinstance(command, OpenCache | ClearSlots | CloseCache):
                if isinstance(command, OpenCache):
                    hold.caches[command.request] = _Cache(command.slots)
                elif isinstance(command, CloseCache):
                    del hold.caches[command.request]
                hold.device.change_cache(command)
            else:
                payload: Tensor | None = command.payload
                tensor = payload.select(command.rows) if payload is not None and command.rows else None
                onward = hold.next_hop if isinstance(command, SendSegment) else hold.data
                message = command.segment if isinstance(command, SendSegment) else command.verified
                if onward is not None:
                    onward.send(self.name, message, tensor)

    def _reserve(self, hold: _Hold, job: RunLayers) -> None:
        """As `model.slice.Slice` does before it runs a job."""
        for part in job.parts:
            cache = hold.caches[part.request]
            cache.size = max(cache.size, cache_size(len(part.key_positions), cache.capacity))
        taken = sum(cache.size for cache in hold.caches.values())
        assert taken <= self.cache_slots, f"{self.name} has memory for {self.cache_slots} cache slots, {taken} are needed"
