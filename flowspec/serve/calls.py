"""Calls of tools as the API's documents have them: each with an id and a place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flowspec.model.reply.parts import Part, ToolCall, new_call_id


class CallDeltas:
    """The calls of one streamed choice as they come; `new_id` makes their ids."""

    def __init__(self, new_id: Callable[[], str] = new_call_id) -> None:
        self._new_id = new_id
        self._count = 0

    def add(self, parts: Sequence[Part]) -> list[dict[str, Any]]:
        """What came, as a chunk's `tool_calls`, with at most one entry for each call."""
        said: dict[int, dict[str, Any]] = {}
        for part in parts:
            if part.kind == "name":
                said[self._count] = {
                    "index": self._count,
                    **call_document(ToolCall(part.text, ""), self._new_id()),
                }
                self._count += 1
            elif part.kind == "arguments":
                index = self._count - 1
                entry = said.setdefault(index, {"index": index, "function": {"arguments": ""}})
                entry["function"]["arguments"] += part.text
        return list(said.values())


def call_document(call: ToolCall, key: str) -> dict[str, Any]:
    """A call with its id."""
    return {"id": key, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def thoughts_in(parts: Sequence[Part]) -> str:
    """The text of thoughts in these parts."""
    return "".join(part.text for part in parts if part.kind == "thought")
