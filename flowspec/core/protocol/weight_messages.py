"""What a daemon without the model and its head say to each other, so that it gets the tensors of its slice.

The daemon asks and the head answers, every question with one answer and in order: AskModel with ModelOffer,
AskNames with NameList, AskTensors with TensorList, AskBytes with TensorBytes, and any of them with Error.
AskModel goes over the control connection; the head then dials one for weights, so that chunks never stand
before a Commit or a Ping.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from flowspec.core.protocol import limits
from flowspec.core.protocol.types import Digest, Message, Name, Names, Record, Shape

Offset = Annotated[int, Meta(ge=0, le=limits.TENSOR_BYTES_MAX)]


class WeightQuestion(Message, frozen=True, kw_only=True):
    """Of a daemon."""


class WeightAnswer(Message, frozen=True, kw_only=True):
    """Of a head."""


class AskModel(WeightQuestion, frozen=True, kw_only=True):
    """The daemon does not have the model that it was assigned layers of."""


class ModelOffer(WeightAnswer, frozen=True, kw_only=True):
    """The text of the model's config.json, or what stands for it, and how many tensors it has.

    `gguf` is the architecture that a GGUF file names, whose tensors are then meant; empty for safetensors.
    """

    config: Annotated[str, Meta(max_length=limits.CONFIG_CHARS_MAX)]
    gguf: Name
    tensor_count: Annotated[int, Meta(ge=1, le=limits.TENSORS_MAX)]


class AskNames(WeightQuestion, frozen=True, kw_only=True):
    """Which tensors are there, from number `first` on?"""

    first: Annotated[int, Meta(ge=0, le=limits.TENSORS_MAX)]


class NameList(WeightAnswer, frozen=True, kw_only=True):
    """Names of tensors, in the head's order; as many as go into one message."""

    names: Names


class AskTensors(WeightQuestion, frozen=True, kw_only=True):
    """What are these tensors?"""

    names: Names


class TensorEntry(Record, frozen=True, kw_only=True):
    """A tensor as it lies in the checkpoint: dtype by its name there (of a GGUF file ggml's type), shape,
    bytes, and their SHA-256."""

    name: Name
    dtype: Name
    shape: Shape
    size_bytes: Offset
    digest: Digest


class TensorList(WeightAnswer, frozen=True, kw_only=True):
    """The tensors that were asked for, in that order."""

    entries: Annotated[tuple[TensorEntry, ...], Meta(max_length=limits.TENSORS_LISTED_MAX)]


class AskBytes(WeightQuestion, frozen=True, kw_only=True):
    """Send bytes `[offset, offset + size)` of the tensor with this digest."""

    digest: Digest
    offset: Offset
    size: Annotated[int, Meta(ge=1, le=limits.WEIGHT_CHUNK_BYTES)]


class TensorBytes(WeightAnswer, frozen=True, kw_only=True):
    """Bytes of a tensor from `offset` on; they travel as a frame of their own."""

    digest: Digest
    offset: Offset


class AskTokens(WeightQuestion, frozen=True, kw_only=True):
    """Send the bytes of the model's tokens (`TokenBytes`) from `offset` on, which were named in the Assign.

    It goes over the control connection, and so does the answer, TensorBytes: it is asked while nothing is
    computed, also by devices that need no weights of the head.
    """

    offset: Annotated[int, Meta(ge=0, le=limits.TOKEN_TABLE_BYTES_MAX)]
