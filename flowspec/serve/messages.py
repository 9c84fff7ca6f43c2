"""A dialogue of a request, and how chat templates take it: its messages, and what else a template looks at,
such as whether to think, and how hard."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from flowspec.model.chat_template import TemplateNames
from flowspec.model.text import Messages
from flowspec.serve.bodies import Asked, Neutral
from flowspec.serve.refusals import ApiError, invalid, unsupported

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


# ------------------------------------------------------------------------------------------- variables

VARIABLES_MAX = 64
VARIABLE_BYTES_MAX = 1 << 16
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
_SWITCHES = ("enable_thinking", "thinking")
"""By which templates let a model think, or not."""
_TAKEN = (
    *("messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation"),
    *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
    *("self", "raise_exception", "strftime_now", "additional_special_tokens"),
)
"""What is said otherwise, or is the tokenizer's own."""
_OWN = rf"^(?!({'|'.join(_TAKEN)})\Z)[^\W\d]\w*\Z"
VariableName = Annotated[str, Meta(pattern=_OWN, description="names of the template's own variables")]
Variables = Annotated[
    dict[VariableName, Any],
    Meta(max_length=VARIABLES_MAX, description=f"an object of at most {VARIABLES_MAX} variables"),
]


def variables_of(
    named: Mapping[str, Any],
    thinks: bool | None,
    effort: Effort | None,
    names: TemplateNames,
    *,
    can_think: bool,
) -> dict[str, Any]:
    """What the template that looks at these names is given: variables by their names, and two that other
    servers have, too. Raises `ApiError` for what it does not look at, since that would be ignored.
    `can_think`: the model may write thoughts."""
    for name in named:
        if name not in names.variables:
            raise _unused(f"chat_template_kwargs.{name}", named[name])
    found = dict(named)
    param = "enable_thinking"
    if effort is not None:
        if "reasoning_effort" in names.variables and (effort != "none" or "none" in names.fields):
            _put(found, "reasoning_effort", effort, "reasoning_effort")
        elif effort != "none":
            text = f"this model's chat template has no such levels; expected none or nothing, got {effort!r}"
            raise unsupported("reasoning_effort", text)
        elif can_think:
            if thinks:
                raise invalid("reasoning_effort", "no none where enable_thinking is true", "none")
            thinks, param = False, "reasoning_effort"
    if thinks is not None:
        switch = next((name for name in _SWITCHES if name in names.variables), None)
        if switch is None:
            raise _unused(param, "none" if param == "reasoning_effort" else thinks)
        _put(found, switch, thinks, param)
    return found


def forbids_thoughts(variables: Mapping[str, Any]) -> bool:
    """Whether a template that is given these is told not to let the model think."""
    return variables.get("reasoning_effort") == "none" or any(
        variables.get(name) is False for name in _SWITCHES
    )


def _put(found: dict[str, Any], name: str, value: Any, param: str) -> None:
    """Sets a variable that may have been named with another value."""
    if name in found and found[name] != value:
        raise invalid(param, f"{found[name]!r:.40}, as chat_template_kwargs.{name} beside it", value)
    found[name] = value


def _unused(param: str, got: object) -> ApiError:
    text = f"this model's chat template does not look at it; expected nothing, got {got!r:.80}"
    return unsupported(param, text)
