"""What a daemon without the model and its head say to each other, so that it gets the tensors of its slice.

The daemon asks and the head answers, every question with one answer and in order: AskModel with ModelOffer,
AskNames with NameList, AskTensors with TensorList, AskBytes with TensorBytes, and any of them with Error.
AskModel goes over the control connection; the head then dials one for weights, so that chunks never stand
before a Commit or a Ping.
"""

from __future__ import annotations

import string
from dataclasses import dataclass

from flowspec.core.protocol import limits
from flowspec.core.protocol.checks import check, check_most, check_range, check_text

_HEX = frozenset(string.hexdigits.lower())


def _check_digest(value: str) -> None:
    check(
        len(value) == limits.DIGEST_CHARS and _HEX.issuperset(value),
        "digest",
        value,
        f"{limits.DIGEST_CHARS} hexadecimal digits",
    )


def _check_names(values: tuple[str, ...]) -> None:
    check_most("names", len(values), limits.TENSORS_LISTED_MAX)
    for value in values:
        check_text("names", value)


@dataclass(frozen=True, slots=True, kw_only=True)
class AskModel:
    """The daemon does not have the model that it was assigned layers of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOffer:
    """The text of the model's config.json, or what stands for it, and how many tensors it has.

    `gguf` is the architecture that a GGUF file names, whose tensors are then meant; empty for safetensors.
    """

    config: str
    gguf: str
    tensor_count: int

    def __post_init__(self) -> None:
        check(
            len(self.config) <= limits.CONFIG_CHARS_MAX,
            "config",
            self.config,
            f"at most {limits.CONFIG_CHARS_MAX} characters",
        )
        check_text("gguf", self.gguf)
        check_range("tensor_count", self.tensor_count, 1, limits.TENSORS_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class AskNames:
    """Which tensors are there, from number `first` on?"""

    first: int

    def __post_init__(self) -> None:
        check_range("first", self.first, 0, limits.TENSORS_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class NameList:
    """Names of tensors, in the head's order; as many as go into one message."""

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        _check_names(self.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class AskTensors:
    """What are these tensors?"""

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        _check_names(self.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A tensor as it lies in the checkpoint: dtype by its name there (of a GGUF file ggml's type), shape,
    bytes, and their SHA-256."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    digest: str

    def __post_init__(self) -> None:
        check_text("name", self.name)
        check_text("dtype", self.dtype)
        check(
            len(self.shape) <= limits.TENSOR_AXES_MAX,
            "shape",
            self.shape,
            f"at most {limits.TENSOR_AXES_MAX} axes",
        )
        for size in self.shape:
            check_range("shape", size, 0, limits.ID_MAX)
        check_range("size_bytes", self.size_bytes, 0, limits.TENSOR_BYTES_MAX)
        _check_digest(self.digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorList:
    """The tensors that were asked for, in that order."""

    entries: tuple[TensorEntry, ...]

    def __post_init__(self) -> None:
        check_most("entries", len(self.entries), limits.TENSORS_LISTED_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class AskBytes:
    """Send bytes `[offset, offset + size)` of the tensor with this digest."""

    digest: str
    offset: int
    size: int

    def __post_init__(self) -> None:
        _check_digest(self.digest)
        check_range("offset", self.offset, 0, limits.TENSOR_BYTES_MAX)
        check_range("size", self.size, 1, limits.WEIGHT_CHUNK_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBytes:
    """Bytes of a tensor from `offset` on; they travel as a frame of their own."""

    digest: str
    offset: int

    def __post_init__(self) -> None:
        _check_digest(self.digest)
        check_range("offset", self.offset, 0, limits.TENSOR_BYTES_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class AskTokens:
    """Send the bytes of the model's tokens (`TokenBytes`) from `offset` on, which were named in the Assign.

    It goes over the control connection, and so does the answer, TensorBytes: it is asked while nothing is
    computed, also by devices that need no weights of the head.
    """

    offset: int

    def __post_init__(self) -> None:
        check_range("offset", self.offset, 0, limits.TOKEN_TABLE_BYTES_MAX)


WeightQuestion = AskModel | AskNames | AskTensors | AskBytes | AskTokens
WeightAnswer = ModelOffer | NameList | TensorList | TensorBytes
