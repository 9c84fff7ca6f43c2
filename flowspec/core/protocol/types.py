"""Types of what devices say to each other: numbers, texts and lists, each with its bounds.

A message is a `Record`: msgpack carries it as a list, and the codec checks every type and bound when one
comes. Rules between fields stand in its `__post_init__`, and hold whenever one is built.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, TypeVar

from msgspec import Meta, Struct

from flowspec.core.protocol import limits
from flowspec.validation import PRINTABLE, Misfit


class Record(Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """A message, or a part of one. A class that inherits says `frozen` and `kw_only` again."""

    def expect(self, *rules: tuple[str, bool, str]) -> None:
        """Raises `Misfit` for the first that does not hold; each is a field, whether it fits, what does."""
        for name, holds, expected in rules:
            if not holds:
                raise Misfit((name,), expected, getattr(self, name))


class Message(Record, frozen=True, kw_only=True):
    """What goes as one; a part of others is a `Record` alone."""


def one_of(*names: str) -> Meta:
    """Of a text: it is one of these, the empty one too if that is among them."""
    listed = ", ".join(filter(None, names))
    return Meta(
        pattern=rf"\A(?:{'|'.join(map(re.escape, names))})\Z",
        description=f"one of {listed}" + (" or nothing" if "" in names else ""),
    )


_PRINTABLE = rf"\A{PRINTABLE}*\Z"
_Entry = TypeVar("_Entry")

Id = Annotated[int, Meta(ge=0, le=limits.ID_MAX)]
IdOrNone = Annotated[int, Meta(ge=-1, le=limits.ID_MAX)]
Count = Id
Token = Annotated[int, Meta(ge=0, le=limits.VOCABULARY_MAX)]
Position = Annotated[int, Meta(ge=0, le=limits.CONTEXT_MAX)]
Length = Annotated[int, Meta(ge=1, le=limits.CONTEXT_MAX)]  # of a text, in tokens
Layer = Annotated[int, Meta(ge=0, le=limits.LAYERS_MAX)]
Share = Annotated[float, Meta(ge=0, le=1)]
Seconds = Annotated[float, Meta(ge=0, le=1e6)]
Lease = Annotated[float, Meta(ge=0, le=3600)]  # seconds that somebody waits
Instant = Annotated[float, Meta(ge=0, le=1e12)]  # seconds by a clock
Megahertz = Annotated[float, Meta(ge=0, le=1e6)]
Celsius = Annotated[float, Meta(ge=limits.CELSIUS_RANGE[0], le=limits.CELSIUS_RANGE[1])]

Name = Annotated[str, Meta(max_length=limits.NAME_CHARS_MAX, pattern=_PRINTABLE)]
Line = Annotated[str, Meta(max_length=limits.TEXT_CHARS_MAX, pattern=_PRINTABLE)]  # is logged or shown
Digest = Annotated[str, Meta(pattern=rf"\A[0-9a-f]{{{limits.DIGEST_CHARS}}}\Z", description="a SHA-256")]

Rows = Annotated[tuple[_Entry, ...], Meta(max_length=limits.NODES_PER_SEGMENT_MAX)]  # an entry for each


def is_numeric(host: str) -> bool:
    """Whether a host (IPv6 without brackets) is an IP address already."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
