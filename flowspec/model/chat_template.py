"""What stands between a dialogue and a model's chat template, which is its publisher's program.

transformers runs it in Jinja's sandbox: it reaches no files and no Python objects, and one `range` has 100000
items at most. Loops in loops are ended here; a single operation that makes gigabytes is not seen before.

Special tokens come from the template alone. In what people and tools wrote, each text of one becomes a
private character that nothing in the dialogue has; when what was rendered is tokenised, that text is cut in
two by another such character, whose tokens are left out. So the model reads what was written.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import FrameType
from typing import Any, NamedTuple

import jinja2

from flowspec.errors import InputError, first_line

SECONDS_MAX = 20.0
"""A dialogue of 400 turns takes some hundredths of one."""
_FILE = "<template>"
"""What Jinja calls the code that it makes of a template."""
_PRIVATE = range(0x100000, 0x10FFFE)


@contextlib.contextmanager
def bounded_time(seconds: float = SECONDS_MAX) -> Iterator[None]:
    """Raises `TimeoutError` in a template that runs for longer within: the clock is looked at before each of
    its lines. A debugger's own tracing stands still meanwhile."""
    deadline_s = time.monotonic() + seconds

    def look(frame: FrameType, event: str, value: Any) -> Any:
        if frame.f_code.co_filename != _FILE:
            return None
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"it was not done within {seconds:g} s")
        return look

    old = sys.gettrace()
    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(old)


class TemplateNames(NamedTuple):
    """`variables` are names that stand for themselves, `fields` those behind a dot, and texts in quotes."""

    variables: frozenset[str]
    fields: frozenset[str]


@lru_cache(maxsize=8)
def names_in(template: str) -> TemplateNames:
    """The names in a template. It is cut into words and not understood, so tags that transformers adds to
    Jinja do no harm. Raises `InputError` for what is no template."""
    variables, fields, is_field = set[str](), set[str](), False
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
    return TemplateNames(frozenset(variables), frozenset(fields))


@dataclass(frozen=True, slots=True)
class Rendered:
    """What a template made of a dialogue, with private characters in place of the texts in `plain`."""

    text: str
    plain: Mapping[int, str] = field(default_factory=dict)

    def readable(self) -> str:
        """With those texts themselves."""
        return self.text.translate(self.plain)

    def cut(self) -> tuple[str, str]:
        """With each of those texts cut in two, and the character that cuts."""
        cutting = chr(next(_unused(self.text)))
        halves = {code: f"{text[0]}{cutting}{text[1:]}" for code, text in self.plain.items()}
        return self.text.translate(halves), cutting


class HiddenTokens:
    """Hides the texts `marks` of special tokens in `dialogue`, all that people and tools wrote."""

    def __init__(self, marks: Collection[str], dialogue: Any) -> None:
        longest_first = sorted((mark for mark in marks if len(mark) > 1), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._private = _unused(json.dumps(dialogue, ensure_ascii=False, default=str))
        self._hidden: dict[str, int] = {}

    def hide(self, value: Any, but: Collection[str] = ()) -> Any:
        """The same value, a part of the dialogue, without those texts; `but` are left."""

        def instead(found: re.Match[str]) -> str:
            if (mark := found[0]) not in but and mark not in self._hidden:
                self._hidden[mark] = next(self._private)
            return mark if mark in but else chr(self._hidden[mark])

        if isinstance(value, str):
            return self._pattern.sub(instead, value)
        if isinstance(value, Mapping):
            return {self.hide(key, but): self.hide(each, but) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(each, but) for each in value]
        return value

    def rendered(self, text: str) -> Rendered:
        for private in map(chr, self._hidden.values()):
            text = text.replace(json.dumps(private)[1:-1], private)  # a template may write JSON in ASCII
        return Rendered(text, {code: mark for mark, code in self._hidden.items()})


def without_cuts(
    tokens: Sequence[int], spans: Sequence[tuple[int, int]], text: str, cutting: str
) -> list[int]:
    """The tokens of a cut text without those of the cuts; `spans` are the characters of each. Raises
    `InputError` for a tokenizer that joins a cut with its neighbours."""
    found = []
    for token, (begin, end) in zip(tokens, spans, strict=True):
        if cutting not in text[begin:end]:
            found.append(token)
        elif end - begin > 1:
            near = text[max(0, begin - 20) : end + 20].replace(cutting, "")
            raise InputError(
                f"{near!r} has the text of a special token of this model, whose tokenizer cannot take it for "
                "text; write it in another way"
            )
    return found


def _unused(text: str) -> Iterator[int]:
    """Code points of private characters that a text has not; raises `InputError` behind the last."""
    used = set(map(ord, set(text)))
    yield from (code for code in _PRIVATE if code not in used)
    raise InputError("expected a text without some private character (U+100000 on), got all of them")
