"""What a head gives of its model to daemons that lack it: answers to their questions, read from the
checkpoint's files in ranges.

Only tensors of this one model are given, and bytes only of those whose digest was given before. No tensor is
ever read whole.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flowspec.core.protocol import limits
from flowspec.core.protocol.device_messages import (
    AskBytes,
    AskNames,
    AskTensors,
    ModelOffer,
    NameList,
    TensorBytes,
    TensorEntry,
    TensorList,
    WeightAnswer,
    WeightQuestion,
)
from flowspec.errors import InputError, PeerError
from flowspec.model.files import ModelFiles
from flowspec.model.tensors import Extent
from flowspec.runtime.weights.digests import OpenFiles
from flowspec.validation import checked
from flowspec.wire.codec import BYTES, Tensor


class Offer:
    """Answers about one model until `close`; all answers are about the same state of its files.

    `folder` keeps digests (default: the user's cache folder); `step` is called between blocks of long work,
    and ends it by raising.
    """

    def __init__(
        self,
        files: ModelFiles,
        fingerprint: str,
        *,
        folder: Path | None = None,
        step: Callable[[], None] = lambda: None,
    ) -> None:
        self._files = files
        self._fingerprint = fingerprint
        self._step = step
        self._opened = OpenFiles(folder)
        self._given: dict[str, Extent] = {}
        self._names: list[str] = []

    def close(self) -> None:
        self._opened.close()

    def begin(self) -> ModelOffer:
        """The answer to AskModel. Raises `InputError` when the model is not what the head connected with, or
        cannot be offered."""
        if self._files.fingerprint() != self._fingerprint:
            raise _changed(self._files.model)
        self._extents = self._files.extents()
        self._names = sorted(self._extents)
        try:
            found = ModelOffer(
                config=self._files.config_text(),
                gguf=self._files.gguf_architecture,
                tensor_count=len(self._names),
            )
            return checked(found)
        except (OSError, ValueError) as error:
            raise InputError(f"model {self._files.model!r} cannot be sent: {error}") from None

    def answer(self, question: WeightQuestion) -> tuple[WeightAnswer, Tensor | None]:
        """The answer to a daemon, and the bytes that go with it.

        Raises `InputError` when the checkpoint cannot be read or has changed, `PeerError` for what no correct
        daemon asks.
        """
        try:
            if isinstance(question, AskNames):
                names = tuple(self._names[question.first :][: limits.TENSORS_LISTED_MAX])
                return checked(NameList(names=names)), None
            if isinstance(question, AskTensors):
                return checked(TensorList(entries=self._entries(question.names))), None
            if isinstance(question, AskBytes):
                return TensorBytes(digest=question.digest, offset=question.offset), self._bytes(question)
        except (OSError, ValueError) as error:
            raise InputError(f"model {self._files.model!r} cannot be sent: {error}") from None
        raise PeerError("AskModel belongs on the control connection")

    def _entries(self, names: tuple[str, ...]) -> tuple[TensorEntry, ...]:
        entries = []
        for name in names:
            extent = self._extents.extent(name)
            digest = self._opened.digest(extent, lambda size: self._step())
            self._given[digest] = extent
            entries.append(
                TensorEntry(
                    name=name,
                    dtype=extent.dtype,
                    shape=extent.shape,
                    size_bytes=extent.size_bytes,
                    digest=digest,
                )
            )
        if not self._opened.unchanged():
            raise _changed(self._files.model)
        self._opened.save()
        return tuple(entries)

    def _bytes(self, question: AskBytes) -> Tensor:
        extent = self._given.get(question.digest)
        if extent is None or question.offset + question.size > extent.size_bytes:
            raise PeerError(
                f"asked for bytes {question.offset} to {question.offset + question.size} of a tensor that "
                "was not offered"
            )
        data = self._opened.read(extent, question.offset, question.size)
        if not self._opened.unchanged((extent.path,)):
            raise _changed(self._files.model)
        return Tensor(rows=1, width=question.size, dtype=BYTES, data=data)


def _changed(model: str) -> InputError:
    return InputError(f"model {model!r} changed on the head since it connected; start again")
