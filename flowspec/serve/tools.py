"""The tools that a request offers, and whether they may or have to be called."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from flowspec.model.reply.bound import Wanted
from flowspec.model.reply.parts import Tool
from flowspec.serve.bodies import Asked
from flowspec.serve.refusals import invalid

TOOLS_MAX = 128
TOOL_BYTES_MAX = 1 << 20
"""Of all tools together, as JSON."""
FunctionType = Annotated[
    Literal["function"], Meta(description="function, since FlowSpec has no tools of its own")
]
ToolName = Annotated[
    str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}\Z", description="1 to 64 of a-z, A-Z, 0-9, _ and -")
]
Schema = Annotated[
    dict[str, Any], Meta(description="a JSON schema, which is an object (where it is text, parse it first)")
]
TOOLS = Meta(max_length=TOOLS_MAX, description=f"a list of at most {TOOLS_MAX} tools")
Mode = Literal["auto", "required"]


class Function(Asked, frozen=True, kw_only=True):
    name: ToolName
    description: str | None = None
    parameters: Schema | None = None
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


CHOICES = "none, auto, required, a function, or allowed_tools"
ToolChoice = Annotated[
    Literal["none", "auto", "required"] | ChosenTool | AllowedTools, Meta(description=CHOICES)
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools that the model is told of, and whether only one call is wanted; `bound`: what calls are bound
    to, where they are."""

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
    """The names in what says which tools may be called, by their places: chats have them deeper than
    responses."""
    if isinstance(said, dict):
        for key, each in said.items():
            yield from _names_in(each, f"{place}.{key}")
    elif isinstance(said, list):
        for number, each in enumerate(said):
            yield from _names_in(each, f"{place}[{number}]")
    elif place.endswith(".name"):
        yield place, said
