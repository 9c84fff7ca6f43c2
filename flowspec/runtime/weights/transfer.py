"""How the tensors of a slice come from a head to a device that lacks them: both ends.

The device asks and the head answers, each question once and in order. A window of questions is open at any
time, so that neither the link nor the disk waits; since answers come in order, a tensor's file grows from its
beginning, and what is in it when all breaks off is where the next attempt goes on. The head reads its
checkpoint in ranges and never a whole tensor, in a thread with connections of its own, so that pings and
set-up go on beside it.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import zmq

from flowspec.core.protocol import limits
from flowspec.core.protocol.cluster_messages import Error, Hello, Loading, Welcome
from flowspec.core.protocol.device_messages import (
    AskBytes,
    AskModel,
    AskNames,
    AskTensors,
    AskTokens,
    ModelOffer,
    NameList,
    TensorBytes,
    TensorEntry,
    TensorList,
    WeightAnswer,
    WeightQuestion,
)
from flowspec.core.protocol.token_bytes import TokenBytes
from flowspec.core.protocol.types import Message
from flowspec.errors import ClusterError, FlowSpecError, InputError, PeerError
from flowspec.model.files import ModelFiles
from flowspec.model.tensors import Extent, Extents
from flowspec.plan.memory import mib
from flowspec.plan.placement import StagePlan
from flowspec.runtime.monitor import Monitor
from flowspec.runtime.security.keyring import Keyring
from flowspec.runtime.transport import Receiver, Sender, Wake, dial, ready_sources, receive
from flowspec.runtime.weights.store import HashedFiles, Partial, WeightStore
from flowspec.validation import checked
from flowspec.version import __version__
from flowspec.wire.codec import BYTES, Tensor, decode

TENSORS_ASKED = 64
"""Tensors asked for at once: the head may have to hash them, and progress shows between."""
PROGRESS_EVERY_S = 0.2
LOG_EVERY_S = 5.0
QUEUED_MAX = 2 * limits.WEIGHT_WINDOW
"""Answers that may wait to leave for one daemon; one that asks for more without reading breaks the protocol.
"""
STOP_S = 5.0

log = logging.getLogger("flowspec.daemon")
head_log = logging.getLogger("flowspec.head")
Answer = TypeVar("Answer", ModelOffer, NameList, TensorList, TensorBytes)


# --------------------------------------------------------------------------------------------- device


class Manifest(NamedTuple):
    """A model as its head describes it: the text of its config, a GGUF file's architecture, and the names of
    all tensors. Which of these a slice is made of, and how, follows from that."""

    config: str
    gguf: str
    names: frozenset[str]

    @property
    def digest(self) -> str:
        content = [self.config, self.gguf, sorted(self.names)]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


class HeadChannel:
    """The line of one assignment to its head while its slice is loaded. The thread that loads asks, waits for
    answers and shows progress; the poller sends what it is given, delivers and hangs up.

    Raises `ClusterError` once the head has let go, or when it cannot answer, `PeerError` for another answer
    than was asked for.
    """

    def __init__(self, send: Callable[[WeightQuestion | Loading], None]) -> None:
        self._send = send
        self._answers: queue.SimpleQueue[tuple[WeightAnswer | Error, bytes | memoryview] | None]
        self._answers = queue.SimpleQueue()
        self._is_over = False
        self._doing, self._shown_s = "", 0.0

    def deliver(self, answer: WeightAnswer | Error, data: bytes | memoryview) -> None:
        self._answers.put((answer, data))

    def hang_up(self) -> None:
        """The assignment has ended: no answer will come, and nobody needs one."""
        self._is_over = True
        self._answers.put(None)

    def show(self, doing: str, share: float) -> None:
        """Progress, `doing` as in `Loading`, now and then: at once when something else is being done."""
        self._check_over()
        now_s = time.monotonic()
        if doing != self._doing or now_s - self._shown_s > PROGRESS_EVERY_S:
            self._doing, self._shown_s = doing, now_s
            self._send(Loading(doing=doing, share=share))

    def ask(self, question: WeightQuestion) -> None:
        self._send(question)

    def answer(self, kind: type[Answer]) -> tuple[Answer, bytes | memoryview]:
        """Waits for the next answer, which must be of this kind, and the bytes that came with it."""
        self._check_over()  # whoever hangs up says so before waking us
        found = self._answers.get()
        self._check_over()
        assert found is not None, "only whoever hangs up wakes without an answer"
        if isinstance(found[0], Error):
            raise ClusterError(f"the head cannot send the weights: {found[0].text}")
        if not isinstance(found[0], kind):
            raise PeerError(f"expected {kind.__name__} from the head, got {type(found[0]).__name__}")
        return found[0], found[1]

    def _check_over(self) -> None:
        if self._is_over:
            raise ClusterError("the head let go before all weights were there")

    def ask_manifest(self) -> Manifest:
        self.ask(AskModel())
        offer, _ = self.answer(ModelOffer)
        names: list[str] = []
        while len(names) < offer.tensor_count:
            self.ask(AskNames(first=len(names)))
            more, _ = self.answer(NameList)
            if not more.names:
                raise PeerError(f"expected the names of {offer.tensor_count} tensors, got {len(names)}")
            names += more.names
        return Manifest(offer.config, offer.gguf, frozenset(names))

    def ask_entries(self, names: Iterable[str]) -> list[TensorEntry]:
        """What these tensors of the head's are; it may have to hash them for that."""
        entries: list[TensorEntry] = []
        asked = sorted(names)
        for first in range(0, len(asked), TENSORS_ASKED):
            batch = asked[first : first + TENSORS_ASKED]
            self.show("asking for weights", first / len(asked))
            self.ask(AskTensors(names=tuple(batch)))
            found, _ = self.answer(TensorList)
            if [entry.name for entry in found.entries] != batch:
                raise PeerError("expected the tensors that were asked for, got others")
            entries += found.entries
        return entries

    def ask_tokens(self, digest: str, size: int) -> TokenBytes:
        """The bytes of the model's tokens. Raises `PeerError` for others than were named, or for none."""
        data = bytearray()
        while len(data) < size:
            self.show("receiving", len(data) / size)
            self.ask(AskTokens(offset=len(data)))
            answer, more = self.answer(TensorBytes)
            if (answer.digest, answer.offset) != (digest, len(data)) or not 0 < len(more) <= size - len(data):
                raise PeerError(
                    f"expected tokens from {len(data)} on, got {len(more)} bytes from {answer.offset} on"
                )
            data += more
        if hashlib.sha256(data).hexdigest() != digest:
            raise PeerError("expected the tokens that were named, got others")
        try:
            return TokenBytes.unpack(data)
        except ValueError as error:
            raise PeerError(str(error)) from None


class Pull:
    """Brings tensors of the head's (digest -> bytes) into the store."""

    def __init__(self, channel: HeadChannel, store: WeightStore, sizes: Mapping[str, int]) -> None:
        self._channel, self._store, self._sizes = channel, store, sizes
        self._total, self._done, self._received = sum(sizes.values()), 0, 0
        self._damaged: list[str] = []
        self._logged_s = time.monotonic()

    def run(self) -> int:
        """The bytes that came. Raises `ClusterError` for what comes damaged twice."""
        began_s = self._logged_s
        log.info("receiving %s of weights in %d tensors from the head", mib(self._total), len(self._sizes))
        self._fetch(self._sizes)
        if self._damaged:
            damaged, self._damaged = self._damaged, []
            self._fetch(damaged)
        if self._damaged:
            raise ClusterError(
                "weights came damaged from the head twice; check the disk and the memory of both devices"
            )
        log.info("received %s in %.1f s", mib(self._received), time.monotonic() - began_s)
        return self._received

    def _fetch(self, digests: Iterable[str]) -> None:
        """Asks for what is missing of these, a window of questions at a time."""
        asked: deque[tuple[Partial, AskBytes]] = deque()
        ranges = self._ranges(digests)
        with contextlib.ExitStack() as self._files:
            while True:
                for partial, question in itertools.islice(ranges, limits.WEIGHT_WINDOW - len(asked)):
                    self._channel.ask(question)
                    asked.append((partial, question))
                if not asked:
                    return
                self._take(*asked.popleft())

    def _ranges(self, digests: Iterable[str]) -> Iterator[tuple[Partial, AskBytes]]:
        """What the tensors' files lack."""
        for digest in digests:
            partial = self._store.partial(digest, self._sizes[digest])
            self._files.callback(partial.close)
            self._done += partial.held
            first, end = partial.held, partial.size
            if first == end:  # an earlier attempt ended just before its last step, or there is nothing in it
                self._finish(partial)
            for offset in range(first, end, limits.WEIGHT_CHUNK_BYTES):
                size = min(limits.WEIGHT_CHUNK_BYTES, end - offset)
                yield partial, AskBytes(digest=digest, offset=offset, size=size)

    def _take(self, partial: Partial, asked: AskBytes) -> None:
        answer, data = self._channel.answer(TensorBytes)
        if (answer.digest, answer.offset, len(data)) != (asked.digest, asked.offset, asked.size):
            raise PeerError(
                f"expected {asked.size} bytes from {asked.offset} on, got {len(data)} from {answer.offset} on"
            )
        partial.write(data)
        self._received += len(data)
        self._done += len(data)
        if partial.held == partial.size:
            self._finish(partial)
        share, now_s = self._done / self._total, time.monotonic()
        self._channel.show("receiving", share)
        if now_s - self._logged_s > LOG_EVERY_S:
            self._logged_s = now_s
            log.info("received %s of %s (%.0f%%)", mib(self._done), mib(self._total), 100 * share)

    def _finish(self, partial: Partial) -> None:
        if not partial.finish():
            log.warning("a tensor of %s came damaged; it is fetched again", mib(partial.size))
            self._done -= partial.size
            self._damaged.append(partial.digest)


# ----------------------------------------------------------------------------------------------- head


class Offer:
    """A head's answers about its model until `close`, all about the same state of its files.

    Only tensors of this one model are given, and bytes only of those whose digest was given before. `folder`
    keeps digests (default: the user's cache folder); `step` is called between blocks of long work, and ends
    it by raising.
    """

    def __init__(
        self,
        files: ModelFiles,
        fingerprint: str,
        *,
        folder: Path | None = None,
        step: Callable[[], None] = lambda: None,
    ) -> None:
        self._files, self._fingerprint, self._step = files, fingerprint, step
        self._hashed = HashedFiles(folder)
        self._given: dict[str, Extent] = {}
        self._extents: Extents | None = None
        self._names: list[str] = []

    def close(self) -> None:
        self._hashed.close()

    def answer(self, question: WeightQuestion) -> tuple[WeightAnswer, Tensor | None]:
        """The answer to a daemon, and the bytes that go with it.

        Raises `InputError` when the model is not what the head connected with any more, or cannot be read,
        `PeerError` for what no correct daemon asks.
        """
        try:
            if isinstance(question, AskModel):
                return checked(self._begin()), None
            if self._extents is None:
                raise PeerError(f"expected AskModel first, got {type(question).__name__}")
            if isinstance(question, AskNames):
                names = self._names[question.first :][: limits.TENSORS_LISTED_MAX]
                return checked(NameList(names=tuple(names))), None
            if isinstance(question, AskTensors):
                return checked(TensorList(entries=self._entries(self._extents, question.names))), None
            assert isinstance(question, AskBytes)
            return TensorBytes(digest=question.digest, offset=question.offset), self._bytes(question)
        except (OSError, ValueError) as error:
            raise InputError(f"model {self._files.model!r} cannot be sent: {error}") from None

    def _begin(self) -> ModelOffer:
        self._check_unchanged(self._files.fingerprint() == self._fingerprint)
        extents = self._extents = self._files.extents()
        self._names = sorted(extents)
        config, gguf = self._files.config_text(), self._files.gguf_architecture
        return ModelOffer(config=config, gguf=gguf, tensor_count=len(self._names))

    def _entries(self, extents: Extents, names: Sequence[str]) -> tuple[TensorEntry, ...]:
        entries = []
        for name in names:
            extent = extents.extent(name)
            entries.append(self._hashed.entry(name, extent, lambda size: self._step()))
            self._given[entries[-1].digest] = extent
        self._check_unchanged(self._hashed.are_unchanged())
        self._hashed.save()
        return tuple(entries)

    def _bytes(self, question: AskBytes) -> Tensor:
        extent, end = self._given.get(question.digest), question.offset + question.size
        if extent is None or end > extent.size_bytes:
            raise PeerError(f"asked for bytes {question.offset} to {end} of a tensor that was not offered")
        data = self._hashed.read(extent, question.offset, question.size)
        self._check_unchanged(self._hashed.are_unchanged())
        return Tensor(rows=1, width=question.size, dtype=BYTES, data=data)

    def _check_unchanged(self, is_unchanged: bool) -> None:
        if not is_unchanged:
            raise InputError(
                f"model {self._files.model!r} changed on the head since it connected; start again"
            )


@dataclass(slots=True)
class _Connection:
    """That of a device, to which weights are sent."""

    device: str
    link: Sender
    monitor: Monitor
    receiver: Receiver


class WeightServer:
    """Serves a model to any number of daemons until `close`, in a thread of its own. `error` is set,
    and the head woken, when a daemon cannot be served.

    What is wrong with the checkpoint is told to the daemon, which gives up and says so on its control
    connection like any other failure.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        wake_head: Wake,
        *,
        model: str,
        fingerprint: str,
        incarnation: int,
        sender: str,
        keys: Keyring | None = None,
    ) -> None:
        self.error: BaseException | None = None
        self._context, self._wake_head, self._keys = context, wake_head, keys
        self._incarnation, self._sender = incarnation, sender
        self._wake = Wake()
        self._wanted: deque[StagePlan] = deque()
        self._is_stopping = False
        self._connections: list[_Connection] = []
        self._poller = zmq.Poller()
        self._offer = Offer(ModelFiles(model), fingerprint, step=self._check_stopping)
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    def serve(self, stage: StagePlan) -> None:
        self._wanted.append(stage)
        self._wake.set()

    def close(self) -> None:
        self._is_stopping = True
        self._wake.set()
        self._thread.join(STOP_S)
        self._wake.close()

    def _check_stopping(self) -> None:
        """Ends work that would take long."""
        if self._is_stopping:
            raise ClusterError("the head closes")

    def _run(self) -> None:
        self._poller.register(self._wake.read_fd, zmq.POLLIN)
        try:
            while not self._is_stopping:
                self._turn(ready_sources(self._poller.poll()))
        except BaseException as error:  # noqa: BLE001 - the top of a thread: the head's thread raises it
            self.error = error
            self._wake_head.set()
        finally:
            for connection in self._connections:
                connection.monitor.close()
                connection.link.socket.close(linger=0)
            self._offer.close()

    def _turn(self, ready: set[Any]) -> None:
        if self._wake.read_fd in ready:
            self._wake.clear()
        while self._wanted:
            self._dial(self._wanted.popleft())
        for connection in self._connections:
            if connection.monitor.socket in ready and connection.monitor.drain()[0]:
                raise ClusterError(
                    f"{connection.device} was lost while it received weights: its connection closed; see the "
                    "daemon's log there"
                )
            if connection.link.socket in ready:
                self._serve_next(connection)

    def _dial(self, stage: StagePlan) -> None:
        socket = dial(
            self._context, stage.address, stage.name, self._keys, queued_max=QUEUED_MAX, has_pulse=False
        )
        link, monitor = Sender(socket, incarnation=self._incarnation, sender=self._sender), Monitor(socket)
        device = f"device {stage.name} at {stage.address}"
        self._connections.append(_Connection(device, link, monitor, Receiver(self._incarnation)))
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(monitor.socket, zmq.POLLIN)
        link.send(Hello(name=self._sender, version=__version__, role="head-weights"))

    def _serve_next(self, connection: _Connection) -> None:
        """One message of each daemon at a time: none waits for another's whole slice."""
        frames = receive(connection.link.socket)
        if frames is None:
            return
        try:
            envelope = decode(frames)
            connection.receiver.check(envelope)
            answer, tensor = self._answer(connection, envelope.message)
        except InputError as error:
            head_log.error("%s", error)
            answer, tensor = Error.saying(str(error)), None
        except FlowSpecError as error:
            raise type(error)(f"{connection.device}: {error}") from None
        if not connection.link.send(answer, tensor):
            raise PeerError(f"{connection.device} asks for weights faster than it takes them")

    def _answer(self, connection: _Connection, message: Message) -> tuple[Message, Tensor | None]:
        if isinstance(message, Welcome) and connection.receiver.expected == 1:  # AskModel came to the head
            connection.link.count_from(message.count)
            head_log.info("serving weights to %s", connection.device)
            return self._offer.answer(AskModel())
        if isinstance(message, Error):
            raise ClusterError(f"refuses weights: {message.text}")
        if not isinstance(message, AskNames | AskTensors | AskBytes):
            raise PeerError(f"sent an unexpected {type(message).__name__}")
        return self._offer.answer(message)
