"""A request to `/v1/responses`, read as the chat that it stands for: whatever chats learn, responses have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from functools import cache
from typing import Any

from flowspec.core.protocol import limits
from flowspec.errors import meant
from flowspec.serve.completion_request import TOKENS_MAX, CompletionRequest, chat_wanted
from flowspec.serve.fields import Fields, json_of
from flowspec.serve.refusals import ApiError, invalid
from flowspec.serve.responses.items import Placed, messages_of, read_input
from flowspec.serve.responses.store import ResponseStore

LOGPROBS = "message.output_text.logprobs"
NEVER_HERE = (
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
"""What `include` may name without effect: parts of items that no response has here."""
INCLUDABLE = (LOGPROBS, *NEVER_HERE)
_METADATA_MAX = (16, 64, 512)
"""Pairs, characters of a name, and of a value."""
_CALLED_HERE = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "logprobs": f"include with {LOGPROBS}",
    "functions": "tools",
    "function_call": "tool_choice",
}
"""Fields of chats that responses have under another name."""
_NAMES = (
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("max_completion_tokens", "max_output_tokens"),
    ("reasoning_effort", "reasoning.effort"),
    ("verbosity", "text.verbosity"),
)
_MESSAGE = re.compile(r"messages\[([0-9]+)\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRequest(CompletionRequest):
    """A chat with what responses have beside it.

    `said` are the fields that the response repeats; `items` is the dialogue without instructions, as a JSON
    list of items; `places` names for each of the chat's messages the field that it comes from.
    """

    said: Mapping[str, Any]
    items: bytes
    is_kept: bool
    places: tuple[str, ...]

    def named(self, error: ApiError) -> ApiError:
        return _named(error, self.places)


def response_wanted(store: ResponseStore, body: dict[str, Any]) -> ResponseRequest:
    """A request, with the dialogue of the response that it goes on from; raises `ApiError`."""
    fields = Fields(body)
    for field, name in _CALLED_HERE.items():
        if fields.take(field) is not None:
            raise ApiError(
                400, f"{field}: in this API that is {name}; expected nothing", field, "unknown_parameter"
            )
    placed, items = read_input(fields.needed("input"), cache(store.item))  # which reads a whole response
    instructions = fields.text("instructions")
    previous = fields.text("previous_response_id")
    earlier = None if previous is None else store.find(previous)
    if previous is not None and earlier is None:
        raise store.missing(previous, "previous_response_id", "previous_response_not_found")
    is_kept = fields.take("store")
    if is_kept is not None and type(is_kept) is not bool:
        raise invalid("store", "true or false", is_kept, "invalid_type")
    metadata = _metadata(fields)
    longest = fields.whole("max_output_tokens", 1, TOKENS_MAX)
    has_logprobs, top = _logprobs(fields)
    text, effort = fields.inner("text"), _effort(fields)
    form, verbosity = _form(text), text.take("verbosity")
    text.finish()
    tools, choice = _tools(fields), _tool_choice(fields)
    options = fields.inner("stream_options")
    options.flag("include_obfuscation")  # as of chats
    options.finish()
    most_calls = fields.whole("max_tool_calls", 0, limits.CONTEXT_MAX)  # of tools that are built in: none are
    fields.neutral("background", False)
    fields.neutral("truncation", "disabled")
    fields.neutral("n", 1)
    fields.neutral("context_management", [])
    for field in ("conversation", "prompt", "moderation", "image", "access_programs", "background_options"):
        fields.neutral(field)
    if earlier is not None:
        said_before = earlier.items
        placed = [*((each, "previous_response_id") for each, _ in messages_of(said_before)), *placed]
        items = [*said_before, *items]
    if instructions:
        placed = _instructed(instructions, placed)
    places = tuple(where for _, where in placed)
    chat = fields.rest() | {
        "messages": [message for message, _ in placed],
        "max_completion_tokens": longest,
        "logprobs": has_logprobs,
        "top_logprobs": top,
        "response_format": form,
        "reasoning_effort": effort,
        "verbosity": verbosity,
        "tools": tools,
        "tool_choice": choice,
    }
    try:
        wanted = chat_wanted(chat)
    except ApiError as error:
        if error.code == "unknown_parameter" and error.param in body:
            hint = meant(error.param, fields.known)
            error = replace(error, message=f"unknown field {error.param!r:.120}{hint}") if hint else error
        raise _named(error, places) from None
    said = {
        "instructions": instructions,
        "max_output_tokens": longest,
        "max_tool_calls": most_calls,
        "metadata": metadata,
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": previous,
        "reasoning": {"effort": effort, "summary": None},
        "store": is_kept is not False,
        "text": {"format": (body.get("text") or {}).get("format") or {"type": "text"}},
        "tool_choice": "auto" if choice is None else body["tool_choice"],
        "tools": body.get("tools") or [],
        "top_logprobs": top or 0,
    }
    json_of(said)  # a response has to be able to repeat it
    return ResponseRequest(
        **{each.name: getattr(wanted, each.name) for each in dataclass_fields(wanted)},
        said=said,
        items=json_of(items, "input"),
        is_kept=is_kept is not False,
        places=places,
    )


def _instructed(instructions: str, placed: Placed) -> Placed:
    """The dialogue behind its instructions. System messages that it begins with are put together with them:
    many templates have a place for one alone, and refuse or leave out a second."""
    texts = [instructions]
    rest = list(placed)
    while rest and rest[0][0]["role"] in ("system", "developer"):
        texts.append(rest.pop(0)[0]["content"])
    return [({"role": "system", "content": "\n\n".join(texts)}, "instructions"), *rest]


def _named(error: ApiError, places: tuple[str, ...]) -> ApiError:
    """What is said of a chat's field as said of the field here."""
    if error.param is None:
        return error
    param = error.param
    if found := _MESSAGE.match(param):
        param = places[int(found[1])]
    elif param == "messages":
        param = "input"
    elif param.startswith(("tools[", "tool_choice.")):
        param = param.replace(".allowed_tools", "", 1).replace(".function", "", 1)
    else:
        for name, here in _NAMES:
            if param == name or param.startswith((f"{name}.", f"{name}[")):
                param = here + param[len(name) :]
                break
    message = error.message
    if message.startswith(error.param):
        message = param + message[len(error.param) :]
    return replace(error, param=param, message=message)


def _metadata(fields: Fields) -> dict[str, str]:
    found = fields.take("metadata")
    pairs, name_chars, value_chars = _METADATA_MAX
    if found is not None and not (
        type(found) is dict
        and len(found) <= pairs
        and all(type(value) is str and len(value) <= value_chars for value in found.values())
        and all(len(name) <= name_chars for name in found)
    ):
        expected = f"at most {pairs} names (of {name_chars} characters) with strings (of {value_chars})"
        raise invalid("metadata", expected, found)
    return found or {}


def _logprobs(fields: Fields) -> tuple[bool, int | None]:
    """Whether log-probabilities are wanted, and of how many other tokens."""
    found = fields.take("include")
    if found is not None and (type(found) is not list or not all(type(each) is str for each in found)):
        raise invalid("include", "a list of strings", found, "invalid_type")
    for each in found or ():
        if each not in INCLUDABLE:
            raise invalid("include", f"some of {', '.join(INCLUDABLE)}", each)
    is_wanted = LOGPROBS in (found or ())
    top = fields.whole("top_logprobs", 0, limits.TOP_LOGPROBS_MAX)
    if top and not is_wanted:
        raise ApiError(
            400,
            f"top_logprobs: expected include to have {LOGPROBS} beside it",
            "top_logprobs",
            "invalid_value",
        )
    return is_wanted, top if is_wanted else None


def _effort(fields: Fields) -> Any:
    reasoning = fields.inner("reasoning")
    found = reasoning.take("effort")
    for field in ("summary", "generate_summary"):
        reasoning.neutral(field, "auto")  # where there is one
    reasoning.finish()
    return found


def _form(text: Fields) -> Any:
    """The chat's `response_format`."""
    found = text.take("format")
    if not isinstance(found, dict) or found.get("type") != "json_schema":
        return found
    return {"type": "json_schema", "json_schema": {name: found[name] for name in found if name != "type"}}


def _tools(fields: Fields) -> Any:
    """The chat's `tools`: a function's fields are an object of their own there."""
    found = fields.take("tools")
    if not isinstance(found, list):
        return found
    tools = []
    for place, tool in enumerate(found):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            kind = tool.get("type") if isinstance(tool, dict) else tool
            raise ApiError(
                400,
                f"tools[{place}].type: FlowSpec has no tools of its own; expected function, got {kind!r:.40}",
                f"tools[{place}].type",
                "unsupported_parameter",
            )
        tools.append(_as_chats(tool))
    return tools


def _tool_choice(fields: Fields) -> Any:
    """The chat's `tool_choice`: what is said of a function, or of those that are allowed, is an object of its
    own there."""
    found = fields.take("tool_choice")
    if not isinstance(found, dict) or found.get("type") not in ("function", "allowed_tools"):
        return found
    said = {name: found[name] for name in found if name != "type"}
    if found["type"] == "allowed_tools" and isinstance(said.get("tools"), list):
        said["tools"] = [_as_chats(each) for each in said["tools"]]
    return {"type": found["type"], found["type"]: said}


def _as_chats(tool: Any) -> Any:
    """A function whose fields are an object of their own."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool
    return {"type": "function", "function": {name: tool[name] for name in tool if name != "type"}}
