"""Calls that are JSON objects, `{"name": "f", "arguments": {...}}`, alone, in a list, or one behind the
other; and calls of which only the arguments are JSON, behind the name.

As soon as a call's name is known, and that its arguments are an object, these are handed on as they come:
they are the model's text, and nothing in them is changed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from flowspec.model.reply.parts import Part, whole_characters
from flowspec.plain_json import read_json

_NAME = r'"name"\s*:\s*"((?:[^"\\]|\\.){1,128})"'
_BEGIN = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?' + _NAME + r'\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
"""Of an object whose arguments are known to be an object, too."""
_BEGIN_CHARS = 1024
"""So far a beginning is looked for; a longer one is a call only once it is whole."""
_KEY = re.compile(r'\{\s*"([^"\\]*)"')
_KEYS = frozenset(("name", "type", "arguments", "parameters", "id", "function"))
"""With which a call may begin."""
_NAMED = re.compile(r"\s*([\w.\-]{1,128})\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\]\s*)?")
_NAMED_CHARS = 256
_OUTSIDE = re.compile(r'["{}\[\]<]')
_INSIDE = re.compile(r'["\\]')


class ObjectEnd:
    """Looks for the end of a JSON object, however its text is cut; `depth` brackets are open already. A `<`
    outside of strings, which is no JSON, ends it, too: the model forgot to close it."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._is_string = False
        self._is_escaped = False

    def find(self, text: str, at: int = 0) -> int:
        """Where in `text` the object ends, or -1; what is before `at` was looked at already."""
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            found = (_INSIDE if self._is_string else _OUTSIDE).search(text, at)
            if found is None:
                return -1
            at, mark = found.end(), found[0]
            if self._is_string and mark == "\\":
                self._is_escaped = True
            elif mark == '"':
                self._is_string = not self._is_string
            elif mark == "<":
                return found.start()
            else:
                self._depth += 1 if mark in "{[" else -1
                if self._depth <= 0:
                    return at
        return -1


class JsonCalls:
    """A `CallReader` of objects behind a `mark`, up to the text `end` (empty: as far as there are objects).

    `names`: with some, only tools of these names are called, and an object that begins with a field that no
    call has is none at once; for models that write calls without a mark.
    """

    def __init__(self, mark: str, end: str = "", names: Collection[str] = ()) -> None:
        self._end = end
        self._names = names
        self._lead = mark
        """What came and belongs to no call."""
        self._text = ""
        """What is not looked at yet, or not to its end."""
        self._held: list[str] = []
        """The beginning of a long object of which it is not known whether it is a call."""
        self._state = self._between
        self._object = ObjectEnd()
        self._looked = 0
        self._is_list = False
        self._has_call = False
        self._out: list[Part] = []
        self._rest: str | None = None

    def push(self, text: str) -> tuple[list[Part], str | None]:
        self._text += text
        while self._rest is None and self._state():
            pass
        return self._taken(), self._rest

    def finish(self) -> list[Part]:
        if self._state == self._arguments:
            self._out.append(Part("end"))
        elif self._state == self._whole or not self._has_call:
            self._content("".join((self._lead, *self._held, self._text)))
        return self._taken()

    # Each state looks at the text, and returns whether there may be more to do.

    def _between(self) -> bool:
        """Where an object may begin."""
        self._skip(len(self._text) - len(self._text.lstrip()))
        first = self._text[:1]
        if not first:
            return False
        if self._end and self._text.startswith(self._end):
            if not self._has_call:
                self._content(self._lead + self._end)
            return self._over(self._text[len(self._end) :])
        if self._end.startswith(self._text):
            return False
        if first == "{":
            self._state, self._object, self._looked = self._whole, ObjectEnd(), 0
        elif (first == "[" and not self._has_call and not self._is_list) or (
            first in ",;]" and self._has_call
        ):
            self._is_list |= first == "["
            self._skip(1)
        elif self._has_call:
            return self._over(self._lead.lstrip("] \n") + self._text)
        else:
            self._content(self._lead)
            return self._over(self._text)
        return True

    def _whole(self) -> bool:
        """In an object of which it is not known yet whether it is a call."""
        begin = self._text[:_BEGIN_CHARS]
        if not self._held:
            key = _KEY.match(begin) if self._names else None
            if key is not None and key[1] not in _KEYS:
                return self._fail(len(self._text))
            if (found := _BEGIN.match(begin)) is not None and (name := _text_of(found[1])):
                if self._names and name not in self._names:
                    return self._fail(len(self._text))
                self._begin(name)
                self._text = self._text[found.end() :]
                self._state, self._object = self._arguments, ObjectEnd()
                return True
        at = self._object.find(self._text, self._looked)
        self._looked = len(self._text)
        if at < 0:
            if self._looked >= _BEGIN_CHARS or self._held:
                self._held.append(self._text)
                self._text, self._looked = "", 0
            return False
        call = _call_of("".join((*self._held, self._text[:at])))
        if call is None or (self._names and call[0] not in self._names):
            return self._fail(at)
        self._begin(call[0])
        self._out += [Part("arguments", call[1]), Part("end")]
        self._text, self._held = self._text[at:], []
        self._state = self._between
        return True

    def _arguments(self) -> bool:
        """In the arguments, which are handed on as they come."""
        at = self._object.find(self._text)
        piece = self._text if at < 0 else self._text[:at]
        if piece:
            self._out.append(Part("arguments", piece))
        self._text = self._text[len(piece) :]
        if at < 0:
            return False
        self._out.append(Part("end"))
        self._state, self._object = self._tail, ObjectEnd(depth=1)
        return True

    def _tail(self) -> bool:
        """Behind the arguments, where an object may have an id, which the API makes itself."""
        at = self._object.find(self._text)
        self._text = "" if at < 0 else self._text[at:]
        if at >= 0:
            self._state = self._between
        return at >= 0

    def _begin(self, name: str) -> None:
        self._out.append(Part("name", name))
        self._lead, self._has_call = "", True

    def _skip(self, count: int) -> None:
        self._lead += self._text[:count]
        self._text = self._text[count:]

    def _fail(self, at: int) -> bool:
        """What came up to there is no call."""
        self._content("".join((self._lead, *self._held, self._text[:at])))
        return self._over(self._text[at:])

    def _over(self, rest: str) -> bool:
        self._rest = rest
        return False

    def _content(self, text: str) -> None:
        if text:
            self._out.append(Part("content", text))

    def _taken(self) -> list[Part]:
        out, self._out = self._out, []
        return out


class NamedCalls:
    """A `CallReader` of a name and its arguments, `f[ARGS]{...}`, or of a list of objects, behind a
    `mark`."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._text = ""
        self._inner: JsonCalls | None = None
        self._end: ObjectEnd | None = None

    def push(self, text: str) -> tuple[list[Part], str | None]:
        if self._inner is not None:
            return self._inner.push(text)
        self._text += text
        if self._end is not None:
            return self._arguments([])
        begin = self._text.lstrip()
        if begin[:1] in ("[", "{") and not any(
            mark.startswith(begin[:9]) for mark in ("[ARGS]", "[CALL_ID]")
        ):
            self._inner = JsonCalls(self._mark)
            return self._inner.push(self._text)
        at = self._text.find("{", 0, _NAMED_CHARS)
        if at >= 0 and (found := _NAMED.fullmatch(self._text[:at])) is not None:
            self._text, self._end = self._text[at:], ObjectEnd()
            return self._arguments([Part("name", found[1])])
        if at >= 0 or len(self._text) >= _NAMED_CHARS:
            return [Part("content", self._mark)], self._text
        return [], None

    def finish(self) -> list[Part]:
        if self._inner is not None:
            return self._inner.finish()
        return [Part("end")] if self._end is not None else [Part("content", self._mark + self._text)]

    def _arguments(self, out: list[Part]) -> tuple[list[Part], str | None]:
        assert self._end is not None
        at = self._end.find(self._text)
        piece, self._text = (self._text, "") if at < 0 else (self._text[:at], self._text[at:])
        out += [Part("arguments", piece)] if piece else []
        return (out, None) if at < 0 else ([*out, Part("end")], self._text)


def _text_of(escaped: str) -> str:
    try:
        return whole_characters(json.loads(f'"{escaped}"', strict=False))
    except ValueError:
        return ""


def _call_of(text: str) -> tuple[str, str] | None:
    """Name and arguments of a whole object; None for one that is no call, or has a number that could not be
    written as JSON again."""
    try:
        found = read_json(text, strict=False)
    except (ValueError, RecursionError):
        return None
    if isinstance(found, dict) and isinstance(found.get("function"), dict):
        found = found["function"]
    if not isinstance(found, dict) or not isinstance(found.get("name"), str) or not found["name"]:
        return None
    arguments = found.get("arguments", found.get("parameters"))
    if not isinstance(arguments, str):  # else written as the API has them
        arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
    return whole_characters(found["name"]), whole_characters(arguments)
