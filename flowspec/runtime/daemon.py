"""The daemon: one process per device, one port, one stage or one drafter of whichever head holds it.

A poller thread owns the sockets and the `StageCore`; a compute thread owns the tensors. Peers (a head's control and data
connections, the previous stage) announce themselves with Hello. A head that assigns a slice holds the daemon until it
says Reset or falls silent for a lease; the slice stays loaded for the next one. A peer that breaks the protocol is
logged and ignored from then on; the daemon keeps serving.
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

from flowspec import __version__
from flowspec.core import limits
from flowspec.core.cluster_messages import Assign, Error, Loading, Ping, Pong, Reset, Welcome
from flowspec.core.drafter import DrafterCore, DrafterEvent
from flowspec.core.events import (
    ClearSlots,
    CloseCache,
    ControlArrived,
    OpenCache,
    RunLayers,
    SegmentArrived,
    SendSegment,
    StageCommand,
    Trim,
)
from flowspec.core.facts import AskFacts
from flowspec.core.incarnation import Claim, Lease
from flowspec.core.messages import Commit, Expand, Message, Open, Proposed, Release, Segment
from flowspec.core.stage import StageCore
from flowspec.errors import FlowSpecError, NoRoomError, PeerError
from flowspec.runtime import timeouts
from flowspec.runtime.compute import ComputeThread, Crashed, Failed, Loaded, Machine, Result
from flowspec.runtime.emulation import DeviceEmulation
from flowspec.runtime.health.clerk import Clerk
from flowspec.runtime.health.thermometer import Thermometer
from flowspec.runtime.heap import share_one_heap
from flowspec.runtime.hold import Hold, core_of
from flowspec.runtime.peers import Peer, Peers
from flowspec.runtime.port import Port
from flowspec.runtime.security.keyring import Keyring
from flowspec.runtime.transport import Wake, patience_ms, ready_sources, receive
from flowspec.runtime.weights.line import Asked, LoadProgress
from flowspec.wire.codec import Envelope, decode

log = logging.getLogger("flowspec.daemon")

BUSY_RETRY_S = 0.5
IDLE_POLL_MS = 60_000
HELD_POLL_MS = 500
"""While a head holds the daemon, deadlines are checked at least this often."""


class Daemon:
    """Serves one head after another until `stop`; `run` blocks. With an `emulation` it takes that device's time.

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
        self._clerk = Clerk(machine, self._wake, keys)
        self._thermometer = Thermometer()
        self._peers = Peers(self._port.router, name)
        self._poller = zmq.Poller()
        self._hold: Hold | None = None
        self._lease = Lease(timeouts.LEASE_S)
        self._holds_begun = 0
        self._stopping = ""

    def stop(self, reason: str) -> None:
        """Ends `run` soon; safe to call from a signal handler."""
        self._stopping = reason
        self._wake.set()

    def stop_on_signals(self) -> None:
        def handler(number: int, frame: FrameType | None) -> None:
            self.stop(signal.Signals(number).name)

        signal.signal(signal.SIGINT, handler)
        signal.signal(signal.SIGTERM, handler)

    def run(self) -> None:
        trust = "no keys" if self._keys is None else f"for {', '.join(self._keys.heads)}"
        where = f"{self.host}:{self.port} (FlowSpec {__version__}, pid {os.getpid()}, {trust})"
        log.info("%s listens on %s, idle until a head assigns it layers", self.name, where)
        sources = [*self._port.sources, self._wake.read_fd]
        for source in sources if self._lifeline_fd is None else [*sources, self._lifeline_fd]:
            self._poller.register(source, zmq.POLLIN)
        try:
            while not self._stopping:
                self._turn()
        finally:
            self._let_go(f"the daemon stops ({self._stopping or 'error'})", cause="gone")
            self._compute.stop(timeouts.COMPUTE_STOP_S)
            self._thermometer.stop()
            self._context.destroy(linger=200)
            log.info("%s stopped (%s)", self.name, self._stopping or "error")

    # ---------------------------------------------------------------------------------------------- loop

    def _turn(self) -> None:
        onward = None if self._hold is None else self._hold.onward
        due_s = float("inf") if onward is None else onward.due_s
        most_ms = IDLE_POLL_MS if self._hold is None else HELD_POLL_MS
        ready = ready_sources(self._poller.poll(patience_ms(due_s, time.monotonic(), most_ms)))
        now_s = time.monotonic()
        if self._hold is not None and onward is not None and not onward.flush(now_s):
            self._cannot_send(self._hold)
        if self._lifeline_fd is not None and self._lifeline_fd in ready and not os.read(self._lifeline_fd, 4096):
            self.stop("the process that started it is gone")
        if self._wake.read_fd in ready:
            self._wake.clear()
        while self._compute.results:
            self._result(*self._compute.results.popleft(), time.monotonic())
        self._clerk.answer(is_held=self._hold is not None)
        self._port.watch(ready)
        is_read = self._port.router not in ready or self._receive_all(now_s)
        hold = self._hold
        if hold is not None and hold.next_hop is not None and hold.next_hop.socket in ready:
            self._receive_next_hop(hold.next_hop.socket)
        if hold is not None and self._hold is hold and (why := hold.lost_next(self._keys, ready)) is not None:
            self._fail(f"{hold.next_device} {why}", "next")
        if is_read:  # a turn that was held up must not end a hold while the head's pings wait to be read
            self._check_deadlines(now_s)

    def _check_deadlines(self, now_s: float) -> None:
        hold = self._hold
        if hold is None:
            return
        if self._lease.is_over(now_s):
            log.warning("head %s has been silent for %.0f s: it no longer holds this daemon", hold.name, timeouts.LEASE_S)
            self._let_go(f"no word of the head for {timeouts.LEASE_S:.0f} s", cause="again")
        elif not hold.next_ready and now_s > hold.next_deadline_s:
            self._fail(f"{hold.next_device} {hold.why_silent(self._keys)}", "next")

    # ------------------------------------------------------------------------------------------- messages

    def _receive_all(self, now_s: float) -> bool:
        """Takes what has arrived, a bounded number so that results get their turn; whether that was all."""
        for _ in range(limits.MESSAGES_PER_TURN_MAX):
            if (received := self._port.receive()) is None:
                return True
            identity, user, frames = received
            if self._peers.is_banned(identity):
                continue
            try:
                self._from_peer(identity, user, decode(frames), now_s)
            except PeerError as error:
                self._drop(identity, error)
        return False

    def _drop(self, identity: bytes, error: PeerError) -> None:
        """A peer broke the protocol: stop listening to it, and give up the cluster if it belongs to ours."""
        peer = self._peers.ban(identity, error)
        if peer is not None and self._lease.admits(peer.incarnation):
            self._fail(f"{peer.hello.name}: {error}", "again")

    def _from_peer(self, identity: bytes, user: str, envelope: Envelope, now_s: float) -> None:
        peer, is_new = self._peers.sender_of(identity, user, envelope)
        message, hold = envelope.message, self._hold
        if is_new:
            self._welcome(peer)
        elif peer.hello.role == "head-control":
            self._from_head(peer, message, now_s)
        elif peer.hello.role == "head-weights":
            if hold is not None and hold.weights is peer:
                self._compute.line.deliver(hold.number, hold.check_answer(message), envelope.tensor.data if envelope.tensor else b"")
        elif not isinstance(message, Segment):
            raise PeerError(f"a {peer.hello.role} connection carries segments, not {type(message).__name__}")
        elif hold is None or not self._lease.admits(peer.incarnation) or peer.hello.role == "measure":
            log.info("ignored a segment of %s, which does not hold this daemon", peer.hello.name)
        else:
            hold.check_segment(message, envelope.tensor)
            size = 0 if envelope.tensor is None else len(envelope.tensor.data)
            self._step(hold, SegmentArrived(segment=message, payload=envelope.tensor, received_s=now_s, payload_bytes=size), now_s)

    def _welcome(self, peer: Peer) -> None:
        hold = self._hold
        if peer.hello.role == "head-data" and hold is not None and self._lease.admits(peer.incarnation):
            hold.take_data(peer)
        elif peer.hello.role == "head-weights" and hold is not None and self._lease.admits(peer.incarnation):
            hold.weights = peer
        elif peer.hello.role == "stage":
            log.info("stage %s is connected", peer.hello.name)
        peer.link.send(
            Welcome(
                name=self.name,
                version=__version__,
                device=self.machine.device,
                pid=os.getpid(),
                memory_bytes=self.machine.memory_bytes or psutil.virtual_memory().available,
                count=peer.receiver.expected,
            )
        )

    def _from_head(self, peer: Peer, message: Message, now_s: float) -> None:
        if isinstance(message, Assign):
            return self._assign(peer, message, now_s)
        if isinstance(message, AskFacts):
            return self._clerk.ask(peer.link, message, is_held=self._hold is not None)
        hold = self._hold
        if hold is None or hold.control is not peer:
            if not isinstance(message, Ping):
                log.info("ignored a %s of %s, which does not hold this daemon", type(message).__name__, peer.hello.name)
            return
        self._lease.renew(now_s)
        if isinstance(message, Ping):
            resident, core = psutil.Process().memory_info().rss, hold.core
            peer.link.send(
                Pong(
                    queued=core.queued,
                    done=core.done,
                    memory_bytes=resident,
                    running_s=min(core.running_s(now_s), max(0.0, now_s - self._compute.progressed_s)),
                    temperature_c=self._thermometer.last_c(),
                )
            )
        elif isinstance(message, Open | Commit | Release) and isinstance(hold.core, StageCore):
            self._step(hold, ControlArrived(message=message), now_s)
        elif isinstance(message, Expand | Release) and isinstance(hold.core, DrafterCore):
            if isinstance(message, Expand):
                hold.check_expand(message)
            self._step(hold, message, now_s)
        elif isinstance(message, Reset):
            self._let_go(f"head {hold.name} is done")
        else:
            raise PeerError(f"a head's control connection carries no {type(message).__name__}")

    # -------------------------------------------------------------------------------------------- holding

    def _assign(self, peer: Peer, assign: Assign, now_s: float) -> None:
        claim = self._lease.claim(peer.incarnation)
        if claim is Claim.HELD and self._hold is not None:
            left_s = max(BUSY_RETRY_S, self._lease.until_s - now_s)
            text = f"held by head {self._hold.name}; it is free at most {timeouts.LEASE_S:.0f} s after that head stops"
            peer.link.send(Error.saying(text, left_s))
            return
        if claim is Claim.STALE:
            log.info("ignored an Assign of %s for a pipeline that is over", peer.hello.name)
            return
        if claim is Claim.SUPERSEDES:
            self._let_go(f"head {peer.hello.name} forms another pipeline")
        log.info("head %s assigns %s", peer.hello.name, assign.told)
        self._holds_begun += 1
        hold = Hold(self._holds_begun, peer, assign, core_of(assign))
        if self._emulation is not None:
            hold.shape = self._emulation.shaper(assign.stage)
        for other in self._peers:
            if other.hello.role == "head-data" and other.incarnation == peer.incarnation:
                hold.take_data(other)
        try:
            hold.dial_next(self._context, self.name, self._keys, now_s)
        except FlowSpecError as error:
            peer.link.send(Error.saying(str(error)))
            return
        if hold.next_hop is not None and hold.next_monitor is not None:
            self._poller.register(hold.next_hop.socket, zmq.POLLIN)
            self._poller.register(hold.next_monitor.socket, zmq.POLLIN)
        self._hold = hold
        self._lease.take(peer.incarnation, now_s)
        self._peers.kept_incarnation = peer.incarnation
        self._compute.post(hold.number, assign)

    def _receive_next_hop(self, socket: zmq.Socket[bytes]) -> None:
        while self._hold is not None and (frames := receive(socket)) is not None:
            try:
                envelope = decode(frames)
                self._hold.next_receiver.check(envelope)
                if isinstance(envelope.message, Error):
                    self._fail(f"{self._hold.next_device} refuses: {envelope.message.text}", "next")
                elif not isinstance(envelope.message, Welcome) or self._hold.next_ready:
                    raise PeerError(f"expected one Welcome from the next hop, got {type(envelope.message).__name__}")
                else:
                    self._hold.reached_next(envelope.message)
                    self._hold.tell_ready()
            except PeerError as error:
                self._fail(f"{self._hold.next_device}: {error}", "next")

    def _fail(self, text: str, cause: str = "") -> None:
        """Tells the head why its cluster cannot go on, and lets go of it."""
        log.error("%s", text)
        if self._hold is not None:
            self._hold.control.link.send(Error.saying(text, cause=cause))
            self._let_go("failed")

    def _let_go(self, reason: str, *, cause: str = "") -> None:
        """Ends the hold; with a `cause` the head is told."""
        hold, self._hold = self._hold, None
        if hold is None:
            return
        self._lease.release()
        if cause:
            hold.control.link.send(Error.saying(reason, cause=cause))
        self._compute.line.hang_up(hold.number)
        for request in hold.core.requests():
            self._compute.post(hold.number, CloseCache(request=request))
        self._peers.kept_incarnation = None
        if hold.next_hop is not None and hold.next_monitor is not None:
            self._poller.unregister(hold.next_hop.socket)
            self._poller.unregister(hold.next_monitor.socket)
            hold.next_monitor.close()
            hold.next_hop.socket.close()
        log.info("free again (%s)", reason)

    # ------------------------------------------------------------------------------------------ computing

    def _step(self, hold: Hold, event: Any, now_s: float) -> None:
        if self._compute.waiting > limits.WORK_QUEUED_MAX:
            raise PeerError(f"expected at most {limits.WORK_QUEUED_MAX} pieces of work for the compute thread, one more came")
        for command in hold.core.handle(event, now_s):
            if self._hold is not hold:
                return  # what was to be sent could not be, and the hold ended: its caches are closed
            self._execute(hold, command)

    def _execute(self, hold: Hold, command: StageCommand | DrafterEvent) -> None:
        if isinstance(command, RunLayers | OpenCache | ClearSlots | CloseCache | Expand | Release):
            self._compute.post(hold.number, command)
        elif isinstance(command, Trim):
            self._compute.trim(hold.number, command.job, command.rows)
        elif isinstance(command, Proposed):
            hold.control.link.send(command)  # a head that is gone is noticed by its lease
        else:
            message = command.segment if isinstance(command, SendSegment) else command.verified
            tensor = command.payload.select(command.rows) if command.rows else None
            if hold.onward is None or not hold.onward.send(message, tensor):
                self._cannot_send(hold)

    def _cannot_send(self, hold: Hold) -> None:
        if hold.assign.next_hop:
            self._fail(f"{hold.next_device} takes no more frames", "next")
        else:
            self._let_go("the head's data connection is gone", cause="again")  # it leaves, and does not wait for its last segments

    def _result(self, number: int, result: Result, now_s: float) -> None:
        """What the compute thread did for hold `number`; of a head that is gone it counts for nothing."""
        if isinstance(result, Crashed):
            raise result.error
        hold = self._hold
        if hold is None or hold.number != number:
            return
        if isinstance(result, LoadProgress):
            hold.control.link.send(Loading(doing=result.doing, share=result.share))
        elif isinstance(result, Asked):
            if not hold.ask(result.question):
                self._fail("the head's connection for weights is gone", "again")
        elif isinstance(result, Loaded):
            hold.loaded = result
            hold.tell_ready()
        elif isinstance(result, Failed):
            is_part = not hold.is_ready or isinstance(result.error, NoRoomError)
            self._fail(str(result.error), "part" if is_part else "")
        else:
            try:
                self._step(hold, result, now_s)
            except PeerError as error:  # a segment that had waited in the queue
                self._fail(str(error), "again")
