"""A request to `/v1/responses`, read as the chat that it stands for: whatever chats learn, responses have."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from flowspec.core.protocol import limits
from flowspec.serve.bodies import Asked, Neutral, of_misfit, refusing
from flowspec.serve.completion_request import (
    CompletionRequest,
    Described,
    DialogueBody,
    ObjectFormat,
    TextFormat,
    TokenCount,
    TopLogprobs,
    bounds_of,
)
from flowspec.serve.messages import Dialogue, Effort, dialogue_of
from flowspec.serve.refusals import ApiError
from flowspec.serve.responses.items import Item, Placed, items_of, listed, messages_of
from flowspec.serve.responses.store import ResponseStore
from flowspec.serve.tools import CHOICES, TOOLS, Function, FunctionType, Mode, Named, tool_use_of
from flowspec.validation import NOTHING, Misfit, decode_json, expect, fit

ITEMS_MAX = 4096
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
_MESSAGE = re.compile(r"messages\[([0-9]+)\]")


class FlatTool(Function, frozen=True, kw_only=True):
    type: FunctionType


class _ListedTool(Named, frozen=True, kw_only=True):
    type: Literal["function"]


class ChosenTool(Named, frozen=True, kw_only=True, tag_field="type", tag="function"):
    pass


class AllowedTools(Asked, frozen=True, kw_only=True, tag_field="type", tag="allowed_tools"):
    mode: Mode
    tools: Annotated[list[_ListedTool], Meta(min_length=1)]


class SchemaFormat(Described, frozen=True, kw_only=True, tag_field="type", tag="json_schema"):
    pass


class TextOptions(Asked, frozen=True, kw_only=True):
    format: TextFormat | ObjectFormat | SchemaFormat | None = None
    verbosity: Annotated[Any, Neutral("medium")] = None


class Reasoning(Asked, frozen=True, kw_only=True):
    effort: Effort | None = None
    summary: Annotated[Any, Neutral("auto")] = None
    generate_summary: Annotated[Any, Neutral("auto")] = None


class ResponseStreamOptions(Asked, frozen=True, kw_only=True):
    include_obfuscation: bool | None = None  # as of chats


class ResponseBody(DialogueBody, frozen=True, kw_only=True):
    """The fields of chats that are here have another name in this API."""

    input: (
        Annotated[
            str | Annotated[list[Item], Meta(min_length=1, max_length=ITEMS_MAX)],
            Meta(description=f"a string or a list of 1 to {ITEMS_MAX} items"),
        ]
        | None
    ) = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
            Meta(max_length=16),
        ]
        | None
    ) = None
    max_output_tokens: TokenCount | None = None
    include: Annotated[list[Includable], Meta(description=f"a list, such as [{LOGPROBS!r}]")] | None = None
    top_logprobs: TopLogprobs | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    tools: Annotated[list[FlatTool], TOOLS] | None = None
    tool_choice: (
        Annotated[Literal["none", "auto", "required"] | ChosenTool | AllowedTools, Meta(description=CHOICES)]
        | None
    ) = None
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
def response_wanted(store: ResponseStore, body: bytes) -> CompletionRequest[ResponseBody]:
    """A request, with the dialogue of the response that it goes on from; raises `ApiError`."""
    asked = decode_json(body, ResponseBody)
    if isinstance(asked.input, str):
        items = [{"role": "user", "content": asked.input}]
        placed: Placed = [(items[0], "input")]
    else:
        items = items_of(asked.input or (), cache(store.item))  # which reads a whole response
        placed = messages_of(items)
    items = [listed(item) for item in items]
    if (previous := asked.previous_response_id) is not None:
        said_before = store.get(previous, "previous_response_id", "previous_response_not_found").items
        placed = [*((each, "previous_response_id") for each, _ in messages_of(said_before)), *placed]
        items = [*said_before, *items]
    if asked.instructions:
        placed = _instructed(asked.instructions, placed)
    places = tuple(where for _, where in placed)
    try:
        found = fit([message for message, _ in placed], Dialogue)
        messages = dialogue_of(found, continues=bool(asked.continue_final_message))
    except Misfit as error:
        raise named(of_misfit(error.within(("messages",))), places) from None
    except ApiError as error:
        raise named(error, places) from None
    wanted = asked.build_request(
        (messages,),
        asked.max_output_tokens,
        asked.top_logprobs or 0 if LOGPROBS in (asked.include or ()) else None,
        bounds_of("text.format", None if asked.text is None else asked.text.format),
        tool_use_of(asked.tools or (), asked.tool_choice, asked.parallel_tool_calls),
        None if asked.reasoning is None else asked.reasoning.effort,
    )
    return replace(wanted, places=places, items=msgspec.json.encode(items))


def _instructed(instructions: str, placed: Placed) -> Placed:
    """The dialogue behind its instructions. System messages that it begins with are put together with them:
    many templates have a place for one alone, and refuse or leave out a second."""
    texts = [instructions]
    rest = list(placed)
    while rest and rest[0][0]["role"] in ("system", "developer"):
        texts.append(rest.pop(0)[0]["content"])
    return [({"role": "system", "content": "\n\n".join(texts)}, "instructions"), *rest]


def named(error: ApiError, places: tuple[str, ...]) -> ApiError:
    """What is said of a chat's field as said of the field here, where there are `places`."""
    if not places:
        return error
    param = error.param or ""
    found = _MESSAGE.match(param)
    others = {"messages": "input", "reasoning_effort": "reasoning.effort"}
    here = places[int(found[1])] if found else others.get(param, param)
    return replace(error, param=here or None, message=re.sub(f"^{re.escape(param)}", here, error.message))
