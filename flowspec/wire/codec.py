"""Messages to bytes and back: a msgpack header frame and, for activations and weights, one raw tensor frame.

Header and message are lists, so a frame names no fields. What stands last and has a default may be left out;
any other shape is refused. Decoding trusts nothing: sizes are bounded before anything is parsed, msgspec
checks types and bounds as the message's class declares them, and the message's own rules run last. What is
wrong raises `PeerError`, never anything else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct
from msgspec.structs import replace

from flowspec import checking
from flowspec.core.protocol import cluster_messages, device_messages, limits, messages
from flowspec.core.protocol.types import Count, Id, Message, Name, Record, one_of
from flowspec.errors import PeerError, first_line
from flowspec.validation import misfit, plain

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
BYTES = "uint8"  # a row of bytes of weights: only their entry in the checkpoint says what they are
_VERSION = messages.PROTOCOL_VERSION
_PAYLOAD_BYTES = {**DTYPE_BYTES, BYTES: 1}
KINDS = tuple(
    kind
    for module in (cluster_messages, messages, device_messages)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Message) and not kind.__subclasses__()
)
"""All messages; a header names one by its place here."""
_EXPLAINED_BYTES_MAX = 1 << 16  # a longer message is not taken apart to say which part of it is broken
_BROKEN = (msgspec.DecodeError, RecursionError)


class Tensor(Struct, frozen=True, kw_only=True):
    """Activations `[rows, width]`, or a row of bytes of weights: raw, row-major and little-endian."""

    rows: int
    width: int
    dtype: str
    data: bytes | memoryview

    def select(self, rows: Sequence[int]) -> Tensor:
        """The same activations with only these rows, in growing order."""
        if len(rows) == self.rows:
            return self
        return replace(self, rows=len(rows), data=b"".join(map(self._row, rows)))

    def apart(self) -> tuple[Tensor, ...]:
        """The rows one by one, each with memory of its own."""
        return tuple(replace(self, rows=1, data=self._row(row)) for row in range(self.rows))

    def _row(self, row: int) -> bytes:
        size = self.width * DTYPE_BYTES[self.dtype]
        return bytes(self.data[row * size : (row + 1) * size])


def join_rows(rows: Sequence[Sequence[Tensor]]) -> Tensor:
    """Activations of whose rows, each of one dtype, the parts come one by one (`Tensor.apart`): `[rows,
    width]`, all parts side by side."""
    first, data = rows[0], b"".join(part.data for row in rows for part in row)
    return replace(first[0], rows=len(rows), width=sum(part.width for part in first), data=data)


class Envelope(Struct, frozen=True):
    """A message, the cluster's incarnation, the sender's name, and its count on this connection."""

    incarnation: int
    sender: str
    sequence: int
    message: Message
    tensor: Tensor | None = None


class _Shape(Record, frozen=True, kw_only=True):
    rows: Count
    width: Count
    dtype: Annotated[str, one_of(*_PAYLOAD_BYTES)]


class _Header(Record, frozen=True, kw_only=True):
    protocol: Annotated[int, Meta(ge=_VERSION, le=_VERSION, description=f"{_VERSION}, of the protocol")]
    kind: Annotated[int, Meta(ge=0, lt=len(KINDS))]
    incarnation: Id
    sender: Name
    sequence: Id
    body: Raw
    shape: _Shape | None


_KIND_OF = {cls: kind for kind, cls in enumerate(KINDS)}
_ENCODER = msgspec.msgpack.Encoder(enc_hook=plain)
_HEADER = msgspec.msgpack.Decoder(_Header)
_BODIES: list[msgspec.msgpack.Decoder[Any]] = [msgspec.msgpack.Decoder(kind) for kind in KINDS]


def encode(envelope: Envelope) -> list[bytes | memoryview]:
    """The frames of an envelope: header, and the payload if there is one. With `--check` they are read as
    they would be where they go; raises `BrokenCoreError` for what no peer would take as it is."""
    tensor, message, incarnation = envelope.tensor, envelope.message, envelope.incarnation
    kind, sender, count = _KIND_OF[type(message)], envelope.sender, envelope.sequence
    shape = None if tensor is None else (tensor.rows, tensor.width, tensor.dtype)
    header = _ENCODER.encode((_VERSION, kind, incarnation, sender, count, message, shape))
    frames: list[bytes | memoryview] = [header] if tensor is None else [header, tensor.data]
    if checking.is_on():
        try:
            found = decode(frames)
        except PeerError as error:
            raise checking.BrokenCoreError(f"a check failed: this device made a {error}") from None
        if found != envelope:
            raise checking.BrokenCoreError(f"a check failed: {envelope!r:.400} comes as {found!r:.400}")
    return frames


def decode(frames: Sequence[bytes | memoryview]) -> Envelope:
    """The envelope in `frames`; raises `PeerError` for anything that `encode` would not have written."""
    if not 1 <= len(frames) <= 2:
        raise PeerError(f"expected 1 or 2 frames, got {len(frames)}")
    if len(frames[0]) > limits.HEADER_BYTES_MAX:
        raise PeerError(f"expected a header of at most {limits.HEADER_BYTES_MAX} bytes, got {len(frames[0])}")
    try:
        header = _HEADER.decode(frames[0])
    except _BROKEN as error:
        raise _wrong_header(frames[0], error) from None
    kind = KINDS[header.kind]
    try:
        message = _BODIES[header.kind].decode(header.body)
    except _BROKEN as error:
        raise PeerError(f"broken {kind.__name__}: {_explained(header.body, kind, error)}") from None
    tensor = _tensor(header.shape, frames, kind.__name__)
    _check_payload(message, tensor)
    return Envelope(header.incarnation, header.sender, header.sequence, message, tensor)


def _wrong_header(header: bytes | memoryview, error: Exception) -> PeerError:
    """Of whatever version the header is, the first entry of its list says which."""
    is_short_list = len(header) > 1 and header[0] & 0xF0 == 0x90 and header[1] < 0x80
    if is_short_list and header[1] != _VERSION:
        hint = "run the same FlowSpec version everywhere"
        return PeerError(f"expected protocol {_VERSION}, got {header[1]}; {hint}")
    return PeerError(f"broken header: {_explained(header, _Header, error)}")


def _explained(data: bytes | memoryview | Raw, kind: type, error: Exception) -> str:
    """Which part of a header or a message is not what it should be."""
    if isinstance(error, msgspec.ValidationError) and len(memoryview(data)) <= _EXPLAINED_BYTES_MAX:
        with contextlib.suppress(*_BROKEN):  # beyond where it was broken
            return str(misfit(msgspec.msgpack.decode(data), kind))
    return first_line(error)


def _tensor(shape: _Shape | None, frames: Sequence[bytes | memoryview], kind: str) -> Tensor | None:
    if (shape is None) != (len(frames) == 1):
        raise PeerError(f"broken {kind}: expected a shape where there is a payload, and nowhere else")
    if shape is None:
        return None
    size, given = shape.rows * shape.width * _PAYLOAD_BYTES[shape.dtype], len(frames[1])
    if size > limits.PAYLOAD_BYTES_MAX or size != given:
        payload = f"payload [{shape.rows}, {shape.width}] {shape.dtype}"
        raise PeerError(f"broken {kind}: {payload} with {given} bytes")
    return Tensor(rows=shape.rows, width=shape.width, dtype=shape.dtype, data=frames[1])


def _check_payload(message: Message, tensor: Tensor | None) -> None:
    """Raises `PeerError` for a payload that does not belong to its message."""
    if isinstance(message, device_messages.TensorBytes):
        most = limits.WEIGHT_CHUNK_BYTES
        shape = (0, 0, "none") if tensor is None else (tensor.rows, tensor.width, tensor.dtype)
        if shape[::2] != (1, BYTES) or not 1 <= shape[1] <= most:
            raise PeerError(f"expected a payload of 1 to {most} bytes of weights, got {shape}")
    elif tensor is not None:
        if not isinstance(message, messages.Segment | messages.Features):
            raise PeerError(f"a {type(message).__name__} carries no payload")
        if tensor.dtype == BYTES:
            raise PeerError(f"expected a payload of {', '.join(DTYPE_BYTES)}, got bytes")
        if isinstance(message, messages.Features) and not tensor.width:
            raise PeerError("expected features, got rows of no width")
        if tensor.rows != message.row_count:
            raise PeerError(f"expected a payload of {message.row_count} rows, got {tensor.rows}")
    elif isinstance(message, messages.Features):
        raise PeerError(f"expected a payload of {message.row_count} rows, got none")
