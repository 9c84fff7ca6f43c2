"""Calls as XML: `<function=f><parameter=city>Tokyo</parameter></function>`, each tag on a line of its own,
which are handed on once all of them are whole, up to the text that ends them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Generator, Mapping
from typing import Any

from flowspec.model.reply.parts import Incoming, Reading, Tools, whole_characters
from flowspec.plain_json import read_json

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
    """The items of a list, or the one that is there."""
    return value if isinstance(value, list) else [value]
