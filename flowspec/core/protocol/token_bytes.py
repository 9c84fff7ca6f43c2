"""What each token of a model's vocabulary adds to a text, in bytes: all that whoever computes the masks of a
grammar must know of a tokenizer.

The head makes it of the tokenizer; devices that draw or draft get it from the head, as one block of bytes
that they know by its digest.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from functools import cached_property

from flowspec.core.protocol import limits
from flowspec.validation import expect

_COUNT = struct.Struct("<IB")


@dataclass(frozen=True)
class TokenBytes:
    """`texts` by token id; that of an id that never stands for text (special tokens, padding) is empty.

    With `drops_first_space` a text loses the space that its first token begins with, as SentencePiece has it.
    Raises `ValueError` for what no vocabulary is.
    """

    texts: tuple[bytes, ...]
    drops_first_space: bool = False

    def __post_init__(self) -> None:
        count, most = len(self.texts), limits.VOCABULARY_MAX
        expect(1 <= count <= most, "tokens", count, f"1 to {most}")
        longest, most = max(map(len, self.texts)), limits.TOKEN_BYTES_MAX
        expect(longest <= most, "tokens", longest, f"at most {most} bytes each")

    @cached_property
    def packed(self) -> bytes:
        """As they travel: the count, the flag, the length of each in two bytes, and the texts."""
        lengths = struct.pack(f"<{len(self.texts)}H", *map(len, self.texts))
        found = _COUNT.pack(len(self.texts), self.drops_first_space) + lengths + b"".join(self.texts)
        most = limits.TOKEN_TABLE_BYTES_MAX
        expect(len(found) <= most, "tokens", len(found), f"at most {most} bytes in all")
        return found

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of what travels, in hexadecimal digits."""
        return hashlib.sha256(self.packed).hexdigest()

    @staticmethod
    def unpack(data: bytes | bytearray | memoryview) -> TokenBytes:
        """What was `packed`; raises `ValueError` for anything else."""
        data = bytes(data)
        size = len(data)
        expect(_COUNT.size <= size <= limits.TOKEN_TABLE_BYTES_MAX, "tokens", size, "a table of tokens")
        count, flag = _COUNT.unpack_from(data)
        expect(1 <= count <= limits.VOCABULARY_MAX, "tokens", count, f"1 to {limits.VOCABULARY_MAX}")
        expect(flag in (0, 1), "tokens", flag, "a flag")
        begin = _COUNT.size + 2 * count
        expect(begin <= size, "tokens", size, f"{begin} bytes at least")
        lengths = struct.unpack_from(f"<{count}H", data, _COUNT.size)
        expect(begin + sum(lengths) == size, "tokens", size, f"{begin + sum(lengths)} bytes")
        texts = []
        for length in lengths:
            texts.append(data[begin : begin + length])
            begin += length
        return TokenBytes(tuple(texts), bool(flag))
