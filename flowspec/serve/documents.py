"""What clients are told, as types: the documents of the API, and refusals.

A field that is `UNSET` is not told at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette import responses

from flowspec.errors import FlowSpecError, InputError

JSON = "application/json"
Value = TypeVar("Value")
Maybe: TypeAlias = Value | UnsetType
STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",  # proxies are not to hold it back
}
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which clients ignore: the connection is not dead, only silent


def frame(document: Any, name: str = "") -> bytes:
    """A server-sent event, which may say of which type it is; JSON escapes line ends, so it is one line."""
    head = f"event: {name}\n".encode() if name else b""
    return b"%bdata: %b\n\n" % (head, msgspec.json.encode(document))


def json_response(
    document: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> responses.Response:
    return responses.Response(msgspec.json.encode(document), status, headers, JSON)


# ------------------------------------------------------------------------------------------------ refusals

STOPPING = "the server is stopping"
_CODES = {
    400: "invalid_value",
    403: "forbidden",
    404: "not_found",
    405: "method_not_supported",
    408: "request_timeout",
    429: "rate_limit_exceeded",
    500: "internal_error",
    503: "unavailable",
}
"""Of refusals that name none."""


@dataclass(slots=True)
class ApiError(Exception):
    """A refusal; `headers` go with it."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def document(self) -> dict[str, dict[str, str | None]]:
        kind = "rate_limit_error" if self.status == 429 else "invalid_request_error"
        kind = "server_error" if self.status >= 500 else kind
        code = self.code or _CODES.get(self.status)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": code}}

    @property
    def response(self) -> responses.Response:
        return json_response(self.document, self.status, self.headers)


def invalid(param: str, expected: str, got: object) -> ApiError:
    return ApiError(400, f"{param}: expected {expected}, got {got!r:.80}", param)


def unsupported(param: str, text: str) -> ApiError:
    """A field that asks for what this server or its model has not."""
    return ApiError(400, f"{param}: {text}", param, "unsupported_parameter")


def of_error(error: FlowSpecError | str) -> ApiError:
    """What the runtime says of a request: its own fault, or that the cluster cannot answer."""
    return ApiError(400 if isinstance(error, InputError) else 503, str(error))


# ------------------------------------------------------------------------------------ chats and completions


class Logprob(Struct):
    """A token as text and as bytes, and how likely it was; where it was chosen, also the likeliest."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: Maybe[list[Logprob]] = UNSET


class Logprobs(Struct, kw_only=True):
    """Of a chat the first two, of a completion the others."""

    content: Maybe[list[Logprob]] = UNSET
    refusal: Maybe[None] = UNSET
    tokens: Maybe[list[str]] = UNSET
    token_logprobs: Maybe[list[float]] = UNSET
    top_logprobs: Maybe[list[dict[str, float]]] = UNSET
    text_offset: Maybe[list[int]] = UNSET


class Function(Struct):
    arguments: str
    name: Maybe[str] = UNSET


class Call(Struct, kw_only=True):
    """A call of a tool. Of a chunk it has an index, and what goes on with it has arguments alone."""

    index: Maybe[int] = UNSET
    id: Maybe[str] = UNSET
    type: Maybe[Literal["function"]] = UNSET
    function: Function


class Message(Struct, kw_only=True):
    """What the assistant said, or a piece of that."""

    role: Maybe[Literal["assistant"]] = UNSET
    content: Maybe[str | None] = UNSET
    refusal: Maybe[None] = UNSET
    reasoning_content: Maybe[str] = UNSET
    tool_calls: Maybe[list[Call]] = UNSET


class Choice(Struct, kw_only=True):
    """Of a chat a message, of its chunks a delta, of a completion a text."""

    index: int
    message: Maybe[Message] = UNSET
    delta: Maybe[Message] = UNSET
    text: Maybe[str] = UNSET
    logprobs: Logprobs | None
    finish_reason: str | None


class Usage(Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int]


class Completion(Struct, kw_only=True):
    """A chat or completion, or a chunk of one. Of chunks, the last alone has a usage: it is null in others
    where it was asked for, as in the API."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    object: str
    choices: list[Choice] = []
    usage: Maybe[Usage | None] = UNSET


# ------------------------------------------------------------------------------------------------ responses

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class Part(Struct):
    """Of an item's content: thoughts, or text."""

    type: Literal["reasoning_text", "output_text"]
    text: str
    annotations: Maybe[list[Any]] = UNSET
    logprobs: Maybe[list[Logprob]] = UNSET


class OutputItem(Struct, kw_only=True):
    """A message has a role, thoughts a summary, a call the last three fields."""

    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: Status = "in_progress"
    role: Maybe[Literal["assistant"]] = UNSET
    summary: Maybe[list[Any]] = UNSET
    content: Maybe[list[Part]] = UNSET
    call_id: Maybe[str] = UNSET
    name: Maybe[str] = UNSET
    arguments: Maybe[str] = UNSET


class Response(Struct, kw_only=True):
    """A response as far as it has come; the fields from `instructions` on repeat its request."""

    id: str
    object: str = "response"
    created_at: int
    status: Status = "in_progress"
    completed_at: int | None = None
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None
    model: str
    output: list[OutputItem] = []
    usage: dict[str, Any] | None = None
    background: bool = False
    service_tier: str = "default"
    truncation: str = "disabled"
    temperature: float
    top_p: float
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] = {}
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: dict[str, Any]
    store: bool = True
    text: dict[str, Any]
    tool_choice: Any = "auto"
    tools: list[Any] = []
    top_logprobs: int = 0
