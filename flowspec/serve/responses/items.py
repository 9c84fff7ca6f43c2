"""Items of the Responses API as a chat's messages.

What the model itself said in one turn is one message there: its text, what it thought before, and the
functions that it called, which are an item each here.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

from flowspec.serve.fields import Fields
from flowspec.serve.messages import text_of
from flowspec.serve.refusals import ApiError, invalid

ITEMS_MAX = 4096
REFERENCE = "item_reference"
Item = dict[str, Any]
Message = dict[str, Any]
"""A message as `/v1/chat/completions` takes it."""
Placed = list[tuple[Message, str]]
"""Messages, each with the name of the field that it comes from."""
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
"""With which ids of items begin."""
_TEXTS = ("input_text", "output_text", "text")
_ROLES = ("system", "developer", "user", "assistant")


def new_id(kind: str) -> str:
    """An id for an item of this kind."""
    return f"{PREFIXES[kind]}_{secrets.token_hex(24)}"


def read_input(
    found: Any, item_of: Callable[[str], Item | None] = lambda name: None
) -> tuple[Placed, list[Item]]:
    """The messages of `input`, a text of the user's or a list of items, and its items as they are listed;
    `item_of` gives those that a client refers to. Raises `ApiError`."""
    if isinstance(found, str):
        message = {"role": "user", "content": found}
        return [(message, "input")], [listed(message)]
    if not isinstance(found, list):
        raise invalid("input", "a string or a list of items", found, "invalid_type")
    if not found:
        raise invalid("input", "at least one item", found)
    if len(found) > ITEMS_MAX:
        raise invalid("input", f"at most {ITEMS_MAX} items", len(found))
    items = []
    for place, item in enumerate(found):
        where = f"input[{place}]"
        if not isinstance(item, dict):
            raise invalid(where, "an object", item, "invalid_type")
        if item.get("type") == REFERENCE or (item.get("type") is None and set(item) <= {"type", "id"}):
            item = _referred(item, where, item_of)
        items.append(item)
    placed = messages_of(items)
    return placed, [listed(item) for item in items]


def messages_of(items: Sequence[Item]) -> Placed:
    """The messages that these items are. Raises `ApiError`."""
    turns = _Turns()
    for place, item in enumerate(items):
        where = f"input[{place}]"
        kind = "message" if item.get("type") is None else item["type"]
        read = _READ.get(kind) if isinstance(kind, str) else None
        if read is None:
            raise ApiError(
                400,
                f"{where}.type: expected one of {', '.join((*_READ, REFERENCE))}, got {kind!r:.40}",
                f"{where}.type",
                "unsupported_content",
            )
        fields = Fields(item, f"{where}.")
        fields.ignored("type", "id", "status")  # of an item that is given back as it came
        read(fields, turns, where)
        fields.finish()
    return turns.finish()


def listed(item: Item) -> Item:
    """An item that `messages_of` took, as a response's items are listed: with an id and a state, its content
    in parts, without log-probabilities."""
    kind = item.get("type") or "message"
    key, status = item.get("id"), item.get("status")
    found = {
        **{name: value for name, value in item.items() if name != "parsed_arguments"},
        "id": key if isinstance(key, str) and key else new_id(kind),
        "type": kind,
        "status": status if isinstance(status, str) else "completed",
    }
    if kind == "message":
        content = item["content"]
        parts = [{"text": content}] if isinstance(content, str) else content
        found["content"] = [_listed_part(part, is_own=item["role"] == "assistant") for part in parts]
    return found


def _listed_part(part: Item, *, is_own: bool) -> Item:
    more: Item = {"annotations": [], "logprobs": []} if is_own else {}
    said = {name: value for name, value in part.items() if name != "parsed"}
    return {**said, "type": "output_text" if is_own else "input_text", **more}


def _referred(item: Item, where: str, item_of: Callable[[str], Item | None]) -> Item:
    name = item.get("id")
    found = item_of(name) if isinstance(name, str) else None
    if found is None:
        raise ApiError(
            404,
            f"{where}.id: expected the id of an item of a response that is kept here, got {name!r:.80}; send "
            "the item itself, as with store false",
            f"{where}.id",
            "item_not_found",
        )
    return found


class _Turns:
    """Messages as items come; `_own` is the model's turn that goes on."""

    def __init__(self) -> None:
        self._placed: Placed = []
        self._own: Message | None = None

    def add(self, message: Message, where: str) -> None:
        self._own = None
        self._placed.append((message, where))

    def own(self, where: str, *, before: tuple[str, ...] = ()) -> Message:
        """The model's turn; a new one if there is none, or it has a field that only comes later in a turn."""
        if self._own is None or any(field in self._own for field in before):
            message: Message = {"role": "assistant"}
            self.add(message, where)
            self._own = message
        return self._own

    def finish(self) -> Placed:
        for message, _ in self._placed:
            message.setdefault("content", None)
        return self._placed


def _message(fields: Fields, turns: _Turns, where: str) -> None:
    role = fields.needed("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise invalid(f"{where}.role", f"one of {', '.join(_ROLES)}", role)
    content = text_of(fields.needed("content"), f"{where}.content", _TEXTS)
    fields.ignored("phase")  # a label, for which templates have no place
    if role != "assistant":
        turns.add({"role": role, "content": content}, where)
        return
    turns.own(where, before=("content", "tool_calls"))["content"] = content


def _reasoning(fields: Fields, turns: _Turns, where: str) -> None:
    fields.neutral("encrypted_content", "")
    fields.ignored("summary")  # is made of the content, for readers
    content = fields.take("content")
    if content is not None and not isinstance(content, list):
        raise invalid(f"{where}.content", "a list of parts", content, "invalid_type")
    if content:
        turn = turns.own(where, before=("reasoning_content", "content", "tool_calls"))
        turn["reasoning_content"] = text_of(content, f"{where}.content", ("reasoning_text",))


def _function_call(fields: Fields, turns: _Turns, where: str) -> None:
    called = {name: _needed_text(fields, name, where) for name in ("call_id", "name", "arguments")}
    for field in ("namespace", "async", "caller"):
        fields.neutral(field)
    fields.ignored("parsed_arguments")  # what clients made of them
    call = {
        "id": called["call_id"],
        "type": "function",
        "function": {"name": called["name"], "arguments": called["arguments"]},
    }
    turns.own(where).setdefault("tool_calls", []).append(call)


def _function_call_output(fields: Fields, turns: _Turns, where: str) -> None:
    call_id = _needed_text(fields, "call_id", where)
    output = text_of(fields.needed("output"), f"{where}.output", _TEXTS)
    turns.add({"role": "tool", "tool_call_id": call_id, "content": output}, where)


_READ = {
    "message": _message,
    "function_call": _function_call,
    "function_call_output": _function_call_output,
    "reasoning": _reasoning,
}


def _needed_text(fields: Fields, name: str, where: str) -> str:
    found = fields.needed(name)
    if not isinstance(found, str):
        raise invalid(f"{where}.{name}", "a string", found, "invalid_type")
    return found
