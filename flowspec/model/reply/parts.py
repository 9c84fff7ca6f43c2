"""The parts of a reply as they come: what is for the reader, thoughts, and calls of tools."""

from __future__ import annotations

import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

Kind = Literal["content", "thought", "name", "arguments", "end"]


class Part(NamedTuple):
    """A piece of a reply. `name` begins a call of the tool of this name, `arguments` go on with the last
    call's, which are JSON if the model made no mistake, and `end` (without text) ends it."""

    kind: Kind
    text: str = ""


class PartReader(Protocol):
    """Tells parts apart, however the text is cut."""

    is_thinking: bool
    """Whether what comes next is a thought, as far as is known."""

    def push(self, text: str, *, is_mark: bool = False) -> list[Part]:
        """Takes more text, or the name of a special token, which is a mark; returns what is known now."""

    def finish(self) -> list[Part]:
        """At the reply's end: what was held back."""


class CallReader(Protocol):
    """Reads what follows the mark of a call; one reader for each mark."""

    def push(self, text: str) -> tuple[list[Part], str | None]:
        """Takes more text; returns what is known now, and at the end what is left of the text behind it."""

    def finish(self) -> list[Part]:
        """The reply has ended within: what was held back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call; `parameters` is the JSON schema of its arguments, an object."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})

    @property
    def document(self) -> dict[str, Any]:
        """As chat templates take it."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": dict(self.parameters),
            },
        }


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it; `arguments` are a text, JSON if it made no mistake."""

    name: str
    arguments: str


def new_call_id(chars: int = 0) -> str:
    """An id for a call: of so many letters and digits, or (0) as the API has them."""
    if not chars:
        return f"call_{secrets.token_hex(12)}"
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(chars))


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


def unfinished(text: str, marks: tuple[str, ...]) -> int:
    """How many characters at the end of a text may be the beginning of a mark."""
    longest = max((len(mark) for mark in marks), default=0)
    for size in range(min(len(text), longest - 1), 0, -1):
        if any(mark.startswith(text[-size:]) for mark in marks):
            return size
    return 0
