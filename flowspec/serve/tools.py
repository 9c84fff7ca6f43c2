"""The tools that a request offers, and whether they may be called."""

from __future__ import annotations

import re
from typing import Any

from flowspec.model.reply.parts import Tool
from flowspec.serve.fields import Fields, json_bytes
from flowspec.serve.refusals import ApiError, invalid

TOOLS_MAX = 128
TOOL_BYTES_MAX = 1 << 20
"""Of all tools together, as JSON."""
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NO_GRAMMAR = "what a model calls is not bound to a format yet"


def tools_wanted(fields: Fields) -> tuple[tuple[Tool, ...], bool]:
    """The tools that may be called, and whether only one call is wanted. None of them for `tool_choice` none.
    Raises `ApiError`."""
    found = fields.take("tools")
    if found is not None and not isinstance(found, list):
        raise invalid("tools", "a list of tools", found, "invalid_type")
    tools = _tools(found or [])
    is_parallel = fields.take("parallel_tool_calls")
    if is_parallel is not None and type(is_parallel) is not bool:
        raise invalid("parallel_tool_calls", "true or false", is_parallel, "invalid_type")
    choice = fields.take("tool_choice")
    if choice == "none":
        return (), False
    if choice not in (None, "auto"):
        _forced(choice, tools)
    return tools, is_parallel is False


def _tools(found: list[Any]) -> tuple[Tool, ...]:
    if len(found) > TOOLS_MAX:
        raise invalid("tools", f"at most {TOOLS_MAX} tools", len(found))
    tools = tuple(_tool(tool, f"tools[{place}]") for place, tool in enumerate(found))
    size = json_bytes("tools", [tool.document for tool in tools])
    if size > TOOL_BYTES_MAX:
        raise invalid("tools", f"at most {TOOL_BYTES_MAX} bytes", size)
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            raise invalid("tools", "tools of different names", tool.name)
        seen.add(tool.name)
    return tools


def _tool(found: Any, where: str) -> Tool:
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
        raise invalid(f"{where}.function.parameters", "a JSON schema", parameters, "invalid_type")
    if function.flag("strict"):
        raise _no_grammar(f"{where}.function.strict", "false or nothing", True)
    function.finish()
    tool.ignored("cache_control")
    tool.finish()
    return Tool(name=name, description=description, **({"parameters": parameters} if parameters else {}))


def _forced(choice: Any, tools: tuple[Tool, ...]) -> None:
    """A choice by which a tool has to be called, for which there is no grammar yet: raises `ApiError`."""
    if choice != "required":
        if not isinstance(choice, dict):
            raise invalid("tool_choice", "none, auto, required, or a function", choice)
        named = Fields(choice, "tool_choice.")
        if named.needed("type") != "function":
            raise invalid("tool_choice.type", "function", choice["type"])
        function = named.inner("function")
        name = function.needed("name")
        function.finish()
        named.finish()
        if name not in [tool.name for tool in tools]:
            raise invalid("tool_choice.function.name", "the name of a tool in tools", name)
    if not tools:
        raise invalid("tool_choice", "none or auto where there are no tools", choice)
    raise _no_grammar("tool_choice", "none or auto", choice)


def _no_grammar(field: str, expected: str, got: object) -> ApiError:
    return ApiError(
        400, f"{field}: {_NO_GRAMMAR}; expected {expected}, got {got!r:.80}", field, "unsupported_parameter"
    )
