"""Calls that are JSON objects, `{"name": "f", "arguments": {...}}`, alone, in a list, or one behind the
other; and calls of which only the arguments are JSON, behind the name.

As soon as a call's name is known, and that its arguments are an object, these are handed on as they come:
they are the model's text, and nothing in them is changed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator

from flowspec.model.reply.parts import Incoming, Kind, Reading, Tools, whole_characters
from flowspec.plain_json import read_json

_BEGIN = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]{1,128})"\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
"""Of an object whose arguments are known to be an object, too."""
_BEGIN_CHARS = 1024  # so far a beginning is looked for; a longer one is a call only once it is whole
_KEY = re.compile(r'\{\s*"([^"\\]*)"')
_KEYS = frozenset(("name", "type", "arguments", "parameters", "id", "function"))  # that may begin a call
_NAMED = re.compile(r"\s*([\w.\-]{1,128})\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\]\s*)?")
_BEFORE, _BETWEEN = " \t\r\n[", " \t\r\n,;]"  # objects
_OUTSIDE, _INSIDE, _ESCAPED = re.compile(r'["{}\[\]<]'), re.compile(r'["\\]'), re.compile(r"(?s:.)")
"""What is looked for next: outside of strings, inside, and behind a backslash."""


class ObjectEnd:
    """Looks for the end of a JSON object, however its text is cut; `depth` brackets are open already. A `<`
    outside of strings, which is no JSON, ends it, too: the model forgot to close it."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._next = _OUTSIDE

    def find(self, text: str, at: int = 0) -> int:
        """Where in `text` the object ends, or -1; what is before `at` was looked at already."""
        while (found := self._next.search(text, at)) is not None:
            at, sign = found.end(), found[0]
            if self._next is _ESCAPED:
                self._next = _INSIDE
            elif sign == "\\":
                self._next = _ESCAPED
            elif sign == '"':
                self._next = _OUTSIDE if self._next is _INSIDE else _INSIDE
            elif sign == "<":
                return found.start()
            else:
                self._depth += 1 if sign in "{[" else -1
                if self._depth <= 0:
                    return at
        return -1


def read_objects(reply: Incoming, mark: str, tools: Tools, end: str = "") -> Reading:
    """Reads objects behind a `mark`, up to the text `end` (empty: as far as there are objects). Without mark
    only `tools` are called, and an object that begins with a field that no call has is none at once."""
    lead, has_call = mark, False
    while True:
        rest = reply.text.lstrip(_BETWEEN if has_call else _BEFORE)
        lead += reply.take(len(reply.text) - len(rest))
        is_begun = end.startswith(reply.text)  # or nothing came yet
        if (end and reply.text.startswith(end)) or (is_begun and reply.is_over):
            lead += reply.take(len(end))
            return "" if has_call else lead
        if is_begun:
            yield
        elif reply.text.startswith("{"):
            no_call = yield from _read_object(reply, () if mark else tools)
            if no_call:
                return lead + no_call
            lead, has_call = "", True
        elif has_call:
            reply.text = lead.lstrip("] \n") + reply.text
            return ""
        else:
            return lead


def _read_object(reply: Incoming, names: Collection[str]) -> Reading:
    """Reads one object, a call of one of these `names`, if there are any."""
    end, looked = ObjectEnd(), 0
    while True:
        if looked < _BEGIN_CHARS:
            begin = reply.text[:_BEGIN_CHARS]
            key = _KEY.match(begin) if names else None
            if key is not None and key[1] not in _KEYS:
                return reply.take(1)
            found = _BEGIN.match(begin)
            if found is not None:
                if names and found[1] not in names:
                    return reply.take(1)
                reply.take(found.end())
                reply.say("name", found[1])
                yield from _read_up_to_end(reply, "arguments")
                reply.say("end")
                yield from _read_up_to_end(reply, depth=1)  # of an id, if any: the API makes its own
                return ""
        at = end.find(reply.text, looked)
        looked = len(reply.text)
        if at >= 0:
            text = reply.take(at)
            call = _call_of(text)
            if call is None or (names and call[0] not in names):
                return text
            reply.say_call(*call)
            return ""
        if reply.is_over:
            return reply.take()
        yield


def _read_up_to_end(reply: Incoming, kind: Kind | None = None, depth: int = 0) -> Iterator[None]:
    """Reads an object of which so many brackets are open, and hands it on as it comes, if it is of a kind."""
    end = ObjectEnd(depth)
    while True:
        at = end.find(reply.text)
        piece = reply.take(None if at < 0 else at)
        if kind is not None:
            reply.say(kind, piece)
        if at >= 0 or reply.is_over:
            return
        yield


def read_named(reply: Incoming, mark: str, tools: Tools) -> Reading:
    """Reads a name and its arguments, `f[ARGS]{...}`, or a list of objects, behind a `mark`."""
    while True:
        begin = reply.text.lstrip()
        if begin.startswith("{") or (begin.startswith("[") and begin[1:2] not in ("", "A", "C")):
            return (yield from read_objects(reply, mark, tools))
        at = reply.text.find("{", 0, _BEGIN_CHARS)
        if at >= 0 and (found := _NAMED.fullmatch(reply.text[:at])) is not None:
            reply.take(at)
            reply.say("name", found[1])
            yield from _read_up_to_end(reply, "arguments")
            reply.say("end")
            return ""
        if at >= 0 or len(reply.text) >= _BEGIN_CHARS or reply.is_over:
            return mark + reply.take(None if reply.is_over else 0)
        yield


def _call_of(text: str) -> tuple[str, str] | None:
    """Name and arguments of a whole object; None for one that is no call, or could not be written again."""
    try:
        found = read_json(text, strict=False)
    except (ValueError, RecursionError):
        return None
    if isinstance(found.get("function"), dict):
        found = found["function"]
    if not isinstance(found.get("name"), str) or not found["name"]:
        return None
    arguments = found.get("arguments", found.get("parameters"))
    if not isinstance(arguments, str):  # else written as the API has them
        arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
    return whole_characters(found["name"]), whole_characters(arguments)
