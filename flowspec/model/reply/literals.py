"""Values as models write them in calls that are no JSON: Python's literals, JSON's names, and Gemma's strings
between marks of their own. A scanner of ours, since Python's own takes no names such as `from` for arguments,
and warns of what somebody else wrote."""

from __future__ import annotations

import re
from typing import Any

from flowspec.plain_json import DIGITS_MAX, Reals

DEPTH_MAX = 64
GEMMA_QUOTE = '<|"|>'
_STRING = {quote: re.compile(rf"{quote}((?:[^{quote}\\]|\\.)*){quote}", re.DOTALL) for quote in "'\""}
_ESCAPE = re.compile(r"\\(?:U([0-9a-fA-F]{8})|u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_ESCAPED = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "\n": "",
    **{each: each for each in "\\'\"/"},
}
_WORD = re.compile(r"[^\s,\[\](){}:='\"<]+")
_INTEGER = re.compile(rf"[+-]?[0-9]{{1,{DIGITS_MAX}}}")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_NAMES = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_SPACE = re.compile(r"\s*")


class Unfinished(ValueError):
    """The text ends within a value, of which there may be more."""


def is_word(text: str) -> bool:
    """Whether this is a name, as `Literals.word` takes them."""
    return _WORD.fullmatch(text) is not None


class Literals:
    """Goes through a text; each method raises `ValueError` for one that is not what it looks for.

    `bare`: words that are no number and no name are texts, and keys need no quotes.
    """

    def __init__(self, text: str, *, bare: bool = False) -> None:
        self._text = text
        self._bare = bare
        self._reals = Reals()
        self.at = 0

    def skip(self) -> None:
        found = _SPACE.match(self._text, self.at)
        assert found is not None
        self.at = found.end()

    def take(self, expected: str) -> bool:
        """Whether this is next; it is behind us then."""
        self.skip()
        if not self._text.startswith(expected, self.at):
            return False
        self.at += len(expected)
        return True

    def expect(self, expected: str) -> None:
        if not self.take(expected):
            raise ValueError(f"expected {expected}")

    def word(self) -> str:
        """A name of anything."""
        self.skip()
        if (found := _WORD.match(self._text, self.at)) is None:
            raise ValueError("expected a name")
        self.at = found.end()
        return found[0]

    @property
    def is_over(self) -> bool:
        self.skip()
        return self.at == len(self._text)

    def value(self, depth: int = 0) -> Any:
        """A value, as JSON may have it."""
        if depth > DEPTH_MAX:
            raise ValueError(f"expected at most {DEPTH_MAX} brackets in brackets")
        self.skip()
        first = self._text[self.at : self.at + 1]
        if first in _STRING or self._text.startswith(GEMMA_QUOTE, self.at):
            return self._string()
        if self.take("["):
            return self._items("]", depth)
        if self.take("("):
            return self._items(")", depth)
        if self.take("{"):
            return self.fields("}", depth)
        return self._named(self.word())

    def fields(self, end: str, depth: int = 0, between: str = ":") -> dict[str, Any]:
        """Names and values up to `end`."""
        found: dict[str, Any] = {}
        while not self.take(end):
            if found:
                self.expect(",")
                if self.take(end):
                    break
            self.skip()
            is_quoted = self._text[self.at : self.at + 1] in _STRING or self._text.startswith(
                GEMMA_QUOTE, self.at
            )
            if not is_quoted and not self._bare and between == ":":
                raise ValueError("expected a name in quotes")
            name = self._string() if is_quoted else self.word()
            self.expect(between)
            found[name] = self.value(depth + 1)
        return found

    def _items(self, end: str, depth: int) -> list[Any]:
        found: list[Any] = []
        while not self.take(end):
            if found:
                self.expect(",")
                if self.take(end):
                    break
            found.append(self.value(depth + 1))
        return found

    def _string(self) -> str:
        if self.take(GEMMA_QUOTE):
            end = self._text.find(GEMMA_QUOTE, self.at)
            if end < 0:
                raise Unfinished("expected the end of a text")
            begin, self.at = self.at, end + len(GEMMA_QUOTE)
            return self._text[begin:end]
        found = _STRING[self._text[self.at]].match(self._text, self.at)
        if found is None:
            raise Unfinished("expected the end of a text")
        self.at = found.end()
        return _ESCAPE.sub(_unescaped, found[1])

    def _named(self, word: str) -> Any:
        if word in _NAMES:
            return _NAMES[word]
        if _INTEGER.fullmatch(word):
            return int(word)
        if _NUMBER.fullmatch(word):
            return self._reals.read(word)
        if self._bare:
            return word
        raise ValueError(f"expected a value, got {word:.20}")


def _unescaped(found: re.Match[str]) -> str:
    code = found[1] or found[2] or found[3]
    if not code:
        return _ESCAPED.get(found[4], found[0])
    try:
        return chr(int(code, 16))
    except OverflowError:
        raise ValueError("expected a character") from None
