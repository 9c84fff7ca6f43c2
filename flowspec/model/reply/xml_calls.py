"""Calls as XML: `<function=f><parameter=city>Tokyo</parameter></function>`, each tag on a line of its own,
which are read once they are whole: from a mark to the text that ends them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from flowspec.model.reply.parts import Part, Tool, whole_characters
from flowspec.plain_json import read_json

Tools = Mapping[str, Tool]
END = "</tool_call>"
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"\s*")
_ENDS_MAX = 256
"""So many ends may be within values; each is a reason to read the block again."""


class UnfinishedError(ValueError):
    """The text ends within a value, of which there may be more."""


class XmlCalls:
    """A `CallReader` from a `mark` to `END`, but for an end within a value. Calls that cannot be read are
    content; those that lack their end are calls: the model's turn ended instead."""

    def __init__(self, mark: str, tools: Tools) -> None:
        self._mark = mark
        self._begin = "" if mark == "<tool_call>" else mark
        """The tag of a function, before which the model has left out the mark."""
        self._tools = tools
        self._pieces: list[str] = []
        self._seam = ""
        """What the end may have begun in."""
        self._ends = 0

    def push(self, text: str) -> tuple[list[Part], str | None]:
        seam = self._seam + text
        self._pieces.append(text)
        at = seam.find(END)
        while at >= 0:
            rest = seam[at + len(END) :]
            whole = "".join(self._pieces)
            self._ends += 1
            try:
                return self._calls(whole[: len(whole) - len(rest) - len(END)], END), rest
            except UnfinishedError:
                at = seam.find(END, at + 1)
        self._seam = seam[max(0, len(seam) - len(END) + 1) :]
        return [], None

    def finish(self) -> list[Part]:
        return self._calls("".join(self._pieces), "")

    def _calls(self, body: str, end: str) -> list[Part]:
        """Raises `UnfinishedError` for an `end` within a value."""
        try:
            calls = [
                (name, whole_characters(json.dumps(arguments, ensure_ascii=False)))
                for name, arguments in xml_calls(self._begin + body, self._tools)
            ]
        except ValueError as error:
            if end and isinstance(error, UnfinishedError) and self._ends < _ENDS_MAX:
                raise
            calls = []
        if not calls:
            return [Part("content", self._mark + body + end)]
        return [
            part
            for name, arguments in calls
            for part in (Part("name", name), Part("arguments", arguments), Part("end"))
        ]


def xml_calls(body: str, tools: Tools) -> list[tuple[str, dict[str, Any]]]:
    """Names and arguments of functions; raises `UnfinishedError` where the text ends within a value, and
    `ValueError` for anything else."""
    calls = []
    at = 0
    while (begin := _open(body, "<function=", at)) is not None:
        name, at = begin
        end = body.find("</function>", at)
        arguments = {}
        while (parameter := _open(body, "<parameter=", at, end if end >= 0 else None)) is not None:
            key, at = parameter
            schema = _schema(tools, name, key)
            close = _value_end(body, at, "</parameter>", schema)
            if close < 0:
                raise UnfinishedError("expected the end of a parameter")
            end = body.find("</function>", close) if close > end else end  # which the value had in it
            value = body[at:close]
            value = value[value.startswith("\n") : len(value) - value.endswith("\n")]
            arguments[key] = typed(value, schema)
            at = close + len("</parameter>")
        if end < 0:
            raise ValueError("expected the end of a function")
        at = end + len("</function>")
        calls.append((name, arguments))
    if body[at:].strip():
        raise ValueError("expected nothing behind the functions")
    return calls


def _open(body: str, tag: str, at: int, end: int | None = None) -> tuple[str, int] | None:
    """The name in the next tag up to `end`, which only space may be before, and where it ends."""
    begin = body.find(tag, at, end)
    if begin < 0:
        return None
    close = body.find(">", begin)
    if body[at:begin].strip() or close < 0 or not (name := body[begin + len(tag) : close].strip()):
        raise ValueError("expected a tag")
    return name, close + 1


def _value_end(body: str, at: int, end: str, schema: Mapping[str, Any] | None) -> int:
    """Where `end` is behind the value that begins there: the first one, or where the value is JSON and no
    text the first that is in none of its texts. -1: there is none."""
    if "string" not in types_of(schema):
        space = _SPACE.match(body, at)
        assert space is not None
        try:
            _, behind = _DECODER.raw_decode(body, space.end())
        except json.JSONDecodeError as error:
            if error.msg.startswith("Unterminated"):
                raise UnfinishedError("expected the end of a text") from None
        except (ValueError, RecursionError):
            pass
        else:
            close = body.find(end, behind)
            if close >= 0 and not body[behind:close].strip():
                return close
    return body.find(end, at)


def typed(text: str, schema: Mapping[str, Any] | None) -> Any:
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
    several = [
        *_listed(schema.get("type")),
        *(
            each.get("type")
            for name in ("anyOf", "oneOf")
            for each in _listed(schema.get(name))
            if isinstance(each, Mapping)
        ),
        *("string" for each in _listed(schema.get("enum")) if isinstance(each, str)),
    ]
    return frozenset(each for each in several if isinstance(each, str))


def _listed(value: Any) -> list[Any]:
    """The items of a list, or the one that is there."""
    return value if isinstance(value, list) else [] if value is None else [value]


def _schema(tools: Tools, name: str, key: str) -> Mapping[str, Any] | None:
    tool = tools.get(name)
    fields = None if tool is None else tool.parameters.get("properties")
    schema = fields.get(key) if isinstance(fields, Mapping) else None
    return schema if isinstance(schema, Mapping) else None
