"""Special tokens in a dialogue come from the model's chat template alone.

What people and tools wrote may have the text of one: a forged turn, or a question about special tokens. So
before the template renders a dialogue, each such text becomes a private character, which nothing in the
dialogue has; and when what was rendered is tokenised, it is cut in two by another one, whose tokens are left
out. The model then reads what was written, and no token of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_PRIVATE = range(0x100000, 0x10FFFE)


class SpanningTokenError(Exception):
    """A tokenizer has no way to take the text of a special token for text."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """What a template made of a dialogue, with private characters in place of the texts `plain` has."""

    text: str
    plain: Mapping[str, str] = field(default_factory=dict)

    def readable(self) -> str:
        """With those texts themselves."""
        return self._replace(lambda text: text)

    def cut(self) -> tuple[str, str]:
        """The same with each of those texts cut in two, and the character that cuts."""
        cutting = next(_unused(f"{self.text}{''.join(self.plain)}"))
        return self._replace(lambda text: f"{text[0]}{cutting}{text[1:]}"), cutting

    def _replace(self, change: Callable[[str], str]) -> str:
        return "".join(change(self.plain[each]) if each in self.plain else each for each in self.text)


class HiddenTokens:
    """Hides the texts `marks` of special tokens in `dialogue`, all that people and tools wrote."""

    def __init__(self, marks: Collection[str], dialogue: Any) -> None:
        ordered = sorted((mark for mark in marks if len(mark) > 1), key=lambda mark: (-len(mark), mark))
        self._pattern = re.compile("|".join(map(re.escape, ordered))) if ordered else None
        texts = list(_texts(dialogue))
        found = {mark for text in texts for mark in (self._pattern.findall(text) if self._pattern else ())}
        private = _unused("".join(texts)) if found else iter(())
        self._hidden = {mark: next(private) for mark in ordered if mark in found}

    def hide(self, value: Any, but: Collection[str] = ()) -> Any:
        """The same value, a part of the dialogue, without those texts; `but` are left."""
        if not self._hidden:
            return value
        if isinstance(value, str):
            assert self._pattern is not None
            return self._pattern.sub(
                lambda match: match[0] if match[0] in but else self._hidden[match[0]], value
            )
        if isinstance(value, Mapping):
            return {self.hide(key, but): self.hide(each, but) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(each, but) for each in value]
        return value

    def rendered(self, text: str) -> Rendered:
        for private in self._hidden.values():
            text = text.replace(json.dumps(private)[1:-1], private)  # a template may write JSON in ASCII
        return Rendered(text, {private: mark for mark, private in self._hidden.items()})


def without_cuts(
    tokens: Sequence[int], spans: Sequence[tuple[int, int]], text: str, cutting: str
) -> list[int]:
    """The tokens of a cut text without those of the cuts; `spans` are the characters of each. Raises
    `SpanningTokenError` for a tokenizer that joins a cut with its neighbours."""
    found = []
    for token, (begin, end) in zip(tokens, spans, strict=True):
        if cutting not in text[begin:end]:
            found.append(token)
        elif end - begin > 1:
            raise SpanningTokenError
    return found


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _texts(key)
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


def _unused(text: str) -> Iterator[str]:
    """Private characters that a text has not."""
    used = set(text)
    return (chr(code) for code in _PRIVATE if chr(code) not in used)
