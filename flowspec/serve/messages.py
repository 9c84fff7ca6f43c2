"""A dialogue of a request, and how chat templates take it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from flowspec.model.text import Messages
from flowspec.serve.bodies import Asked, Neutral
from flowspec.serve.refusals import invalid

MESSAGES_MAX = 4096
CALLS_MAX = 128
"""In one message."""


class Part(Asked, frozen=True, kw_only=True):
    """A part of a content, with what clients made of it."""

    text: str
    annotations: Any = None
    logprobs: Any = None
    cache_control: Any = None
    prompt_cache_breakpoint: Any = None
    parsed: Any = None


class TextPart(Part, frozen=True, kw_only=True):
    type: Annotated[Literal["text"], Meta(description="text, which is all that this model takes")]


class CalledFunction(Asked, frozen=True, kw_only=True):
    name: str
    arguments: str | None = None
    parsed_arguments: Any = None


class Call(Asked, frozen=True, kw_only=True):
    id: str
    type: Literal["function"] | None = None
    function: CalledFunction
    index: Any = None

    @property
    def document(self) -> dict[str, Any]:
        """As templates want it, with the arguments as an object; as the text that they are, where they are
        none: the model wrote it, and reads it again."""
        arguments: Any = self.function.arguments or "{}"
        with suppress(msgspec.DecodeError, RecursionError):
            arguments = msgspec.json.decode(arguments, type=dict[str, Any])
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


Content = Annotated[str | list[TextPart], Meta(description="a string or a list of parts")]


class _Message(Asked, frozen=True, kw_only=True, tag_field="role"):
    content: Content
    name: str | None = None
    reasoning_content: Annotated[Any, Neutral("")] = None
    tool_calls: Annotated[Any, Neutral([])] = None
    annotations: Annotated[Any, Neutral([])] = None
    audio: Annotated[Any, Neutral()] = None
    function_call: Annotated[Any, Neutral()] = None


class SystemMessage(_Message, frozen=True, kw_only=True, tag="system"):
    pass


class DeveloperMessage(_Message, frozen=True, kw_only=True, tag="developer"):
    pass


class UserMessage(_Message, frozen=True, kw_only=True, tag="user"):
    pass


class ToolMessage(_Message, frozen=True, kw_only=True, tag="tool"):
    tool_call_id: str


class AssistantMessage(_Message, frozen=True, kw_only=True, tag="assistant"):
    """Also one that a client gives back as it got it, with what it made of the content."""

    content: Content | None = None  # type: ignore[assignment]
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: (
        Annotated[list[Call], Meta(max_length=CALLS_MAX, description=f"a list of at most {CALLS_MAX} calls")]
        | None
    ) = None
    parsed: Any = None
    provider_specific_fields: Any = None
    refusal: Annotated[Any, Neutral("")] = None


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage
Dialogue = Annotated[
    list[Message],
    Meta(min_length=1, max_length=MESSAGES_MAX, description=f"a list of 1 to {MESSAGES_MAX} messages"),
]


def dialogue_of(messages: Sequence[Message], *, continues: bool) -> Messages:
    """Messages as templates take them, the last of which the answer may continue. Raises `ApiError` for an
    answer to a call that is not there, and where it is not the assistant who would go on."""
    called: dict[str, str] = {}
    dialogue = []
    for place, message in enumerate(messages):
        role = str(message.__struct_config__.tag).replace("developer", "system")
        found: dict[str, Any] = {"role": role, "content": text_of(message.content or "")}
        if isinstance(message, AssistantMessage):
            if thought := message.reasoning_content or message.reasoning:
                found["reasoning_content"] = thought
            if message.tool_calls:
                found["tool_calls"] = [call.document for call in message.tool_calls]
                called |= {call.id: call.function.name for call in message.tool_calls}
        elif isinstance(message, ToolMessage):
            key = message.tool_call_id
            if key not in called:
                name = f"messages[{place}].tool_call_id"
                raise invalid(name, "the id of a call in a message before it", key)
            found |= {"tool_call_id": key, "name": called[key]}
        dialogue.append(found)
    if continues and (found["role"] != "assistant" or "tool_calls" in found):
        text = "the last message to be the assistant's, without calls of tools"
        raise invalid("continue_final_message", text, found["role"])
    return dialogue


def text_of(content: str | Iterable[Part]) -> str:
    """A text, whole or in parts."""
    return content if isinstance(content, str) else "".join(part.text for part in content)
