"""Calls that are no JSON, and are read once they are whole: from a mark to the text that ends them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flowspec.model.reply.literals import Literals, Unfinished
from flowspec.model.reply.parts import Part, Tool, whole_characters
from flowspec.plain_json import read_json

Tools = Mapping[str, Tool]
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"\s*")
Parse = Callable[[str, Tools], list[tuple[str, dict[str, Any]]]]
"""From a block's text to calls, each a name with arguments; raises `Unfinished` where the text ends within a
value, and `ValueError` for anything else."""
_ENDS_MAX = 256
"""So many ends may be within values; each is a reason to read the block again."""


class BlockCalls:
    """A `CallReader` from a `mark` to `end`, but for an `end` within a value. A block that cannot be read is
    content, as is one without its end if it `needs_end`, since nothing else tells that it is whole."""

    def __init__(self, mark: str, end: str, parse: Parse, tools: Tools, *, needs_end: bool) -> None:
        self._needs_end = needs_end
        self._mark = mark
        self._end = end
        self._parse = parse
        self._tools = tools
        self._pieces: list[str] = []
        self._seam = ""
        """What the end may have begun in."""
        self._ends = 0

    def push(self, text: str) -> tuple[list[Part], str | None]:
        seam = self._seam + text
        self._pieces.append(text)
        at = seam.find(self._end)
        while at >= 0:
            rest = seam[at + len(self._end) :]
            whole = "".join(self._pieces)
            body = whole[: len(whole) - len(rest) - len(self._end)]
            self._ends += 1
            if self._ends >= _ENDS_MAX or not self._is_within_value(body):
                return self._calls(body, self._end), rest
            at = seam.find(self._end, at + 1)
        self._seam = seam[max(0, len(seam) - len(self._end) + 1) :]
        return [], None

    def _is_within_value(self, body: str) -> bool:
        try:
            self._parse(body, self._tools)
        except Unfinished:
            return True
        except ValueError:
            pass
        return False

    def finish(self) -> list[Part]:
        """Also a block that lacks its end, if the calls in it are whole: the model's turn ended instead."""
        if self._needs_end:
            return [Part("content", "".join((self._mark, *self._pieces)))]
        return self._calls("".join(self._pieces), "")

    def _calls(self, body: str, end: str) -> list[Part]:
        try:
            found = [(name, _json(arguments)) for name, arguments in self._parse(body, self._tools)]
        except ValueError:
            found = []
        if not found:
            return [Part("content", self._mark + body + end)]
        return [
            part
            for name, arguments in found
            for part in (Part("name", name), Part("arguments", arguments), Part("end"))
        ]


def _json(arguments: dict[str, Any]) -> str:
    return whole_characters(json.dumps(arguments, ensure_ascii=False))


def python_calls(body: str, tools: Tools) -> list[tuple[str, dict[str, Any]]]:
    """`[f(a=1), g()]`, or one call in each line; or a list of objects, where a model was asked for JSON."""
    text = Literals(body)
    is_list = text.take("[")
    found: list[tuple[str, dict[str, Any]]] = []
    while not (text.take("]") if is_list else text.is_over):
        if found and not text.take(",") and is_list:
            raise ValueError("expected a comma between calls")
        if text.take("{"):
            call = text.fields("}")
            name, arguments = call.get("name"), call.get("arguments", {})
            if not isinstance(name, str) or not isinstance(arguments, dict):
                raise ValueError("expected a call")
        else:
            name = text.word()
            text.expect("(")
            arguments = text.fields(")", between="=")
        found.append((name, arguments))
    if not text.is_over:
        raise ValueError("expected nothing behind the calls")
    return found


def python_text(calls: Sequence[tuple[str, Any]]) -> str:
    """Names and arguments as `python_calls` reads them; arguments that are no object are left out."""
    each = (
        (name, ", ".join(f"{key}={_python(value)}" for key, value in arguments.items()))
        for name, arguments in calls
        if isinstance(arguments, Mapping)
    )
    return f"[{', '.join(f'{name}({inner})' for name, inner in each)}]"


def _python(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_python(key)}: {_python(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_python, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def gemma_calls(body: str, tools: Tools) -> list[tuple[str, dict[str, Any]]]:
    """`call:f{city:<|"|>Tokyo<|"|>,days:3}`."""
    text = Literals(body, bare=True)
    text.expect("call:")
    name = text.word()
    text.expect("{")
    found = [(name, text.fields("}"))]
    if not text.is_over:
        raise ValueError("expected nothing behind the call")
    return found


def xml_calls(body: str, tools: Tools) -> list[tuple[str, dict[str, Any]]]:
    """`<function=f><parameter=city>Tokyo</parameter></function>`, each tag on a line of its own."""
    found = []
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
                raise Unfinished("expected the end of a parameter")
            end = body.find("</function>", close) if close > end else end  # which the value had in it
            value = body[at:close]
            value = value[value.startswith("\n") : len(value) - value.endswith("\n")]
            arguments[key] = typed(value, schema)
            at = close + len("</parameter>")
        if end < 0:
            raise ValueError("expected the end of a function")
        at = end + len("</function>")
        found.append((name, arguments))
    if body[at:].strip():
        raise ValueError("expected nothing behind the functions")
    return found


def _open(body: str, tag: str, at: int, end: int | None = None) -> tuple[str, int] | None:
    """The name in the next tag up to `end`, which only space may be before, and where it ends."""
    begin = body.find(tag, at, end)
    if begin < 0:
        return None
    close = body.find(">", begin)
    if body[at:begin].strip() or close < 0 or not (name := body[begin + len(tag) : close].strip()):
        raise ValueError("expected a tag")
    return name, close + 1


def key_value_calls(body: str, tools: Tools) -> list[tuple[str, dict[str, Any]]]:
    """`f`, and for each argument `<arg_key>city</arg_key>` and `<arg_value>Tokyo</arg_value>`."""
    name, _, _ = body.partition("<arg_key>")
    at = len(name)
    name = name.strip()
    if not name or any(each.isspace() or each in "<>[]{}" for each in name):
        raise ValueError("expected a name")
    text: dict[str, Any] = {}
    while body[at:].strip():
        key, at = _between(body, at, "<arg_key>", "</arg_key>", {"type": "string"})
        schema = _schema(tools, name, key)
        value, at = _between(body, at, "<arg_value>", "</arg_value>", schema)
        text[key] = typed(value, schema)
    return [(name, text)]


def _between(body: str, at: int, begin: str, end: str, schema: Mapping[str, Any] | None) -> tuple[str, int]:
    first = body.find(begin, at)
    if first < 0 or body[at:first].strip():
        raise ValueError(f"expected {begin}")
    last = _value_end(body, first + len(begin), end, schema)
    if last < 0:
        raise Unfinished(f"expected {end}")
    return body[first + len(begin) : last], last + len(end)


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
                raise Unfinished("expected the end of a text") from None
        except (ValueError, RecursionError):
            pass
        else:
            found = body.find(end, behind)
            if found >= 0 and not body[behind:found].strip():
                return found
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
    if text[:1] not in ("[", "{") and text not in ("True", "False", "None"):
        return text
    try:
        found = Literals(text)
        value = found.value()
        return value if found.is_over else text
    except ValueError:
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


def _listed(found: Any) -> list[Any]:
    """The items of a list, or the one that is there."""
    return found if isinstance(found, list) else [] if found is None else [found]


def _schema(tools: Tools, name: str, key: str) -> Mapping[str, Any] | None:
    tool = tools.get(name)
    fields = None if tool is None else tool.parameters.get("properties")
    found = fields.get(key) if isinstance(fields, Mapping) else None
    return found if isinstance(found, Mapping) else None
