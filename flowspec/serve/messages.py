"""A dialogue of a request, and how chat templates take it: its messages, the tools that it offers, and what
else a template looks at, such as whether to think, and how hard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from flowspec.model.chat_template import TemplateNames
from flowspec.model.reply.bound import Wanted
from flowspec.model.reply.parts import Tool
from flowspec.model.text import Messages
from flowspec.serve.bodies import Asked, Neutral
from flowspec.serve.documents import ApiError, invalid, unsupported

MESSAGES_MAX = 4096
CALLS_MAX = 128  # in one message
_CALLS = Meta(max_length=CALLS_MAX, description=f"a list of at most {CALLS_MAX} calls")


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
        """As templates want it, with the arguments as an object, or as the text that the model wrote."""
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
    tool_calls: Annotated[list[Call], _CALLS] | None = None
    parsed: Any = None
    provider_specific_fields: Any = None
    refusal: Annotated[Any, Neutral("")] = None


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage
_MESSAGES = f"a list of 1 to {MESSAGES_MAX} messages"
Dialogue = Annotated[list[Message], Meta(min_length=1, max_length=MESSAGES_MAX, description=_MESSAGES)]


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
    return content if isinstance(content, str) else "".join(part.text for part in content)


# ------------------------------------------------------------------------------------------------ tools

TOOLS_MAX = 128
TOOL_BYTES_MAX = 1 << 20  # of all tools together, as JSON
_FUNCTION = Meta(description="function, since FlowSpec has no tools of its own")
_NAME = Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}\Z", description="1 to 64 of a-z, A-Z, 0-9, _ and -")
_SCHEMA = Meta(description="a JSON schema, which is an object (where it is text, parse it first)")
FunctionType = Annotated[Literal["function"], _FUNCTION]
TOOLS = Meta(max_length=TOOLS_MAX, description=f"a list of at most {TOOLS_MAX} tools")
CHOICES = Meta(description="none, auto, required, a function, or allowed_tools")
Mode = Literal["auto", "required"]
AnyMode = Literal["none", "auto", "required"]


class Function(Asked, frozen=True, kw_only=True):
    name: Annotated[str, _NAME]
    description: str | None = None
    parameters: Annotated[dict[str, Any], _SCHEMA] | None = None
    strict: bool | None = None

    @property
    def tool(self) -> Tool:
        described = {"parameters": self.parameters} if self.parameters else {}
        return Tool(name=self.name, description=self.description or "", **described)


class ChatTool(Asked, frozen=True, kw_only=True):
    type: FunctionType
    function: Function
    cache_control: Any = None


class Named(Asked, frozen=True, kw_only=True):
    name: str


class _ListedTool(Asked, frozen=True, kw_only=True):
    type: Literal["function"]
    function: Named


class _Allowed(Asked, frozen=True, kw_only=True):
    mode: Mode
    tools: Annotated[list[_ListedTool], Meta(min_length=1)]


class ChosenTool(Asked, frozen=True, kw_only=True, tag_field="type", tag="function"):
    function: Named


class AllowedTools(Asked, frozen=True, kw_only=True, tag_field="type", tag="allowed_tools"):
    allowed_tools: _Allowed


ToolChoice = Annotated[AnyMode | ChosenTool | AllowedTools, CHOICES]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools that the model is told of, whether only one call is wanted, and what binds calls, if any."""

    tools: tuple[Tool, ...] = ()
    is_single: bool = False
    bound: Wanted | None = None


NO_TOOLS = ToolUse()


def tool_use_of(
    functions: Sequence[Function], choice: Asked | str | None, is_parallel: bool | None
) -> ToolUse:
    """What may be called, and what has to be. No tools for a choice of none. Raises `ApiError`."""
    tools = tuple(each.tool for each in functions)
    size = len(msgspec.json.encode([tool.document for tool in tools]))
    if size > TOOL_BYTES_MAX:
        raise invalid("tools", f"at most {TOOL_BYTES_MAX} bytes", size)
    names = [tool.name for tool in tools]
    if twice := [name for place, name in enumerate(names) if name in names[:place]]:
        raise invalid("tools", "tools of different names", twice[0])
    if choice == "none":
        return NO_TOOLS
    if choice == "required" and not tools:
        raise invalid("tool_choice", "none or auto where there are no tools", choice)
    said, some, is_single = msgspec.to_builtins(choice), tools, is_parallel is False
    is_required = choice == "required"
    is_bound = is_required or any(each.strict for each in functions)
    if isinstance(said, dict):
        named = dict(_names_in(said, "tool_choice"))
        for place, name in named.items():
            if name not in names:
                raise invalid(place, "the name of a tool in tools", name)
        some = tuple(tool for tool in tools if tool.name in named.values())
        is_single = is_single or said["type"] == "function"
        is_required, is_bound = said.get("allowed_tools", said).get("mode") != "auto", True
    bound = Wanted(tools=some, is_single=is_single, is_required=is_required) if is_bound else None
    return ToolUse(tools=tools, is_single=is_single, bound=bound)


def _names_in(said: Any, place: str) -> Iterator[tuple[str, str]]:
    """The names of tools that may be called, by their places: chats have them deeper than responses."""
    if isinstance(said, dict):
        for key, each in said.items():
            yield from _names_in(each, f"{place}.{key}")
    elif isinstance(said, list):
        for number, each in enumerate(said):
            yield from _names_in(each, f"{place}[{number}]")
    elif place.endswith(".name"):
        yield place, said


# ------------------------------------------------------------------------------------------- variables

VARIABLES_MAX = 64
VARIABLE_BYTES_MAX = 1 << 16
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
_SWITCHES = ("enable_thinking", "thinking")  # by which templates let a model think, or not
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
_VARIABLES = Meta(max_length=VARIABLES_MAX, description=f"an object of at most {VARIABLES_MAX} variables")
Variables = Annotated[dict[VariableName, Any], _VARIABLES]


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
    is_off = any(variables.get(name) is False for name in _SWITCHES)
    return is_off or variables.get("reasoning_effort") == "none"


def _put(found: dict[str, Any], name: str, value: Any, param: str) -> None:
    if name in found and found[name] != value:
        raise invalid(param, f"{found[name]!r:.40}, as chat_template_kwargs.{name} beside it", value)
    found[name] = value


def _unused(param: str, got: object) -> ApiError:
    text = f"this model's chat template does not look at it; expected nothing, got {got!r:.80}"
    return unsupported(param, text)
