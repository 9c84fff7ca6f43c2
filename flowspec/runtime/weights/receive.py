"""How a daemon gets the tensors of its slice from the head: it asks what they are, keeps what it has stored,
and pulls the rest in ranges.

A window of questions is open at any time, so that neither the link nor the disk waits; since answers come in
order, a tensor's file grows from its beginning, and what is in it when all breaks off is where the next
attempt goes on.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections import deque
from collections.abc import Container, Iterable, Iterator
from typing import Protocol, TypeVar

from flowspec.core.protocol import limits
from flowspec.core.protocol.cluster_messages import Error
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
from flowspec.errors import ClusterError, PeerError
from flowspec.plan.memory import mib
from flowspec.runtime.weights.content import ModelDescription
from flowspec.runtime.weights.store import Partial, WeightStore
from flowspec.runtime.weights.stored import StoredModel

log = logging.getLogger("flowspec.daemon")

TENSORS_ASKED = 64
"""Tensors asked for at once: the head may have to hash them, and progress shows between."""
LOG_EVERY_S = 5.0
Answer = TypeVar("Answer", ModelOffer, NameList, TensorList, TensorBytes)


class HeadChannel(Protocol):
    """Carries questions to the head and answers back, one answer for each and in order."""

    def ask(self, question: WeightQuestion) -> None: ...

    def answer(self) -> tuple[WeightAnswer | Error, bytes | memoryview]:
        """Waits for the next answer, and the bytes that came with it. Raises `ClusterError` when the head
        lets go of the daemon."""

    def tell(self, doing: str, share: float) -> None:
        """Progress, `doing` as in `Loading`. Raises `ClusterError` when the head has let go of the daemon."""


def ask_word(channel: HeadChannel) -> ModelDescription:
    """What the head says of its model: its config, and the names of its tensors."""
    channel.ask(AskModel())
    offer, _ = _expect(channel, ModelOffer)
    names: list[str] = []
    while len(names) < offer.tensor_count:
        channel.ask(AskNames(first=len(names)))
        more, _ = _expect(channel, NameList)
        if not more.names:
            raise PeerError(f"expected the names of {offer.tensor_count} tensors, got {len(names)}")
        names += more.names
    return ModelDescription(offer, tuple(names))


def ask_entries(word: ModelDescription, names: Iterable[str], channel: HeadChannel) -> list[TensorEntry]:
    """What these tensors are, as far as the head has them; it may have to hash them for that."""
    there = frozenset(word.names)
    known = sorted(name for name in names if name in there)  # loading names those that are missing
    entries: list[TensorEntry] = []
    batches = [known[at : at + TENSORS_ASKED] for at in range(0, len(known), TENSORS_ASKED)]
    for number, batch in enumerate(batches):
        channel.tell("asking for weights", number / len(batches))
        channel.ask(AskTensors(names=tuple(batch)))
        found, _ = _expect(channel, TensorList)
        if [entry.name for entry in found.entries] != batch:
            raise PeerError("expected the tensors that were asked for, got others")
        entries += found.entries
    return entries


def ask_tokens(channel: HeadChannel, digest: str, size: int) -> TokenBytes:
    """The bytes of the model's tokens. Raises `PeerError` for others than were named, or what are none."""
    data = bytearray()
    while len(data) < size:
        channel.tell("receiving", len(data) / size)
        channel.ask(AskTokens(offset=len(data)))
        answer, more = _expect(channel, TensorBytes)
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


@contextlib.contextmanager
def fetched(model: StoredModel, channel: HeadChannel, spared: Container[str] = frozenset()) -> Iterator[int]:
    """All tensors that `model` knows of but those named `spared`, right and in the store as long as this
    lasts; yields the bytes that came.

    Raises `ClusterError` when they do not fit on the disk, the head gives up, or what comes is damaged twice.
    """
    needed = {entry.digest: entry.size_bytes for name, entry in model.entries.items() if name not in spared}
    with model.store.reserve(needed):
        missing = _check_stored(model.store, needed, channel)
        pull = _Pull(model.store, missing, channel)
        if missing:
            pull.run()
        yield pull.received


def _check_stored(store: WeightStore, needed: dict[str, int], channel: HeadChannel) -> dict[str, int]:
    """What of `needed` is not in the store, or was not as it should be."""
    there = {digest for digest in needed if store.holds(digest)}
    total, done = sum(needed[digest] for digest in there), 0

    def step(size: int) -> None:
        nonlocal done
        done += size
        channel.tell("checking", min(1.0, done / total))

    log.info("%s of %s of weights are stored in %s", mib(total), mib(sum(needed.values())), store.folder)
    right = {digest for digest in there if store.check(digest, needed[digest], step)}
    if right != there:
        log.warning(
            "%d stored tensor(s) in %s were damaged; the head sends them again",
            len(there - right),
            store.folder,
        )
    return {digest: size for digest, size in needed.items() if digest not in right}


class _Pull:
    """Brings the `missing` tensors (digest -> bytes) into the store."""

    def __init__(self, store: WeightStore, missing: dict[str, int], channel: HeadChannel) -> None:
        self.received = 0
        self._store = store
        self._sizes = missing
        self._channel = channel
        self._todo = deque(missing)
        self._asked: deque[tuple[Partial, AskBytes]] = deque()
        self._open: dict[str, Partial] = {}
        self._next = 0  # of the first tensor in `_todo`, once it is open
        self._resumed = 0
        self._damaged: set[str] = set()
        self._done = 0
        self._started_s = self._logged_s = time.monotonic()

    def run(self) -> None:
        total = sum(self._sizes.values())
        log.info("receiving %s of weights in %d tensors from the head", mib(total), len(self._sizes))
        try:
            while self._todo or self._asked:
                self._ask()
                if self._asked:
                    self._take(*self._asked.popleft())
                    self._report(total)
        finally:
            for partial in self._open.values():
                partial.close()
        spent_s = time.monotonic() - self._started_s
        log.info(
            "received %s in %.1f s (%s were there from an earlier attempt)",
            mib(self.received),
            spent_s,
            mib(self._resumed),
        )

    def _ask(self) -> None:
        """Asks for the next ranges, until the window is full."""
        while len(self._asked) < limits.WEIGHT_WINDOW and self._todo:
            digest = self._todo[0]
            if digest not in self._open:
                partial = self._open[digest] = self._store.partial(digest, self._sizes[digest])
                self._next = partial.held
                self._done += partial.held
                self._resumed += partial.held
            partial = self._open[digest]
            if self._next < partial.size:
                question = AskBytes(
                    digest=digest,
                    offset=self._next,
                    size=min(limits.WEIGHT_CHUNK_BYTES, partial.size - self._next),
                )
                self._channel.ask(question)
                self._asked.append((partial, question))
                self._next += question.size
            if self._next == partial.size:
                self._todo.popleft()
            if (
                partial.held == partial.size
            ):  # an earlier attempt ended just before its last step, or there is nothing in it
                self._finish(partial)

    def _take(self, partial: Partial, question: AskBytes) -> None:
        answer, data = _expect(self._channel, TensorBytes)
        if (answer.digest, answer.offset, len(data)) != (question.digest, question.offset, question.size):
            raise PeerError(
                f"expected {question.size} bytes from {question.offset} on, got {len(data)} from "
                f"{answer.offset} on"
            )
        partial.write(data)
        self.received += len(data)
        self._done += len(data)
        if partial.held == partial.size:
            self._finish(partial)

    def _finish(self, partial: Partial) -> None:
        is_right = partial.finish()
        self._open.pop(partial.digest).close()
        if is_right:
            return
        self._done -= partial.size
        if partial.digest in self._damaged:
            raise ClusterError(
                "weights came damaged from the head twice; check the disk and the memory of both devices"
            )
        log.warning("a tensor of %s came damaged; it is fetched again", mib(partial.size))
        self._damaged.add(partial.digest)
        self._todo.append(partial.digest)

    def _report(self, total: int) -> None:
        share = self._done / total
        self._channel.tell("receiving", share)
        if time.monotonic() - self._logged_s > LOG_EVERY_S:
            self._logged_s = time.monotonic()
            log.info("received %s of %s (%.0f%%)", mib(self._done), mib(total), 100 * share)


def _expect(channel: HeadChannel, kind: type[Answer]) -> tuple[Answer, bytes | memoryview]:
    """The next answer, which must be of this kind."""
    answer, data = channel.answer()
    if isinstance(answer, Error):
        raise ClusterError(f"the head cannot send the weights: {answer.text}")
    if not isinstance(answer, kind):
        raise PeerError(f"expected {kind.__name__} from the head, got {type(answer).__name__}")
    return answer, data
