"""The parts of a reply as they come: what is for the reader, thoughts, and calls of tools."""

from __future__ import annotations

import re
import secrets
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Kind = Literal["content", "thought", "name", "arguments", "end"]


class Part(NamedTuple):
    """A piece of a reply. `name` begins a call of the tool of this name, `arguments` go on with the last
    call's, which are JSON if the model made no mistake, and `end` (without text) ends it."""

    kind: Kind
    text: str = ""


class Incoming:
    """A reply while it comes: the `text` that was not read yet, and the `parts` that were read of it and not
    handed on yet; nothing more comes where it `is_over`. Generators read it, and yield for more text."""

    def __init__(self) -> None:
        self.text = ""
        self.parts: list[Part] = []
        self.is_over = False

    def take(self, count: int | None = None) -> str:
        taken = self.text[:count]
        self.text = self.text[len(taken) :]
        return taken

    def say(self, kind: Kind, text: str = "") -> None:
        """Adds a part, unless it lacks the text that it is about."""
        if text or kind == "end":
            self.parts.append(Part(kind, text))

    def say_call(self, name: str, arguments: str) -> None:
        """Adds a whole call."""
        self.parts += [Part("name", name), Part("arguments", arguments), Part("end")]


Reading = Generator[None, None, str]
"""Reads what follows the mark of a call, up to its end, and returns what is no call of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call; `parameters` is the JSON schema of its arguments, an object."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})

    @property
    def document(self) -> dict[str, Any]:
        parameters = dict(self.parameters)
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


Tools = Mapping[str, Tool]  # by their names


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it; `arguments` are a text, JSON if it made no mistake."""

    name: str
    arguments: str


def new_call_id(chars: int = 0) -> str:
    """An id for a call: of so many letters and digits, or (0) as the API has them."""
    return secrets.token_hex(chars)[:chars] if chars else f"call_{secrets.token_hex(12)}"


def whole_characters(text: str) -> str:
    """A text that was read from escapes such as `\\ud83d\\ude00`: halves of a character put together, and
    U+FFFD for those without their other half."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def calls_in(parts: Sequence[Part]) -> list[ToolCall]:
    found: list[tuple[str, list[str]]] = []
    for part in parts:
        if part.kind == "name":
            found.append((part.text, []))
        elif part.kind == "arguments":
            found[-1][1].append(part.text)
    return [ToolCall(name, "".join(arguments)) for name, arguments in found]


START, CHANNEL, MESSAGE, END = MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
"""Before whose turn it is, before a channel's name, before a message, and behind it."""
CONSTRAIN = "<|constrain|>"  # in a header, before the form that a message has
_CALL = re.compile(r"to=functions\.(\S+)")
_RECIPIENT = " to="  # begins a reply of which the prompt's end has the rest of the header


class ChannelReader:
    """Tells the parts of a reply in channels apart. Messages to functions are calls if `has_calls`, else they
    are left out, as messages are without a channel. What comes before the first mark is text, as in a reply
    without channels, unless it says whom the first message is for."""

    def __init__(self, *, has_calls: bool) -> None:
        self._has_calls = has_calls
        self._begun: str | None = ""
        """At the reply's beginning: what may be whom the first message is for; None behind it."""
        self._header: str | None = None
        """What is said of the message that begins; None within one."""
        self._kind: Kind | None = "content"
        """What the message is; None for one that is left out."""

    @property
    def is_thinking(self) -> bool:
        """Whether what comes next is a thought, as far as is known."""
        return self._kind == "thought"

    def push(self, text: str, *, is_mark: bool = False) -> list[Part]:
        """Takes more text, or the name of a special token, which is a mark; returns what is known now."""
        if is_mark:
            return self._mark(text)
        if self._header is not None:
            self._header += text
            return []
        if self._begun is not None:
            text, self._begun = self._begun + text, None
            if text.startswith(_RECIPIENT) or _RECIPIENT.startswith(text):
                self._begun = text
                return []
        return [Part(self._kind, text)] if text and self._kind is not None else []

    def finish(self) -> list[Part]:
        """At a message's end, and the reply's: what was held back."""
        begun, kind, self._begun, self._kind = self._begun, self._kind, None, None
        if kind == "arguments":
            return [Part("end")]
        return [Part("content", begun)] if begun else []

    def _mark(self, mark: str) -> list[Part]:
        if mark == CONSTRAIN:
            if self._header is not None:
                self._header += " "
            return []
        if mark == CHANNEL and self._begun:
            self._header, self._begun = self._begun, None
        header, ended = self._header or "", self.finish()
        self._header = {START: "", CHANNEL: f"{header} {CHANNEL} "}.get(mark)
        if mark != MESSAGE:
            return ended
        _, is_named, channel = header.rpartition(CHANNEL)
        name = channel.split()[:1] if is_named else []
        call = _CALL.search(header)
        if call is not None and name:
            self._kind = "arguments" if self._has_calls else None
            return [*ended, Part("name", call[1])] if self._has_calls else ended
        if name == ["analysis"]:
            self._kind = "thought"
        elif name == ["final"] or (name == ["commentary"] and "to=" not in header):
            self._kind = "content"
        return ended
