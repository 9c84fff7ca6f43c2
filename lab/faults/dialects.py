"""What devices of different arithmetics say: each has a language of its own, so a token shows who said it."""

from __future__ import annotations

from zlib import crc32

from flowspec.sim.language import HashLanguage

PLAIN = "plain"
"""The arithmetic of the language itself, which every device has that is not told otherwise."""


def spoken(language: HashLanguage, arithmetic: str) -> HashLanguage:
    """What a model says that is computed with this arithmetic."""
    return language if arithmetic in ("", PLAIN) else language.other(crc32(arithmetic.encode()))
