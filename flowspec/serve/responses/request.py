"""A request to `/v1/responses`, read as the chat that it stands for: whatever chats learn, responses have.

What the model itself said in one turn is one message of a chat: its text, what it thought before, and the
functions that it called, which are an item each here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from flowspec.core.protocol import limits
from flowspec.serve import completion_request as base
from flowspec.serve import messages as chat
from flowspec.serve.bodies import Asked, Neutral, of_misfit, refusing
from flowspec.serve.documents import ApiError
from flowspec.serve.responses.store import Item, ResponseStore, listed
from flowspec.validation import NOTHING, Misfit, decode_json, expect, fit

ITEMS_MAX = 4096
Items = Annotated[list[Item], Meta(min_length=1, max_length=ITEMS_MAX)]
_INPUT = Meta(description=f"a string or a list of 1 to {ITEMS_MAX} items")
_Key = Annotated[str, Meta(max_length=64)]
_Label = Annotated[str, Meta(max_length=512)]
LOGPROBS = "message.output_text.logprobs"
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
"""Log-probabilities, and what may be named without effect: parts of items that no response has here."""
INCLUDABLE = get_args(Includable)
_IN_A_TURN = ("reasoning_content", "content", "tool_calls")  # what the model says, in this order
Placed = list[tuple[dict[str, Any], str]]
"""Messages of a chat, each with the name of the field that it comes from."""

# --------------------------------------------------------------------------------------------------- items

_TEXT = Meta(description="input_text, output_text or text, since this model takes text")


class ItemPart(chat.Part, frozen=True, kw_only=True):
    type: Annotated[Literal["input_text", "output_text", "text"], _TEXT]


class ThoughtPart(chat.Part, frozen=True, kw_only=True):
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


def _kind_of(item: Item) -> Any:
    kind = "item_reference" if item.keys() <= {"type", "id"} else "message"
    return kind if item.get("type") is None else item["type"]


def _items_of(found: Sequence[Item], store: ResponseStore) -> list[Item]:
    """The items of `input`, and in the place of references what they refer to. Raises `ApiError`."""
    items, item_of = list(found), cache(store.item)  # which reads a whole response
    for place, item in enumerate(found):
        if _kind_of(item) == "item_reference":
            name, where = item.get("id"), f"input[{place}].id"
            kept = item_of(name) if isinstance(name, str) else None
            if kept is None:
                text = f"expected the id of an item of a response that is kept here, got {name!r:.80}; send "
                text = f"{where}: {text}the item itself, as with store false"
                raise ApiError(404, text, where, "item_not_found")
            items[place] = kept
    return items


def messages_of(items: Sequence[Item]) -> Placed:
    """The messages that these items are. Raises `Misfit`."""
    placed: Placed = []
    for place, item in enumerate(items):
        where = f"input[{place}]"
        try:
            said = fit({**item, "type": _kind_of(item)}, AnyItem)
        except Misfit as error:
            raise error.within(("input", place)) from None
        found: dict[str, Any]
        if isinstance(said, OutputItem):
            found = {"role": "tool", "tool_call_id": said.call_id, "content": chat.text_of(said.output)}
        elif isinstance(said, CallItem):
            function = {"name": said.name, "arguments": said.arguments}
            found = {"tool_calls": [{"id": said.call_id, "type": "function", "function": function}]}
        elif isinstance(said, MessageItem):
            found = {"content": chat.text_of(said.content)}
            found |= {} if said.role == "assistant" else {"role": said.role}
        elif said.content:
            found = {"reasoning_content": chat.text_of(said.content)}
        else:
            continue
        # the model's turn that goes on
        own = placed[-1][0] if placed and placed[-1][0]["role"] == "assistant" else {}
        name = next(iter(found))
        if "role" in found:
            placed.append((found, where))
        elif name == "tool_calls" and name in own:
            own[name] += found[name]
        elif not own or any(each in own for each in _IN_A_TURN[_IN_A_TURN.index(name) :]):
            placed.append(({"role": "assistant", **found}, where))
        else:
            own |= found
    return placed


# ---------------------------------------------------------------------------------------------------- body


class FlatTool(chat.Function, frozen=True, kw_only=True):
    type: chat.FunctionType


class _ListedTool(chat.Named, frozen=True, kw_only=True):
    type: Literal["function"]


class ChosenTool(chat.Named, frozen=True, kw_only=True, tag_field="type", tag="function"):
    pass


class AllowedTools(Asked, frozen=True, kw_only=True, tag_field="type", tag="allowed_tools"):
    mode: chat.Mode
    tools: Annotated[list[_ListedTool], Meta(min_length=1)]


class SchemaFormat(base.Described, frozen=True, kw_only=True, tag_field="type", tag="json_schema"):
    pass


class TextOptions(Asked, frozen=True, kw_only=True):
    format: base.TextFormat | base.ObjectFormat | SchemaFormat | None = None
    verbosity: Annotated[Any, Neutral("medium")] = None


class Reasoning(Asked, frozen=True, kw_only=True):
    effort: chat.Effort | None = None
    summary: Annotated[Any, Neutral("auto")] = None
    generate_summary: Annotated[Any, Neutral("auto")] = None


class ResponseStreamOptions(Asked, frozen=True, kw_only=True):
    include_obfuscation: bool | None = None  # as of chats


class ResponseBody(base.DialogueBody, frozen=True, kw_only=True):
    """The fields of chats that are here have another name in this API."""

    input: Annotated[str | Items, _INPUT] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    metadata: Annotated[dict[_Key, _Label], Meta(max_length=16)] | None = None
    max_output_tokens: base.TokenCount | None = None
    include: Annotated[list[Includable], Meta(description=f"a list, such as [{LOGPROBS!r}]")] | None = None
    top_logprobs: base.TopLogprobs | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    tools: Annotated[list[FlatTool], chat.TOOLS] | None = None
    tool_choice: Annotated[chat.AnyMode | ChosenTool | AllowedTools, chat.CHOICES] | None = None
    max_tool_calls: Annotated[int, Meta(ge=0, le=limits.CONTEXT_MAX)] | None = None  # of those built in: none
    stream_options: ResponseStreamOptions | None = None  # type: ignore[assignment]

    background: Annotated[Any, Neutral(False)] = None
    truncation: Annotated[Any, Neutral("disabled")] = None
    n: Annotated[Any, Neutral(1)] = None
    context_management: Annotated[Any, Neutral([])] = None
    conversation: Annotated[Any, Neutral()] = None
    prompt: Annotated[Any, Neutral()] = None
    image: Annotated[Any, Neutral()] = None
    access_programs: Annotated[Any, Neutral()] = None
    background_options: Annotated[Any, Neutral()] = None

    messages: Annotated[Any, Neutral(here="input")] = None
    max_tokens: Annotated[Any, Neutral(here="max_output_tokens")] = None
    max_completion_tokens: Annotated[Any, Neutral(here="max_output_tokens")] = None
    response_format: Annotated[Any, Neutral(here="text.format")] = None
    reasoning_effort: Annotated[Any, Neutral(here="reasoning.effort")] = None
    verbosity: Annotated[Any, Neutral(here="text.verbosity")] = None
    logprobs: Annotated[Any, Neutral(here=f"include with {LOGPROBS}")] = None
    functions: Annotated[Any, Neutral(here="tools")] = None
    function_call: Annotated[Any, Neutral(here="tool_choice")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        # only now: who has messages instead is told what they are called here
        expect(self.input is not None, "input", NOTHING, "a string or a list of items")
        is_told = not self.top_logprobs or LOGPROBS in (self.include or ())
        expect(is_told, "top_logprobs", self.top_logprobs, f"include to have {LOGPROBS} beside it")


@refusing()
def response_wanted(store: ResponseStore, body: bytes) -> base.CompletionRequest[ResponseBody]:
    """A request, with the dialogue of the response that it goes on from; raises `ApiError`."""
    asked = decode_json(body, ResponseBody)
    if isinstance(asked.input, str):
        items = [{"role": "user", "content": asked.input}]
        placed: Placed = [(items[0], "input")]
    else:
        items = _items_of(asked.input or (), store)
        placed = messages_of(items)
    items = [listed(item) for item in items]
    if (previous := asked.previous_response_id) is not None:
        said_before = store.get(previous, "previous_response_id", "previous_response_not_found").items
        placed = [*((each, "previous_response_id") for each, _ in messages_of(said_before)), *placed]
        items = [*said_before, *items]
    if asked.instructions:
        # one system message: many templates have a place for one alone, and refuse or leave out a second
        texts = [asked.instructions]
        while placed and placed[0][0]["role"] in ("system", "developer"):
            texts.append(placed.pop(0)[0]["content"])
        placed.insert(0, ({"role": "system", "content": "\n\n".join(texts)}, "instructions"))
    places = tuple(where for _, where in placed)
    try:
        found = fit([message for message, _ in placed], chat.Dialogue)
        messages = chat.dialogue_of(found, continues=bool(asked.continue_final_message))
    except Misfit as error:
        raise named(of_misfit(error.within(("messages",))), places) from None
    except ApiError as error:
        raise named(error, places) from None
    wanted = asked.build_request(
        (messages,),
        asked.max_output_tokens,
        asked.top_logprobs or 0 if LOGPROBS in (asked.include or ()) else None,
        base.bounds_of("text.format", None if asked.text is None else asked.text.format),
        chat.tool_use_of(asked.tools or (), asked.tool_choice, asked.parallel_tool_calls),
        None if asked.reasoning is None else asked.reasoning.effort,
    )
    return replace(wanted, places=places, items=msgspec.json.encode(items))


def named(error: ApiError, places: tuple[str, ...]) -> ApiError:
    """What is said of a chat's field as said of the field here, where there are `places`."""
    if not places:
        return error
    param = error.param or ""
    found = re.match(r"messages\[([0-9]+)\]", param)
    others = {"messages": "input", "reasoning_effort": "reasoning.effort"}
    here = places[int(found[1])] if found else others.get(param, param)
    return replace(error, param=here or None, message=re.sub(f"^{re.escape(param)}", here, error.message))
