"""The daemon: one process per device, one port, one stage or one drafter of whichever head holds it.

What it decides is `core.cluster.daemon`'s; here are its sockets, its threads and its clock. A poller thread
owns the sockets and the core; a compute thread owns the tensors. Peers (a head's control and data
connections, the previous stage) announce themselves with Hello. A peer that breaks the protocol is logged and
ignored from then on; the daemon keeps serving.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from types import FrameType
from typing import Any

import psutil
import zmq

from flowspec.checking import BrokenCoreError, check, is_on
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
    DaemonStopping,
    DaemonTick,
    Deliver,
    EndAssignment,
    EndPreparation,
    Gather,
    NextHopLost,
    NextHopMessageArrived,
    PrepareSlice,
    Send,
    SendOn,
    SendPong,
    SendReady,
    SendWelcome,
    StartAssignment,
)
from flowspec.core.driving import Driver, Log, turn
from flowspec.core.protocol import limits
from flowspec.core.protocol.cluster_messages import Error, Pong, Ready, Welcome
from flowspec.core.protocol.types import Message
from flowspec.core.stage.events import (
    CloseCache,
    LayerEnded,
    SendFeatures,
    SendSegment,
    SendVerified,
    Trim,
)
from flowspec.errors import InputError, NoRoomError, PeerError, UnexpectedError
from flowspec.host_memory import host_memory
from flowspec.plan.memory import mib
from flowspec.runtime import timeouts
from flowspec.runtime.compute import ComputeThread, Result, WorkFailed, unexpected
from flowspec.runtime.device.board import Thermometer
from flowspec.runtime.device.report import Reporter
from flowspec.runtime.emulation import DeviceEmulation, Shaper
from flowspec.runtime.heap import share_one_heap
from flowspec.runtime.machine import Machine
from flowspec.runtime.next_hop import NextHop
from flowspec.runtime.peers import Peer, Peers
from flowspec.runtime.port import Port
from flowspec.runtime.security.keyring import Keyring
from flowspec.runtime.transport import Sender, Wake, end_context, poll_timeout_ms, ready_sources
from flowspec.version import __version__
from flowspec.wire.codec import decode, join_rows

log = logging.getLogger("flowspec.daemon")


IDLE_POLL_MS = 60_000
HELD_POLL_MS = 500
"""While a head holds the daemon, deadlines are checked at least this often."""


class Daemon:
    """Serves one head after another until `stop`; `run` blocks. With an `emulation` it takes that device's
    time.

    With `keys` it serves those that they list; without, it listens beyond loopback only if it is `insecure`.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int,
        name: str,
        machine: Machine,
        lifeline_fd: int | None = None,
        emulation: DeviceEmulation | None = None,
        keys: Keyring | None = None,
        insecure: bool = False,
    ) -> None:
        share_one_heap()
        self.name = name
        self.machine = machine
        self._context: zmq.Context[Any] = zmq.Context()
        self._keys = keys
        self._port = Port(self._context, host, port, keys, insecure=insecure)
        self.host, self.port = host, self._port.number
        self._wake = Wake()
        self._lifeline_fd = lifeline_fd
        self._compute = ComputeThread(machine, self._wake, emulation)
        self._emulation = emulation
        self._reporter = Reporter(machine, keys, self._wake)
        self._thermometer = Thermometer()
        self._peers = Peers(self._port.router, name)
        self._poller = zmq.Poller()
        self._core = DaemonCore(DaemonLimits(lease_s=timeouts.LEASE_S, link_s=timeouts.LINK_S))
        self._driver: Driver[tuple[DaemonEvent, float], DaemonCommand] = Driver(self._handle, self._do)
        self._now_s = 0.0
        self._further = self._compute.further
        self._next: NextHop | None = None
        self._shape: Shaper | None = None
        self._shape_to_head: Shaper | None = None
        self._data: Sender | None = None
        self._last_sent: dict[bool, Message] = {}  # whether to the head, else to the next hop
        self._stopping = ""
        self._is_checked = is_on()
        self._broken: BrokenCoreError | None = None

    def stop(self, reason: str) -> None:
        """Ends `run` soon; safe to call from a signal handler."""
        self._stopping = reason
        self._wake.set()

    def stop_on_signals(self) -> None:
        def handler(number: int, frame: FrameType | None) -> None:
            self.stop(signal.Signals(number).name)

        self._wake.on_signals()
        signal.signal(signal.SIGINT, handler)
        signal.signal(signal.SIGTERM, handler)

    def run(self) -> None:
        """Serves until `stop`; raises `BrokenCoreError` where `--check` finds the core's state wrong."""
        trust = "no keys" if self._keys is None else f"for {', '.join(self._keys.heads)}"
        where = f"{self.host}:{self.port} (FlowSpec {__version__}, pid {os.getpid()}, {trust})"
        log.info("%s listens on %s, idle until a head assigns it layers", self.name, where)
        sources = [*self._port.sources, self._wake.read_fd]
        for source in sources if self._lifeline_fd is None else [*sources, self._lifeline_fd]:
            self._poller.register(source, zmq.POLLIN)
        self._compute.claims.join()
        try:
            while not self._stopping:
                self._turn()
        finally:
            self._give(DaemonStopping(reason=self._stopping or "error"), time.monotonic())
            self._compute.stop(timeouts.COMPUTE_STOP_S)
            self._compute.claims.leave()
            end_context(self._context, 200)
            log.info("%s stopped (%s)", self.name, self._stopping or "error")
        if self._broken is not None:
            raise self._broken

    # ---------------------------------------------------------------------------------------------- loop

    @property
    def _is_held(self) -> bool:
        return self._core.assignment is not None

    def _turn(self) -> None:
        onward = None if self._next is None else self._next.link
        links = [
            (is_head, link) for is_head, link in ((True, self._data), (False, onward)) if link is not None
        ]
        due_s = min((link.due_s for _, link in links), default=float("inf"))
        most_ms = HELD_POLL_MS if self._is_held else IDLE_POLL_MS
        ready = ready_sources(self._poller.poll(poll_timeout_ms(due_s, time.monotonic(), most_ms)))
        now_s = time.monotonic()
        for is_head, link in links:
            if not link.flush(now_s):
                self._unsent(self._core.number, self._last_sent[is_head], now_s)
        if (
            self._lifeline_fd is not None
            and self._lifeline_fd in ready
            and not os.read(self._lifeline_fd, 4096)
        ):
            self.stop("the process that started it is gone")
        if self._wake.read_fd in ready:
            self._wake.clear()
        self._reporter.answer(is_held=self._is_held)
        self._port.watch(ready)

        def receive() -> bool:
            return self._port.router in ready and self._receive(now_s)

        def look(is_read: bool) -> None:
            self._watch_next(ready, now_s)
            trouble = "" if self._next is None else self._next.trouble
            self._give(DaemonTick(next_trouble=trouble, is_read=is_read), now_s)

        turn(self._take_result, receive, look, self._core.limits.messages_max)

    # ------------------------------------------------------------------------------------------- messages

    def _receive(self, now_s: float) -> bool:
        """Takes the next thing that has come; whether there was one."""
        if (received := self._port.receive()) is None:
            return False
        identity, user, frames = received
        if not self._peers.is_banned(identity):
            try:
                self._hear(identity, user, frames, now_s)
            except Exception as error:  # the top of a turn: no message of a peer may end a daemon
                log.exception("unexpected error over a message")
                self._drop(identity, str(unexpected(error, "over this message")), now_s)
        return True

    def _hear(self, identity: bytes, user: str, frames: list[bytes], now_s: float) -> None:
        try:
            envelope = decode(frames)
            peer, is_new = self._peers.sender_of(identity, user, envelope)
            if self._compute.waiting > limits.WORK_QUEUED_MAX:
                raise PeerError(
                    f"expected at most {limits.WORK_QUEUED_MAX} pieces of work for the compute thread, one "
                    "more came"
                )
        except PeerError as error:
            self._drop(identity, str(error), now_s)
            return
        if is_new:
            self._give(CallerConnected(caller=peer), now_s)
            return
        tensor = envelope.tensor
        size = 0 if tensor is None else len(tensor.data)
        self._give(
            CallerMessageArrived(caller=peer, message=envelope.message, payload=tensor, payload_bytes=size),
            now_s,
        )

    def _drop(self, identity: bytes, text: str, now_s: float) -> None:
        """A peer broke the protocol, or met an error of ours: it is not listened to any more."""
        known = self._peers.known(identity)
        if known is None:
            self._peers.ban(identity, Error.saying(text))
        else:
            self._give(CallerBrokeProtocol(caller=known, text=text), now_s)

    def _watch_next(self, ready: set[Any], now_s: float) -> None:
        """What the next hop says, and what becomes of the connection to it."""
        hop = self._next
        if hop is None:
            return
        assignment_id = self._core.number
        try:
            hop.go_on()
        except InputError as error:
            self._give(NextHopLost(assignment_id=assignment_id, text=f"cannot be dialled: {error}"), now_s)
            return
        try:
            while self._next is hop and hop.socket in ready and (message := hop.read()) is not None:
                self._give(NextHopMessageArrived(assignment_id=assignment_id, message=message), now_s)
        except PeerError as error:
            self._give(NextHopLost(assignment_id=assignment_id, text=f"broke the protocol: {error}"), now_s)
        except Exception as error:  # as over a message of any other peer
            log.exception("unexpected error over a message of the next device")
            self._give(
                ComputeFailed(
                    assignment_id=assignment_id,
                    text=str(unexpected(error, "over a message of the next device")),
                    is_gone=True,
                ),
                now_s,
            )
        if self._next is hop and (why := hop.lost(ready)) is not None:
            self._give(NextHopLost(assignment_id=assignment_id, text=why), now_s)

    # ------------------------------------------------------------------------------------------- the core

    def _give(self, event: DaemonEvent, now_s: float) -> None:
        """Gives the core an event, and has done what it says."""
        self._driver.give((event, now_s))

    def _handle(self, given: tuple[DaemonEvent, float]) -> list[DaemonCommand]:
        event, self._now_s = given
        commands = self._core.handle(event, self._now_s)
        if self._is_checked and self._broken is None:
            try:
                check(self._core, event)
            except BrokenCoreError as error:
                self._broken = error
                self.stop("a check failed")
        return commands

    def _do(self, command: DaemonCommand) -> None:
        if isinstance(command, SendOn):
            self._send_on(command)
        elif isinstance(command, Compute):
            if isinstance(command.work, Trim):
                self._compute.trim(command.assignment_id, command.work.job, command.work.rows)
            else:
                self._compute.post(command.assignment_id, command.work)
        elif isinstance(command, Send):
            if not link_of(command.caller).send(command.message) and command.assignment_id:
                self._unsent(command.assignment_id, command.message, self._now_s)
        elif isinstance(command, SendPong):
            self._send_pong(command)
        elif isinstance(command, Log):
            getattr(log, command.level)("%s", command.text)
        elif isinstance(command, SendWelcome):
            link_of(command.caller).send(self._welcome(command))
        elif isinstance(command, StartAssignment):
            self._start_assignment(command)
        elif isinstance(command, Attach):
            self._data = link_of(command.caller)
            self._data.shape = self._shape_to_head
        elif isinstance(command, EndAssignment):
            self._end_assignment(command)
        elif isinstance(command, SendReady):
            self._send_ready(command)
        elif isinstance(command, Deliver):
            payload = command.payload
            self._compute.deliver(
                command.assignment_id, command.answer, b"" if payload is None else payload.data
            )
        elif isinstance(command, PrepareSlice):
            self._compute.prepare(command.assignment_id, command.assign)
        elif isinstance(command, EndPreparation):
            self._compute.hang_up(command.assignment_id)
        elif isinstance(command, Ban):
            self._peers.ban(peer_of(command.caller).identity, command.error)
        else:
            assert isinstance(command, Gather), f"nobody does {type(command).__name__}"
            self._reporter.ask(link_of(command.caller), command.question, is_held=self._is_held)

    def _send_on(self, command: SendOn) -> None:
        work, message, tensor = command.work, _message_of(command.work), None
        if isinstance(work, SendSegment) and work.rows:
            tensor = work.payload.select(work.rows)
        elif isinstance(work, SendFeatures):
            tensor = join_rows([(row,) for row in work.rows])
        is_head = command.caller is not None
        self._last_sent[is_head] = message
        if command.caller is not None:
            link: Sender | None = link_of(command.caller)
        else:
            link = None if self._next is None else self._next.link
        if link is None or not link.send(message, tensor):
            self._unsent(command.assignment_id, message, self._now_s)

    def _unsent(self, assignment_id: int, message: Message, now_s: float) -> None:
        self._give(CommandFailed(assignment_id=assignment_id, message=message), now_s)

    def _welcome(self, command: SendWelcome) -> Welcome:
        return Welcome(
            name=self.name,
            version=__version__,
            device=self.machine.device,
            pid=os.getpid(),
            memory_bytes=self.machine.memory_bytes or host_memory().available,
            count=peer_of(command.caller).receiver.expected,
            holder=command.holder,
            lease_s=command.lease_s,
        )

    def _send_pong(self, command: SendPong) -> None:
        link_of(command.caller).send(
            Pong(
                queued=command.queued,
                done=command.done,
                memory_bytes=psutil.Process().memory_info().rss,
                running_s=command.running_s,
                arrived=command.arrived,
                **self._thermometer.last()._asdict(),
            )
        )

    def _send_ready(self, command: SendReady) -> None:
        resident, loaded = psutil.Process().memory_info().rss, command.loaded
        link_of(command.caller).send(
            Ready(
                weight_bytes=loaded.weight_bytes,
                memory_bytes=resident,
                cache_slots=loaded.cache_slots,
                slot_bytes=loaded.slot_bytes,
                windowed_bytes=loaded.windowed_bytes,
                state_bytes=loaded.state_bytes,
                received_bytes=loaded.received_bytes,
                load_s=loaded.load_s,
                grammars=loaded.grammars,
            )
        )
        assignment = self._core.assignment
        if assignment is None or assignment.control is not command.caller:
            later = f", but for {loaded.load_s:.1f} s of loading" if loaded.load_s else ""
            log.info("made ready for another pipeline%s; process %s", later, mib(resident))
            return
        kept = "kept" if loaded.reused else "loaded"
        text = "ready: %s weights %s, process %s, room for %d cache slots"
        log.info(text, kept, mib(loaded.weight_bytes), mib(resident), loaded.cache_slots)

    # -------------------------------------------------------------------------------------------- holding

    def _start_assignment(self, command: StartAssignment) -> None:
        """An assignment begins: the next hop is dialled, and the slice loaded."""
        assign, peer = command.assign, peer_of(command.caller)
        self._peers.kept_incarnation = peer.incarnation
        if self._emulation is not None:
            self._shape = self._emulation.shaper(assign.stage)
            self._shape_to_head = self._emulation.shaper_to_head(assign.stage, assign.captured)
        if assign.next_hop:
            try:
                self._next = NextHop(
                    self._context,
                    assign,
                    incarnation=peer.incarnation,
                    sender=self.name,
                    keys=self._keys,
                    shape=self._shape,
                    poller=self._poller,
                    wake=self._wake,
                )
            except InputError as error:
                self._give(
                    NextHopLost(assignment_id=command.assignment_id, text=f"cannot be dialled: {error}"),
                    self._now_s,
                )
                return
        self._compute.post(command.assignment_id, assign)

    def _end_assignment(self, command: EndAssignment) -> None:
        self._compute.hang_up(command.assignment_id)
        for request in command.requests:
            self._compute.post(command.assignment_id, CloseCache(request=request))
        self._compute.claims.promise(sure=0, most=0)  # the layers stay, and nothing is cached
        self._peers.kept_incarnation = None
        if self._next is not None:
            self._next.close()
        self._next = self._data = self._shape = self._shape_to_head = None

    def _take_result(self) -> bool:
        """Takes the next thing that the compute thread did, or how far the running job has come; whether
        there was one."""
        now_s = time.monotonic()
        if self._compute.results:
            self._result(*self._compute.results.popleft(), now_s)
            return True
        further = self._compute.further
        if further is self._further:
            return False
        self._further = further
        assignment_id, job, at_s = further
        self._give(ComputeReported(assignment_id=assignment_id, result=LayerEnded(job=job, at_s=at_s)), now_s)
        return True

    def _result(self, assignment_id: int, result: Result, now_s: float) -> None:
        """What the compute thread did for an assignment."""
        if isinstance(result, WorkFailed):
            is_part, is_gone = (
                isinstance(result.error, NoRoomError),
                isinstance(result.error, UnexpectedError),
            )
            self._give(
                ComputeFailed(
                    assignment_id=assignment_id, text=str(result.error), is_part=is_part, is_gone=is_gone
                ),
                now_s,
            )
        else:
            try:
                self._give(ComputeReported(assignment_id=assignment_id, result=result), now_s)
            except Exception as error:  # the top of a turn, as over a message
                log.exception("unexpected error over what was computed")
                text = str(unexpected(error, "over what was computed"))
                self._give(ComputeFailed(assignment_id=assignment_id, text=text, is_gone=True), now_s)


def _message_of(work: SendSegment | SendVerified | SendFeatures) -> Message:
    if isinstance(work, SendSegment):
        return work.segment
    return work.verified if isinstance(work, SendVerified) else work.features


def peer_of(caller: Caller) -> Peer:
    """The connection that a caller is."""
    assert isinstance(caller, Peer), "every caller here is a connection to our port"
    return caller


def link_of(caller: Caller) -> Sender:
    return peer_of(caller).link
