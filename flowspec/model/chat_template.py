"""What stands between a dialogue and a model's chat template, which is its publisher's program.

transformers runs it in Jinja's sandbox: it reaches no files and no Python objects, and one `range` has 100000
items at most. Loops in loops, which would take days, are ended here. A single operation that makes a text of
gigabytes (`'x' * 10 ** 10`) is not seen before it is done.

Special tokens come from the template alone. What people and tools wrote may have the text of one: a forged
turn, or a question about special tokens. So before the template renders a dialogue, each such text becomes a
private character, which nothing in the dialogue has; and when what was rendered is tokenised, it is cut in
two by another one, whose tokens are left out. The model then reads what was written, and no token of its own.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import jinja2

from flowspec.errors import InputError, first_line

SECONDS_MAX = 20.0
"""A dialogue of 400 turns takes some hundredths of one."""
Trace = Callable[[FrameType, str, Any], Any]
_FILE = "<template>"
"""What Jinja calls the code that it makes of a template."""
_PRIVATE = range(0x100000, 0x10FFFE)


class EndlessError(Exception):
    """A template ran for too long."""


@contextlib.contextmanager
def bounded_time(seconds: float = SECONDS_MAX) -> Iterator[None]:
    """Raises `EndlessError` in a template that runs for longer within: the clock is looked at before each of
    its lines. A debugger's own tracing stands still meanwhile."""
    deadline_s = time.monotonic() + seconds

    def on_line(frame: FrameType, event: str, value: Any) -> Trace:
        if time.monotonic() > deadline_s:
            raise EndlessError(f"it was not done within {seconds:g} s")
        return on_line

    def on_call(frame: FrameType, event: str, value: Any) -> Trace | None:
        return on_line if frame.f_code.co_filename == _FILE else None

    old = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield
    finally:
        sys.settrace(old)


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateNames:
    """`variables` are the names that stand for themselves, `fields` those behind a dot, and texts in quotes,
    by which fields are asked for, too."""

    variables: frozenset[str]
    fields: frozenset[str]


def names_in(template: str) -> TemplateNames:
    """The names in a template. It is cut into words and not understood, so tags that transformers adds to
    Jinja do no harm. Raises `InputError` for what is no template."""
    variables: set[str] = set()
    fields: set[str] = set()
    is_field = False
    try:
        for _, kind, word in jinja2.Environment(autoescape=False).lex(template):
            if kind == "name":
                (fields if is_field else variables).add(word)
            elif kind == "string":
                fields.add(word[1:-1])
            if kind != "whitespace":
                is_field = kind == "operator" and word == "."
    except jinja2.TemplateSyntaxError as error:
        raise InputError(f"the model's chat template cannot be read: {first_line(error)}") from None
    return TemplateNames(variables=frozenset(variables), fields=frozenset(fields))


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
