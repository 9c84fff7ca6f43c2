"""Messages to bytes and back: a msgpack header frame and, for activations and weights, one raw tensor frame.

The header is `[protocol, kind, incarnation, sender, sequence, body, tensor]`. Bodies are positional lists, so
a frame names no fields and any message of another shape is refused. Decoding trusts nothing: sizes are
bounded before anything is parsed, types are checked one by one, and the message's own rules run last. What is
wrong raises `PeerError`, never anything else. bfloat16 has no numpy type; its bytes travel as they are and
only the name of the dtype says what they are.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, get_args, get_origin, get_type_hints

import msgpack

from flowspec.core.protocol import limits, messages
from flowspec.core.protocol.messages import Message
from flowspec.core.protocol.weight_messages import TensorBytes
from flowspec.errors import PeerError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
BYTES = "uint8"
"""The dtype of a payload of weights, one row of bytes: only their entry in the checkpoint says what they are.
"""
_PAYLOAD_BYTES = {**DTYPE_BYTES, BYTES: 1}
_UNPACKED = {"use_list": True, "strict_map_key": True, "max_array_len": limits.LIST_MAX}
"""What msgpack may make of a header: lists longer than any that a message has would become many objects
before they are refused."""
KINDS: tuple[type, ...] = get_args(Message)
_KIND_OF = {cls: kind for kind, cls in enumerate(KINDS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """Activations `[rows, width]`, or a row of bytes of weights, as raw bytes, row-major and
    little-endian."""

    rows: int
    width: int
    dtype: str
    data: bytes | memoryview

    def select(self, rows: Sequence[int]) -> Tensor:
        """The same activations with only these rows, in growing order."""
        if len(rows) == self.rows:
            return self
        size = self.width * DTYPE_BYTES[self.dtype]
        data = b"".join(bytes(self.data[row * size : (row + 1) * size]) for row in rows)
        return Tensor(rows=len(rows), width=self.width, dtype=self.dtype, data=data)

    def apart(self) -> tuple[Tensor, ...]:
        """The rows one by one, each with memory of its own."""
        size = self.width * DTYPE_BYTES[self.dtype]
        starts = range(0, self.rows * size, size)
        return tuple(
            Tensor(rows=1, width=self.width, dtype=self.dtype, data=bytes(self.data[at : at + size]))
            for at in starts
        )


def joined(rows: Sequence[Sequence[Tensor]]) -> Tensor:
    """Activations of whose rows, each of one dtype, the parts come one by one (`Tensor.apart`): `[rows,
    width]`, all parts side by side."""
    first = rows[0]
    return Tensor(
        rows=len(rows),
        width=sum(part.width for part in first),
        dtype=first[0].dtype,
        data=b"".join(part.data for row in rows for part in row),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """A message with who sent it: the cluster's incarnation, the sender's name and its count on this
    connection."""

    incarnation: int
    sender: str
    sequence: int
    message: Message
    tensor: Tensor | None = None


def encode(envelope: Envelope) -> list[bytes | memoryview]:
    """The frames of an envelope: header, and the payload if there is one."""
    tensor = envelope.tensor
    header = msgpack.packb(
        [
            messages.PROTOCOL_VERSION,
            _KIND_OF[type(envelope.message)],
            envelope.incarnation,
            envelope.sender,
            envelope.sequence,
            _plain(envelope.message),
            None if tensor is None else [tensor.rows, tensor.width, tensor.dtype],
        ]
    )
    return [header] if tensor is None else [header, tensor.data]


def decode(frames: Sequence[bytes | memoryview]) -> Envelope:
    """The envelope in `frames`; raises `PeerError` for anything that `encode` would not have written."""
    if not 1 <= len(frames) <= 2:
        raise PeerError(f"expected 1 or 2 frames, got {len(frames)}")
    if len(frames[0]) > limits.HEADER_BYTES_MAX:
        raise PeerError(f"expected a header of at most {limits.HEADER_BYTES_MAX} bytes, got {len(frames[0])}")
    try:
        header = msgpack.unpackb(frames[0], **_UNPACKED)
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise PeerError(f"expected a msgpack header, got {len(frames[0])} other bytes ({error})") from None
    if not isinstance(header, list) or not header:
        raise PeerError(f"expected a header list, got {type(header).__name__}")
    if type(header[0]) is not int or header[0] != messages.PROTOCOL_VERSION:
        raise PeerError(
            f"expected protocol {messages.PROTOCOL_VERSION}, got {_shown(header[0])}; run the same FlowSpec "
            "version everywhere"
        )
    if len(header) != 7:
        raise PeerError(f"expected 7 header entries, got {len(header)}")
    _, kind, incarnation, sender, sequence, body, shape = header
    if type(kind) is not int or not 0 <= kind < len(KINDS):
        raise PeerError(f"expected a message kind below {len(KINDS)}, got {_shown(kind)}")
    try:
        envelope = Envelope(
            incarnation=_count(incarnation),
            sender=_text(sender),
            sequence=_count(sequence),
            message=_READERS[KINDS[kind]](body),
            tensor=_tensor(shape, frames),
        )
    except (ValueError, TypeError) as error:
        raise PeerError(f"broken {KINDS[kind].__name__}: {error}") from None
    _check_payload(envelope.message, envelope.tensor)
    return envelope


def _check_payload(message: Message, tensor: Tensor | None) -> None:
    """Raises `PeerError` for a payload that does not belong to its message."""
    if isinstance(message, TensorBytes):
        if (
            tensor is None
            or tensor.dtype != BYTES
            or tensor.rows != 1
            or not 1 <= tensor.width <= limits.WEIGHT_CHUNK_BYTES
        ):
            found = "none" if tensor is None else f"[{tensor.rows}, {tensor.width}] {tensor.dtype}"
            raise PeerError(
                f"expected a payload of 1 to {limits.WEIGHT_CHUNK_BYTES} bytes of weights, got {found}"
            )
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


def _tensor(shape: Any, frames: Sequence[bytes | memoryview]) -> Tensor | None:
    if shape is None:
        if len(frames) != 1:
            raise ValueError("a payload frame without its shape")
        return None
    if len(frames) != 2 or not isinstance(shape, list) or len(shape) != 3:
        raise ValueError("a payload shape without its frame")
    rows, width, dtype = _count(shape[0]), _count(shape[1]), _text(shape[2])
    if dtype not in _PAYLOAD_BYTES:
        raise ValueError(f"payload dtype {dtype!r:.40} is none of {', '.join(_PAYLOAD_BYTES)}")
    size = rows * width * _PAYLOAD_BYTES[dtype]
    if size > limits.PAYLOAD_BYTES_MAX or size != len(frames[1]):
        raise ValueError(f"payload [{rows}, {width}] {dtype} with {len(frames[1])} bytes")
    return Tensor(rows=rows, width=width, dtype=dtype, data=frames[1])


def _plain(value: Any) -> Any:
    """A message as nested lists; tuples of numbers pass as they are."""
    names = _FIELDS.get(type(value))
    if names is not None:
        return [_plain(getattr(value, name)) for name in names]
    if type(value) is tuple and value and type(value[0]) in _FIELDS:
        return [_plain(item) for item in value]
    return value


def _shown(value: Any) -> str:
    """What came, in short. Of a list only its kind: the `repr` of one nested 1000 deep is a
    RecursionError."""
    return (
        f"{value!r:.40}"
        if isinstance(value, (int, float, str, bytes, types.NoneType))
        else f"a {type(value).__name__}"
    )


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= limits.ID_MAX:
        raise ValueError(f"expected a number from 0 to {limits.ID_MAX}, got {_shown(value)}")
    return value


def _text(value: Any) -> str:
    if type(value) is not str or len(value) > limits.NAME_CHARS_MAX or not value.isprintable():
        raise ValueError(f"expected a short printable text, got {_shown(value)}")
    return value


def _scalar_reader(kind: type) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if type(value) is not kind:
            raise ValueError(f"expected {kind.__name__}, got {_shown(value)}")
        return value

    def read_float(value: Any) -> float:
        if type(value) not in (int, float):
            raise ValueError(f"expected a number, got {_shown(value)}")
        return float(value)

    return read_float if kind is float else read


def _tuple_reader(item: Any) -> Callable[[Any], Any]:
    read_item = None if item in (int, bool) else _reader(item)

    def read(value: Any) -> Any:
        if type(value) is not list:
            raise ValueError(f"expected a list, got {_shown(value)}")
        if read_item is not None:
            return tuple(read_item(entry) for entry in value)
        if any(type(entry) is not item for entry in value):
            raise ValueError(f"expected only {item.__name__} entries")
        return tuple(value)

    return read


def _row_reader(items: Sequence[Any]) -> Callable[[Any], Any]:
    """For a tuple of so many entries, each of its own type."""
    readers = [_reader(item) for item in items]

    def read(value: Any) -> Any:
        if type(value) is not list or len(value) != len(readers):
            raise ValueError(f"expected a list of {len(readers)}, got {_shown(value)}")
        return tuple(read_entry(entry) for read_entry, entry in zip(readers, value, strict=True))

    return read


def _record_reader(cls: type) -> Callable[[Any], Any]:
    hints = get_type_hints(cls)
    readers = [(field.name, _reader(hints[field.name])) for field in fields(cls)]

    def read(value: Any) -> Any:
        if type(value) is not list or len(value) != len(readers):
            raise ValueError(f"expected {len(readers)} entries for {cls.__name__}")
        return cls(
            **{name: read_field(entry) for (name, read_field), entry in zip(readers, value, strict=True)}
        )

    return read


def _union_reader(kinds: Sequence[Any]) -> Callable[[Any], Any]:
    readers = [_reader(kind) for kind in kinds]
    by_size = (
        {len(fields(kind)): read for kind, read in zip(kinds, readers, strict=True)} if readers[1:] else {}
    )

    def read(value: Any) -> Any:
        if value is None:
            return None
        chosen = by_size.get(len(value) if type(value) is list else 0, readers[0])
        return chosen(value)

    return read


def _reader(hint: Any) -> Callable[[Any], Any]:
    """A strict reader for one annotated type: a scalar, `tuple[T, ...]`, `tuple[T, U]`, a message record, or
    None or one of these; of several records, no two have as many fields."""
    if get_origin(hint) is typing.Literal:
        return _scalar_reader(str)
    if get_origin(hint) in (types.UnionType, typing.Union):
        return _union_reader([arg for arg in get_args(hint) if arg is not type(None)])
    if get_origin(hint) is tuple:
        items = get_args(hint)
        return _tuple_reader(items[0]) if items[-1] is Ellipsis else _row_reader(items)
    if hint in (int, float, bool, str):
        return _scalar_reader(hint)
    if hint not in _READERS:
        _READERS[hint] = _record_reader(hint)
        _FIELDS[hint] = tuple(field.name for field in fields(hint))
    return _READERS[hint]


_READERS: dict[type, Callable[[Any], Any]] = {}
_FIELDS: dict[type, tuple[str, ...]] = {}
for _kind in KINDS:
    _reader(_kind)
