"""The tools that a request offers, and whether they may or have to be called."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from flowspec.model.reply.bound import Wanted
from flowspec.model.reply.parts import Tool
from flowspec.serve.fields import Fields, json_of
from flowspec.serve.refusals import ApiError, invalid

TOOLS_MAX = 128
TOOL_BYTES_MAX = 1 << 20
"""Of all tools together, as JSON."""
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_CHOICES = "none, auto, required, a function, or allowed_tools"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools that the model is told of, and whether only one call is wanted; `bound`: what calls are bound
    to, where they are."""

    tools: tuple[Tool, ...] = ()
    is_single: bool = False
    bound: Wanted | None = None


NO_TOOLS = ToolUse()


def tools_wanted(fields: Fields) -> ToolUse:
    """What may be called, and what has to be. No tools for `tool_choice` none. Raises `ApiError`."""
    found = fields.take("tools")
    if found is not None and not isinstance(found, list):
        raise invalid("tools", "a list of tools", found, "invalid_type")
    tools, is_strict = _tools(found or [])
    is_parallel = fields.take("parallel_tool_calls")
    if is_parallel is not None and type(is_parallel) is not bool:
        raise invalid("parallel_tool_calls", "true or false", is_parallel, "invalid_type")
    choice = fields.take("tool_choice")
    if choice == "none":
        return NO_TOOLS
    use = ToolUse(tools=tools, is_single=is_parallel is False)
    if choice in (None, "auto"):
        return replace(use, bound=Wanted(tools=tools, is_single=use.is_single)) if is_strict else use
    return _chosen(choice, use)


def _chosen(choice: Any, use: ToolUse) -> ToolUse:
    """With the calls that a choice allows: one of any tool, of the one that it names, or of some."""
    wanted = Wanted(tools=use.tools, is_single=use.is_single, is_required=True)
    if choice != "required":
        if not isinstance(choice, dict):
            raise invalid("tool_choice", _CHOICES, choice)
        named = Fields(choice, "tool_choice.")
        kind = named.needed("type")
        if kind == "function":
            wanted = replace(wanted, tools=(_named(named, use.tools),), is_single=True)
        elif kind == "allowed_tools":
            allowed = named.inner("allowed_tools")
            named.needed("allowed_tools")
            mode, listed = allowed.needed("mode"), allowed.needed("tools")
            allowed.finish()
            if mode not in ("auto", "required"):
                raise invalid("tool_choice.allowed_tools.mode", "auto or required", mode)
            if (
                not isinstance(listed, list)
                or not listed
                or not all(isinstance(each, dict) for each in listed)
            ):
                raise invalid("tool_choice.allowed_tools.tools", "a list of functions", listed)
            names = [
                _named(
                    Fields(each, f"tool_choice.allowed_tools.tools[{place}]."), use.tools, is_listed=True
                ).name
                for place, each in enumerate(listed)
            ]
            some = tuple(tool for tool in use.tools if tool.name in names)
            wanted = replace(wanted, tools=some, is_required=mode == "required")
        else:
            raise invalid("tool_choice.type", "function or allowed_tools", kind)
        named.finish()
    if not use.tools:
        raise invalid("tool_choice", "none or auto where there are no tools", choice)
    return replace(use, is_single=wanted.is_single, bound=wanted)


def _named(named: Fields, tools: tuple[Tool, ...], *, is_listed: bool = False) -> Tool:
    """The tool of these that is named."""
    if is_listed and (kind := named.needed("type")) != "function":
        raise invalid(named.name("type"), "function", kind)
    named.needed("function")
    function = named.inner("function")
    name = function.needed("name")
    function.finish()
    if is_listed:
        named.finish()
    found = next((tool for tool in tools if tool.name == name), None)
    if found is None:
        raise invalid(function.name("name"), "the name of a tool in tools", name)
    return found


def _tools(found: list[Any]) -> tuple[tuple[Tool, ...], bool]:
    """The tools, and whether calls of any are to follow its schema strictly."""
    if len(found) > TOOLS_MAX:
        raise invalid("tools", f"at most {TOOLS_MAX} tools", len(found))
    each = [_tool(tool, f"tools[{place}]") for place, tool in enumerate(found)]
    tools = tuple(tool for tool, _ in each)
    size = len(json_of([tool.document for tool in tools], "tools"))
    if size > TOOL_BYTES_MAX:
        raise invalid("tools", f"at most {TOOL_BYTES_MAX} bytes", size)
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            raise invalid("tools", "tools of different names", tool.name)
        seen.add(tool.name)
    return tools, any(is_strict for _, is_strict in each)


def _tool(found: Any, where: str) -> tuple[Tool, bool]:
    if not isinstance(found, dict):
        raise invalid(where, "an object", found, "invalid_type")
    tool = Fields(found, f"{where}.")
    kind = tool.needed("type")
    if kind != "function":
        raise ApiError(
            400,
            f"{where}.type: FlowSpec does not support this; expected 'function', got {kind!r:.40}",
            f"{where}.type",
            "unsupported_parameter",
        )
    if tool.needed("function") is None or not isinstance(found["function"], dict):
        raise invalid(f"{where}.function", "an object", found["function"], "invalid_type")
    function = tool.inner("function")
    name = function.needed("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise invalid(f"{where}.function.name", "1 to 64 of a-z, A-Z, 0-9, _ and -", name)
    description = function.text("description") or ""
    parameters = function.take("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        got = "text; parse it first" if isinstance(parameters, str) else f"{parameters!r:.80}"
        raise ApiError(
            400,
            f"{where}.function.parameters: expected a JSON schema, which is an object, got {got}",
            f"{where}.function.parameters",
            "invalid_type",
        )
    is_strict = function.flag("strict")
    function.finish()
    tool.ignored("cache_control")
    tool.finish()
    described = {"parameters": parameters} if parameters else {}
    return Tool(name=name, description=description, **described), is_strict
