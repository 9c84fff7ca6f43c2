"""Frames made wrong: by bytes, by the entries of the header, and by joining two of them.

Structure-aware: most mutations unpack the header, change one of its entries (numbers to neighbours or
extremes, lists to longer, shorter or deeper ones, anything to another type), and pack it again, so that what
is wrong lies deeper than in msgpack.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgpack

from flowspec.core.protocol import limits
from lab.fuzz.samples import Frames

DEPTH_MAX = 2000
"""Lists in lists: more than msgpack, or Python's stack, will take."""
LONG_MAX = 5000
"""Entries of a list: more than any message holds."""
HEADER_BODY = 5
"""Where the message's own fields stand in a header."""
BYTES_OF_INTEREST = bytes.fromhex("00 7F 80 90 91 C0 C1 C2 C3 C4 C6 C9 CA CB CF D3 D9 DB DD DF FF")
_NUMBERS = (
    *(0, 1, -1, 2**7, 2**8, 2**16, 2**31, 2**32 - 1, 2**53, limits.ID_MAX, limits.ID_MAX + 1),
    *(2**63 - 1, 2**63, 2**64 - 1, -(2**63)),
)
_FLOATS = (0.0, -0.0, 0.5, -1.0, 1e-308, 5e-324, 1e308, math.inf, -math.inf, math.nan)
_OTHERS: tuple[Any, ...] = (
    *(None, True, False, "", "x", "\x00", "two\nlines", "\u202e", "\U0001f600"),
    *("x" * (limits.NAME_CHARS_MAX + 1), b"", b"\xff\xfe"),
    *([], [[]], [None], [0, 0], {}, {"a": 1}, {0: 0}, msgpack.ExtType(5, b"x"), msgpack.Timestamp(1, 2)),
)

Where = tuple[list[Any], int]
"""A list in the header, and the number of one of its entries."""


def mutated(frames: Sequence[bytes], other: Sequence[bytes], chance: random.Random) -> Frames:
    """`frames` with one to three things wrong; `other` are those of another message, to take pieces of."""
    found = list(frames)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        found = chance.choices(_WAYS, _WEIGHTS)[0](found, other, chance)
    return found


def nudged(frames: Sequence[bytes], chance: random.Random) -> Frames:
    """`frames` with one number of the header changed by little or to another of its numbers, or a record in
    it twice or left out.

    Most often that is still a valid message.
    """
    header = _unpacked(frames)
    entries = [] if header is None else _entries(header[HEADER_BODY:])
    records = [(owner, at) for owner, at in entries if isinstance(owner[at], list)]
    numbers = [(owner, at) for owner, at in entries if type(owner[at]) is int]
    if not numbers:
        return list(frames)
    if records and chance.random() < 0.3:
        owner, at = chance.choice(records)
        owner[at : at + 1] = chance.choice(([], [owner[at]] * 2))
        return _packed(header, frames)
    owner, at = chance.choice(numbers)
    near = (owner[at] + 1, max(0, owner[at] - 1), 0, -1, owner[at] * 2)
    other, place = chance.choice(numbers)
    owner[at] = chance.choice((*near, other[place], other[place]))
    return _packed(header, frames)


def _entries(value: list[Any]) -> list[Where]:
    """All entries of a list and of the lists in it; without recursion, for lists that are nested deep."""
    found: list[Where] = []
    lists = [value]
    while lists:
        each = lists.pop()
        for at, entry in enumerate(each):
            found.append((each, at))
            if isinstance(entry, list):
                lists.append(entry)
    return found


def _unpacked(frames: Sequence[bytes]) -> list[Any] | None:
    """The header as lists, None where it is none."""
    try:
        header = msgpack.unpackb(frames[0], strict_map_key=False) if frames else None
    except (ValueError, TypeError, msgpack.exceptions.UnpackException):  # TypeError: a list as a map's key
        return None
    return header if isinstance(header, list) and header else None


def _packed(header: Any, frames: Sequence[bytes]) -> Frames:
    """The frames with this header; as they were if it cannot be packed (too deep, or a number too large)."""
    try:
        return [msgpack.packb(header), *frames[1:]]
    except (ValueError, OverflowError):
        return list(frames)


def _change_entry(frames: Frames, other: Sequence[bytes], chance: random.Random) -> Frames:
    header = _unpacked(frames)
    if header is None:
        return _change_bytes(frames, other, chance)
    owner, at = chance.choice(_entries(header))
    value = owner[at]
    way = chance.randrange(8)
    if way == 0 and isinstance(value, int):
        owner[at] = value + chance.choice((-1, 1, 7, -256, 1 << 20))
    elif way == 1:
        owner[at] = chance.choice(_NUMBERS)
    elif way == 2:
        owner[at] = chance.choice(_FLOATS)
    elif way == 3:
        owner[at] = chance.choice(_OTHERS)
    elif way == 4:
        del owner[at]
    elif way == 5:
        owner.insert(at, value)
    elif way == 6 and isinstance(value, list) and value:
        times = (2, 3, 1 + 300 // len(value), 1 + LONG_MAX // len(value))
        owner[at] = value * chance.choices(times, (40, 40, 19, 1))[0]
    else:
        owner[at] = _nested(value, chance.choices((1, 2, 40, DEPTH_MAX), (40, 40, 18, 2))[0])
    return _packed(header, frames)


def _nested(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value]
    return value


def _take_entry(frames: Frames, other: Sequence[bytes], chance: random.Random) -> Frames:
    """An entry of the other message in the place of one of ours."""
    header, theirs = _unpacked(frames), _unpacked(other)
    if header is None or theirs is None:
        return _change_bytes(frames, other, chance)
    owner, at = chance.choice(_entries(header))
    source, place = chance.choice(_entries(theirs))
    owner[at] = source[place]
    return _packed(header, frames)


def _change_bytes(frames: Frames, other: Sequence[bytes], chance: random.Random) -> Frames:
    if not frames:
        return [chance.randbytes(chance.randrange(40))]
    number = chance.randrange(len(frames))
    frame = bytearray(frames[number])
    at = chance.randrange(len(frame) + 1)
    way = chance.randrange(6)
    if way == 0 and at < len(frame):
        frame[at] = chance.choice(BYTES_OF_INTEREST)
    elif way == 1 and at < len(frame):
        frame[at] ^= 1 << chance.randrange(8)
    elif way == 2:
        del frame[at:]
    elif way == 3:
        del frame[at : at + chance.randint(1, 9)]
    elif way == 4:
        frame[at:at] = chance.randbytes(chance.randint(1, 9))
    else:
        frame[at:at] = frame[: chance.randrange(len(frame) + 1)]
    return [*frames[:number], bytes(frame), *frames[number + 1 :]]


def _splice(frames: Frames, other: Sequence[bytes], chance: random.Random) -> Frames:
    """The beginning of one header and the end of another."""
    first, second = (frames or [b""])[0], (other or [b""])[0]
    joined = first[: chance.randrange(len(first) + 1)] + second[chance.randrange(len(second) + 1) :]
    return [joined, *frames[1:]]


def _change_count(frames: Frames, other: Sequence[bytes], chance: random.Random) -> Frames:
    """Frames too many or too few, or another message's payload."""
    first = frames[:1]
    ways = (first, frames * 2, frames[::-1], [*frames, b""], [*first, *other[1:]], [*first, bytes(64)])
    return list(chance.choice(ways))


_WAYS: tuple[Callable[[Frames, Sequence[bytes], random.Random], Frames], ...] = (
    _change_entry,
    _take_entry,
    _change_bytes,
    _splice,
    _change_count,
)
_WEIGHTS = (10, 4, 4, 1, 1)
