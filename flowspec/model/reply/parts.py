"""The parts of a reply as they come: what is for the reader, thoughts, and calls of tools."""

from __future__ import annotations

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
        """So many characters of the text, or all, which then were read."""
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
        """As chat templates take it."""
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
    """The calls that these parts make."""
    found: list[tuple[str, list[str]]] = []
    for part in parts:
        if part.kind == "name":
            found.append((part.text, []))
        elif part.kind == "arguments":
            found[-1][1].append(part.text)
    return [ToolCall(name, "".join(arguments)) for name, arguments in found]
