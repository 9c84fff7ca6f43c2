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
from flowspec.core.protocol.checks import check, check_range

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
        check_range("tokens", len(self.texts), 1, limits.VOCABULARY_MAX)
        longest = max(map(len, self.texts))
        check(
            longest <= limits.TOKEN_BYTES_MAX,
            "tokens",
            longest,
            f"at most {limits.TOKEN_BYTES_MAX} bytes each",
        )

    @cached_property
    def packed(self) -> bytes:
        """As they travel: the count, the flag, the length of each in two bytes, and the texts."""
        lengths = struct.pack(f"<{len(self.texts)}H", *map(len, self.texts))
        found = _COUNT.pack(len(self.texts), self.drops_first_space) + lengths + b"".join(self.texts)
        check(
            len(found) <= limits.TOKEN_TABLE_BYTES_MAX,
            "tokens",
            len(found),
            f"at most {limits.TOKEN_TABLE_BYTES_MAX} bytes in all",
        )
        return found

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of what travels, in hexadecimal digits."""
        return hashlib.sha256(self.packed).hexdigest()

    @staticmethod
    def unpacked(data: bytes | bytearray | memoryview) -> TokenBytes:
        """What was `packed`; raises `ValueError` for anything else."""
        data = bytes(data)
        check(
            _COUNT.size <= len(data) <= limits.TOKEN_TABLE_BYTES_MAX, "tokens", len(data), "a table of tokens"
        )
        count, flag = _COUNT.unpack_from(data)
        check_range("tokens", count, 1, limits.VOCABULARY_MAX)
        check(flag in (0, 1), "tokens", flag, "a flag")
        begin = _COUNT.size + 2 * count
        check(begin <= len(data), "tokens", len(data), f"{begin} bytes at least")
        lengths = struct.unpack_from(f"<{count}H", data, _COUNT.size)
        check(begin + sum(lengths) == len(data), "tokens", len(data), f"{begin + sum(lengths)} bytes")
        texts = []
        for length in lengths:
            texts.append(data[begin : begin + length])
            begin += length
        return TokenBytes(tuple(texts), bool(flag))
