"""Calls that are JSON objects, `{"name": "f", "arguments": {...}}`, alone, in a list, or one behind the
other; and calls of which only the arguments are JSON, behind the name.

As soon as a call's name is known, and that its arguments are an object, these are handed on as they come:
they are the model's text, and nothing in them is changed. Calls as XML,
`<function=f><parameter=city>Tokyo</parameter></function>`, are handed on once all of them are whole.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Generator, Iterator, Mapping
from typing import Any

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


_END = re.compile("</tool_call>")
_FUNCTION = re.compile("<function=([^<>]{0,999})>|</tool_call>")
_PARAMETER = re.compile("<parameter=([^<>]{0,999})>|(</function>)|</tool_call>")
_CLOSE = re.compile("</parameter>")
_TAG_CHARS = 1024  # no tag is as long
_CLOSES_MAX = 256  # that are looked at for one value, which is read up to each
Found = Generator[None, None, re.Match[str] | None]


def read_xml(reply: Incoming, mark: str, tools: Tools) -> Reading:
    """Reads functions behind a `mark`. Of those that lack their end the model's turn ended instead; where one
    cannot be read all of them are no calls."""
    if mark != "<tool_call>":  # but a function's tag, before which the model has left out the mark
        mark, reply.text = "", mark + reply.text
    calls: list[tuple[str, str]] = []
    at = 0
    tag = yield from _find(_FUNCTION, reply, at)
    while tag is not None and (name := _name(tag, at)):
        arguments, at = {}, tag.end()
        tag = yield from _find(_PARAMETER, reply, at)
        while tag is not None and (key := _name(tag, at)):
            schema, begin = _schema(tools, name, key), tag.end()
            tag = yield from _value_end(reply, begin, schema)
            if tag is not None:
                value, at = reply.text[begin : tag.start()], tag.end()
                value = value[value.startswith("\n") : len(value) - value.endswith("\n")]
                arguments[key] = typed(value, schema)
                tag = yield from _find(_PARAMETER, reply, at)
        if tag is None or tag[2] is None:
            calls, at = [], len(reply.text) if tag is None else at
            break
        at = tag.end()
        calls.append((name, whole_characters(json.dumps(arguments, ensure_ascii=False))))
        tag = yield from _find(_FUNCTION, reply, at)
    end = yield from _find(_END, reply, at)
    if reply.text[at : None if end is None else end.start()].strip():
        calls = []
    block = reply.take(None if end is None else end.end())
    for call in calls:
        reply.say_call(*call)
    return "" if calls else mark + block


def _find(tag: re.Pattern[str], reply: Incoming, at: int) -> Found:
    """The next such tag behind `at`; None: none comes any more."""
    while (found := tag.search(reply.text, at)) is None and not reply.is_over:
        at = max(at, len(reply.text) - _TAG_CHARS)
        yield
    return found


def _name(tag: re.Match[str], at: int) -> str:
    """The name in a tag that only space is before, behind `at`; empty for any other tag."""
    return "" if tag[1] is None or tag.string[at : tag.start()].strip() else tag[1].strip()


def _schema(tools: Tools, name: str, key: str) -> Any:
    schemas = tools[name].parameters.get("properties") if name in tools else None
    return schemas.get(key) if isinstance(schemas, Mapping) else None


def _value_end(reply: Incoming, at: int, schema: Any) -> Found:
    """The tag that closes the value that begins there: the first one, or where the value is JSON and no text
    the first that is in none of its texts."""
    first = found = yield from _find(_CLOSE, reply, at)
    for _ in range(0 if "string" in types_of(schema) else _CLOSES_MAX):
        if found is None:
            return None
        try:
            json.loads(reply.text[at : found.start()] + " ")  # without it an escape at the end is refused
            return found
        except (ValueError, RecursionError) as error:
            if not str(error).startswith("Unterminated"):
                return first
        found = yield from _find(_CLOSE, reply, found.end())
    return first


def typed(text: str, schema: Any) -> Any:
    """A value that a format has as text, in the type that the tool's schema gives it: the text where that may
    be a string, else what it is as JSON or as Python writes it; the text, too, where it is neither."""
    kinds = types_of(schema)
    if "string" in kinds and not ("null" in kinds and text == "null"):
        return text
    try:
        return read_json(text)
    except (ValueError, RecursionError):
        pass
    if text in ("True", "False", "None") or (text[:1] in ("[", "{") and "\\" not in text):
        try:  # Python warns of some escapes on stderr, so texts that have any stay texts
            return read_json(json.dumps(ast.literal_eval(text), allow_nan=False))
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            pass
    return text


def types_of(schema: Any) -> frozenset[str]:
    """The JSON types that a schema names, also one of several; none where it names none."""
    if not isinstance(schema, Mapping):
        return frozenset()
    several = [each for word in ("anyOf", "oneOf") for each in _listed(schema.get(word))]
    types = [
        *_listed(schema.get("type")),
        *(each.get("type") for each in several if isinstance(each, Mapping)),
        *("string" for each in _listed(schema.get("enum")) if isinstance(each, str)),
    ]
    return frozenset(each for each in types if isinstance(each, str))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
