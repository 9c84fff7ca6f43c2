"""The head of a running cluster: connects to the daemons, gives them their layers, and answers prompts through them.

One thread owns the sockets and the `HeadCore`. Callers submit from their own threads and read tokens from an `Answer`.
A lost device or a broken protocol fails the head as a whole: every open answer gets the error, and nothing hangs.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket as sockets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq

from flowspec import __version__
from flowspec.core.events import Cancel, Emit, Finished, Forget, HeadEvent, Submit, Timed, ToPipeline, ToStages, VerifiedArrived
from flowspec.core.head import HeadCore
from flowspec.core.messages import Assign, Error, Hello, Hop, Loading, Message, Ping, Pong, Ready, Reset, Verified, Welcome
from flowspec.errors import ClusterError, FlowSpecError, InputError, PeerError
from flowspec.plan.placement import ClusterPlan, StagePlan
from flowspec.runtime import timeouts
from flowspec.runtime.answer import Answer, End, Tokens
from flowspec.runtime.transport import Link, Monitor, Receiver, Wake, dial, ready_sources, receive
from flowspec.wire.codec import decode

Progress = Callable[[str, float], None]
"""Called with a line of text (a device's name, or what is waited for) and a share from 0 to 1."""
TIMED_SEGMENTS_MAX = 10_000
LOSS_SETTLES_S = 0.1
"""How long the closing of a lost device's connections may take to show on all of them."""

log = logging.getLogger("flowspec.head")


@dataclass(slots=True)
class Stage:
    """A stage as the head knows it."""

    plan: StagePlan
    control: Link
    receiver: Receiver
    monitor: Monitor
    data_monitor: Monitor | None = None
    welcome: Welcome | None = None
    ready: Ready | None = None
    heard_s: float = 0.0
    share: float = 0.0

    def describe(self) -> str:
        return f"device {self.plan.name} at {self.plan.address}"


class Head:
    """A connected cluster; a context manager that lets go of the daemons at its end."""

    def __init__(self, plan: ClusterPlan, progress: Progress = lambda text, share: None) -> None:
        self.plan = plan
        self.stages: list[Stage] = []
        self.hops: deque[tuple[Hop, ...]] = deque(maxlen=TIMED_SEGMENTS_MAX)
        self._incarnation = secrets.randbits(62)
        self._name = f"{sockets.gethostname()}-{os.getpid()}"
        self._progress = progress
        self._core = HeadCore(context=plan.context, stage_count=len(plan.stages))
        self._context: zmq.Context[Any] = zmq.Context()
        self._wake = Wake()
        self._inbox: deque[tuple[HeadEvent, Answer | None]] = deque()
        self._answers: dict[int, Answer] = {}
        self._stopping = False
        self._ping_due_s = 0.0
        self._requests_begun = 0
        self._data: dict[zmq.Socket[bytes], tuple[Link, Receiver]] = {}
        self._poller: zmq.Poller | None = None
        try:
            self._connect()
        except BaseException:
            self._disconnect()
            raise
        self._thread = threading.Thread(target=self._run, name="head", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------ for other threads

    def new_request(self) -> int:
        """An id for a new conversation."""
        self._requests_begun += 1
        return self._requests_begun

    def submit(self, submit: Submit) -> Answer:
        """Starts an answer. What is wrong with the prompt or the cluster is raised when the answer is read."""
        answer = Answer(submit.request, time.monotonic())
        self._post(submit, answer)
        return answer

    def cancel(self, answer: Answer) -> None:
        """Ends an answer soon, with the reason `cancelled`."""
        self._post(Cancel(request=answer.request), None)

    def forget(self, request: int) -> None:
        """Frees a conversation's cache on every stage."""
        self._post(Forget(request=request), None)

    def close(self) -> None:
        """Lets go of the daemons and ends the thread; answers that are open get an error."""
        if self._stopping:
            return
        self._stopping = True
        self._wake.set()
        self._thread.join()

    def __enter__(self) -> Head:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _post(self, event: HeadEvent, answer: Answer | None) -> None:
        assert not self._stopping, "the head is closed"
        self._inbox.append((event, answer))
        self._wake.set()

    # ------------------------------------------------------------------------------------------ connecting

    def _connect(self) -> None:
        for plan in self.plan.stages:
            socket = dial(self._context, plan.address)
            stage = Stage(plan, self._link(socket), Receiver(), Monitor(socket))
            stage.control.send(Hello(name=self._name, version=__version__, role="head-control"))
            self.stages.append(stage)
        self._collect(lambda stage: stage.welcome is not None, timeouts.CONNECT_S, "is `flowspec daemon` running there?")
        for stage in {id(s): s for s in (self.stages[0], self.stages[-1])}.values():
            socket = dial(self._context, stage.plan.address)
            self._data[socket] = (self._link(socket), Receiver())
            stage.data_monitor = Monitor(socket)
            self._data[socket][0].send(Hello(name=self._name, version=__version__, role="head-data"))
        for index in range(len(self.stages)):
            self._assign(index)
        self._collect(lambda stage: stage.ready is not None, None, "")

    def _link(self, socket: zmq.Socket[bytes]) -> Link:
        return Link(socket, incarnation=self._incarnation, sender=self._name)

    def _assign(self, index: int) -> None:
        stages = self.plan.stages
        plan = stages[index]
        self.stages[index].control.send(
            Assign(
                model=self.plan.model,
                fingerprint=self.plan.fingerprint,
                stage=index,
                stages=len(stages),
                first_layer=plan.first,
                end_layer=plan.end,
                layer_count=self.plan.layer_count,
                next_hop=stages[index + 1].address if index + 1 < len(stages) else "",
                next_name=stages[index + 1].name if index + 1 < len(stages) else "",
                dtype=self.plan.dtype,
                context=self.plan.context,
            )
        )

    def _collect(self, is_done: Callable[[Stage], bool], timeout_s: float | None, advice: str) -> None:
        """Listens until every stage is done; answers its progress, retries those that are held by another head."""
        started_s = time.monotonic()
        again: dict[int, float] = {}
        waiting: set[int] = set()
        while not all(is_done(stage) for stage in self.stages):
            ready = self._poll(100)
            now_s = time.monotonic()
            for socket, (_, receiver) in self._data.items():
                self._receive_data(socket, receiver)
            for index, stage in enumerate(self.stages):
                for message in self._messages_of(stage):
                    if isinstance(message, Error) and message.retry_after_s > 0 and now_s - started_s < timeouts.HELD_S:
                        if index not in waiting:
                            log.warning("waiting for %s: %s", stage.describe(), message.text)
                        waiting.add(index)
                        again[index] = now_s + min(message.retry_after_s, 1.0)
                    else:
                        self._take(stage, message)
                if again.get(index, now_s) < now_s:
                    del again[index]
                    self._assign(index)
                if timeout_s is not None and not is_done(stage) and now_s - started_s > timeout_s:
                    raise ClusterError(f"{stage.describe()} did not answer within {timeout_s:.0f} s; {advice}")
            self._check_peers(now_s, ready)

    def _take(self, stage: Stage, message: Message) -> None:
        if isinstance(message, Welcome):
            stage.welcome = message
        elif isinstance(message, Loading):
            stage.share = message.share
            self._progress(stage.plan.name, message.share)
        elif isinstance(message, Ready):
            stage.ready = message
            self._progress(stage.plan.name, 1.0)
        elif isinstance(message, Error):
            self._blame_the_lost()
            raise ClusterError(f"{stage.describe()}: {message.text}")
        elif not isinstance(message, Pong):
            raise PeerError(f"{stage.describe()} sent an unexpected {type(message).__name__}")

    # ------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                ready = self._poll(500)
                now_s = time.monotonic()
                while self._inbox:
                    self._begin(*self._inbox.popleft(), now_s)
                for socket, (_, receiver) in self._data.items():
                    if socket in ready:
                        self._receive_data(socket, receiver)
                for stage in self.stages:
                    if stage.control.socket in ready:
                        for message in self._messages_of(stage):
                            self._take(stage, message)
                self._check_peers(now_s, ready)
        except FlowSpecError as error:
            self._fail(error)
        except BaseException as error:
            self._fail(ClusterError(f"the head failed: {type(error).__name__}: {error}"))
            raise
        finally:
            self._end_answers(ClusterError("the head is closed"))
            self._disconnect()

    def _end_answers(self, error: FlowSpecError) -> None:
        for answer in self._answers.values():
            answer.items.put(error)
        self._answers.clear()

    def _fail(self, error: FlowSpecError) -> None:
        """Ends every answer with the error, also those that are asked for until the head is closed."""
        self._end_answers(error)
        while not self._stopping:
            while self._inbox:
                _, unanswered = self._inbox.popleft()
                if unanswered is not None:
                    unanswered.items.put(error)
            time.sleep(0.05)

    def _begin(self, event: HeadEvent, answer: Answer | None, now_s: float) -> None:
        if answer is not None:
            self._answers[answer.request] = answer
        try:
            self._step(event, now_s)
        except InputError as error:
            if answer is None:
                raise
            del self._answers[answer.request]
            answer.items.put(error)

    def _receive_data(self, socket: zmq.Socket[bytes], receiver: Receiver) -> None:
        while (frames := receive(socket)) is not None:
            envelope = decode(frames)
            receiver.check(envelope)
            if isinstance(envelope.message, Verified):
                self._step(VerifiedArrived(verified=envelope.message), time.monotonic())
            elif isinstance(envelope.message, Error):
                raise ClusterError(envelope.message.text)

    def _step(self, event: HeadEvent, now_s: float) -> None:
        """Runs the core's commands; what the stages wait for goes out before readers are woken."""
        first = next(iter(self._data.values()))[0]
        for_readers: list[Emit | Finished] = []
        for command in self._core.handle(event, now_s):
            if isinstance(command, ToPipeline):
                if not first.send(command.segment):
                    raise ClusterError(f"{self.stages[0].describe()} takes no more segments")
            elif isinstance(command, ToStages):
                for stage in self.stages:
                    stage.control.send(command.message)
            elif isinstance(command, Timed):
                self.hops.append(command.hops)
            else:
                for_readers.append(command)
        for command in for_readers:
            if isinstance(command, Emit):
                self._answers[command.request].items.put(Tokens(tokens=command.tokens, at_s=now_s))
            else:
                self._answers.pop(command.request).items.put(End(reason=command.reason, reused=command.reused))

    # --------------------------------------------------------------------------------------------- sockets

    def _poll(self, timeout_ms: int) -> set[Any]:
        """Waits for anything to arrive; returns the sockets that have something."""
        monitors = [m.socket for s in self.stages for m in (s.monitor, s.data_monitor) if m is not None]
        if self._poller is None or len(self._poller.sockets) != 1 + len(self.stages) + len(monitors) + len(self._data):
            self._poller = zmq.Poller()
            for source in (self._wake.read_fd, *(s.control.socket for s in self.stages), *monitors, *self._data):
                self._poller.register(source, zmq.POLLIN)
        ready = ready_sources(self._poller.poll(timeout_ms))
        if self._wake.read_fd in ready:
            self._wake.clear()
        return ready

    def _messages_of(self, stage: Stage) -> list[Message]:
        found: list[Message] = []
        while (frames := receive(stage.control.socket)) is not None:
            try:
                envelope = decode(frames)
                stage.receiver.check(envelope)
            except PeerError as error:
                raise PeerError(f"{stage.describe()}: {error}") from None
            stage.heard_s = time.monotonic()
            found.append(envelope.message)
        return found

    def _blame_the_lost(self) -> None:
        """Before a stage's error is raised: a device that is gone is the better explanation, if there is one."""
        time.sleep(LOSS_SETTLES_S)
        for stage in self.stages:
            self._check_connection(stage)

    def _check_connection(self, stage: Stage) -> None:
        monitors = [monitor for monitor in (stage.monitor, stage.data_monitor) if monitor is not None]
        if any([monitor.drain()[0] for monitor in monitors]) and stage.welcome is not None:
            doing = "while loading" if stage.ready is None else "while answering"
            raise ClusterError(f"{stage.describe()} was lost {doing}: its connection closed; see the daemon's log there")

    def _check_peers(self, now_s: float, ready: set[Any]) -> None:
        """Keeps the leases alive; raises `ClusterError` for a device that is gone."""
        for stage in self.stages:
            if stage.monitor.socket in ready or (stage.data_monitor is not None and stage.data_monitor.socket in ready):
                self._check_connection(stage)
        if now_s < self._ping_due_s:
            return
        self._ping_due_s = now_s + timeouts.PING_EVERY_S
        for stage in self.stages:
            if stage.welcome is not None:
                stage.control.send(Ping())
                if now_s - stage.heard_s > timeouts.STALL_S:
                    raise ClusterError(f"{stage.describe()} has not answered for {timeouts.STALL_S:.0f} s")

    def _disconnect(self) -> None:
        for stage in self.stages:
            stage.control.send(Reset())
        self._context.destroy(linger=200)
        self._wake.close()
