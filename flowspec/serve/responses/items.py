"""Items of the Responses API as a chat's messages.

What the model itself said in one turn is one message there: its text, what it thought before, and the
functions that it called, which are an item each here.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from flowspec.serve.bodies import Asked, Neutral
from flowspec.serve.messages import Part, text_of
from flowspec.serve.refusals import ApiError
from flowspec.validation import Misfit, fit

Item = dict[str, Any]
Message = dict[str, Any]
"""A message as `/v1/chat/completions` takes it."""
Placed = list[tuple[Message, str]]
"""Messages, each with the name of the field that it comes from."""
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
"""With which ids of items begin."""
_IN_A_TURN = ("reasoning_content", "content", "tool_calls")
"""What the model says in one turn, in this order."""


class ItemPart(Part, frozen=True, kw_only=True):
    type: Annotated[
        Literal["input_text", "output_text", "text"],
        Meta(description="input_text, output_text or text, since this model takes text"),
    ]


class ThoughtPart(Part, frozen=True, kw_only=True):
    type: Literal["reasoning_text"]


class _Item(Asked, frozen=True, kw_only=True, tag_field="type"):
    """As it came; what it is called and how far it has come says nothing."""

    id: Any = None
    status: Any = None


class MessageItem(_Item, frozen=True, kw_only=True, tag="message"):
    """`phase` is a label, for which templates have no place."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ItemPart]
    phase: Any = None


class CallItem(_Item, frozen=True, kw_only=True, tag="function_call"):
    """With what clients made of the arguments."""

    call_id: str
    name: str
    arguments: str
    parsed_arguments: Any = None
    namespace: Annotated[Any, Neutral()] = None
    is_async: Annotated[Any, Neutral()] = msgspec.field(default=None, name="async")
    caller: Annotated[Any, Neutral()] = None


class OutputItem(_Item, frozen=True, kw_only=True, tag="function_call_output"):
    call_id: str
    output: str | list[ItemPart]


class ReasoningItem(_Item, frozen=True, kw_only=True, tag="reasoning"):
    """`summary` is made of the content, for readers."""

    content: list[ThoughtPart] | None = None
    summary: Any = None
    encrypted_content: Annotated[Any, Neutral("")] = None


class ReferenceItem(_Item, frozen=True, kw_only=True, tag="item_reference"):
    pass


AnyItem: Any = MessageItem | CallItem | OutputItem | ReasoningItem | ReferenceItem


def new_id(kind: str) -> str:
    """An id for an item of this kind."""
    return f"{PREFIXES[kind]}_{secrets.token_hex(24)}"


def _kind_of(item: Item) -> Any:
    kind = "item_reference" if item.keys() <= {"type", "id"} else "message"
    return kind if item.get("type") is None else item["type"]


def items_of(found: Sequence[Item], item_of: Callable[[str], Item | None]) -> list[Item]:
    """The items of `input`; `item_of` gives those that a client refers to. Raises `ApiError`."""
    items = []
    for place, item in enumerate(found):
        if _kind_of(item) == "item_reference":
            name = item.get("id")
            kept = item_of(name) if isinstance(name, str) else None
            if kept is None:
                where = f"input[{place}].id"
                text = f"expected the id of an item of a response that is kept here, got {name!r:.80}; send "
                text = f"{where}: {text}the item itself, as with store false"
                raise ApiError(404, text, where, "item_not_found")
            item = kept
        items.append(item)
    return items


def messages_of(items: Sequence[Item]) -> Placed:
    """The messages that these items are. Raises `Misfit`."""
    placed: Placed = []
    own: Message | None = None  # the model's turn that goes on
    for place, item in enumerate(items):
        where = f"input[{place}]"
        try:
            said = fit({**item, "type": _kind_of(item)}, AnyItem)
        except Misfit as error:
            raise error.within(("input", place)) from None
        if isinstance(said, OutputItem):
            found: Message = {"role": "tool", "tool_call_id": said.call_id, "content": text_of(said.output)}
        elif isinstance(said, CallItem):
            function = {"name": said.name, "arguments": said.arguments}
            found = {"tool_calls": [{"id": said.call_id, "type": "function", "function": function}]}
        elif isinstance(said, MessageItem):
            found = {"content": text_of(said.content)}
            found |= {} if said.role == "assistant" else {"role": said.role}
        else:
            found = {"reasoning_content": text_of(said.content or "")}
            if not said.content:
                continue
        if "role" in found:
            own = None
            placed.append((found, where))
            continue
        (name,) = found
        if own is not None and name == "tool_calls" and name in own:
            own[name] += found[name]
        elif own is None or any(each in own for each in _IN_A_TURN[_IN_A_TURN.index(name) :]):
            own = {"role": "assistant", **found}
            placed.append((own, where))
        else:
            own |= found
    return placed


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
