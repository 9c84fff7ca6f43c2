"""Tools, calls and what templates are told, as they come in requests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flowspec.model.reply.bound import Wanted
from flowspec.model.reply.parts import Part, Tool
from flowspec.model.template_names import TemplateNames, names_in
from flowspec.serve.calls import CallDeltas
from flowspec.serve.refusals import ApiError
from flowspec.serve.template_variables import TemplateVariables
from flowspec.serve.tools import ToolUse
from tests.serve.test_requests import HELLO, chat, refusal

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def tool(name: Any = "get_weather", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {
        "type": "allowed_tools",
        "allowed_tools": {"mode": mode, "tools": [tool(name) for name in names]},
    }


def test_a_message_may_come_back_as_clients_hold_it() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    made = {**call, "function": {**call["function"], "parsed_arguments": {"a": 1}}}
    plain = {"role": "assistant", "content": "b", "tool_calls": [call]}
    more = {"parsed": {"first": 1}, "refusal": "", "provider_specific_fields": {"x": 1}}
    held = {**plain, "tool_calls": [made], **more}
    assert chat(messages=[*HELLO, held]).prompts == chat(messages=[*HELLO, plain]).prompts
    last = refusal(chat, messages=[*HELLO, plain], continue_final_message=True)
    assert last.param == "continue_final_message"


def test_tools_as_templates_have_them() -> None:
    found = chat(tools=[tool(description="d", parameters=SCHEMA, strict=False), tool("g")]).tool_use
    assert found.bound is None
    assert found.tools == (Tool(name="get_weather", description="d", parameters=SCHEMA), Tool(name="g"))
    assert not found.is_single
    assert found.tools[0].document == tool(description="d", parameters=SCHEMA)
    assert found.tools[1].document == tool(
        "g", description="", parameters={"type": "object", "properties": {}}
    )


def test_what_may_be_called() -> None:
    assert chat(tools=[tool()], tool_choice="none").tool_use == ToolUse()
    assert chat(tools=[tool(strict=True)], tool_choice="none").tool_use == ToolUse()
    found = chat(tools=[tool()], tool_choice="auto", parallel_tool_calls=True).tool_use
    assert (len(found.tools), found.bound) == (1, None)
    assert chat(tools=[tool()], parallel_tool_calls=False).tool_use.is_single
    assert chat(tools=None, tool_choice=None, parallel_tool_calls=None).tool_use == ToolUse()


F, G = Tool(name="f"), Tool(name="g")


@pytest.mark.parametrize(
    ("fields", "bound", "is_single"),
    [
        ({"tools": [tool("f", strict=True), tool("g")]}, Wanted(tools=(F, G)), False),
        (
            {"tools": [tool("f"), tool("g", strict=True)], "parallel_tool_calls": False},
            Wanted(tools=(F, G), is_single=True),
            True,
        ),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            Wanted(tools=(F, G), is_required=True, is_single=True),
            True,
        ),
        ({"tool_choice": tool("g")}, Wanted(tools=(G,), is_required=True, is_single=True), True),
        ({"tool_choice": allowed("auto", "g")}, Wanted(tools=(G,)), False),
        ({"tool_choice": allowed("required", "g", "f")}, Wanted(tools=(F, G), is_required=True), False),
        (
            {"response_format": {"type": "json_object"}},
            Wanted(tools=(F, G), answer=("json_schema", '{"type":"object"}')),
            False,
        ),
        (
            {"structured_outputs": {"regex": "a"}, "tool_choice": "required"},
            Wanted(tools=(F, G), is_required=True, answer=("regex", "a")),
            False,
        ),
    ],
)
def test_what_calls_are_bound_to(fields: dict[str, Any], bound: Wanted, is_single: bool) -> None:
    found = chat(**{"tools": [tool("f"), tool("g")], **fields})
    assert found.tool_use == ToolUse(tools=(F, G), is_single=is_single, bound=bound)
    assert found.params.bound is None, "what binds the text is a part of that"


def dialogue(*messages: dict[str, Any]) -> Any:
    return chat(messages=[*HELLO, *messages]).prompts[0]


def called(arguments: str = '{"city": "Paris"}', **more: Any) -> dict[str, Any]:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}, **more}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def test_calls_and_results_as_templates_have_them() -> None:
    result = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]}
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"city": "Paris"}}}
    found = dialogue({**called(index=0), "reasoning_content": "Hm."}, result)
    assert found[1:] == [
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Hm.",
            "tool_calls": [call],
        },
        {"role": "tool", "content": "sunny", "tool_call_id": "call_1", "name": "f"},
    ]
    assert (
        dialogue({"role": "assistant", "content": "x", "reasoning": "Hm."})[1]["reasoning_content"] == "Hm."
    )


def test_arguments_that_are_no_object_stay_the_text_that_the_model_wrote() -> None:
    broken = ("oops", "[1]", '{"a": ', "[" * 100_000, '{"a": NaN}', '{"a": -Infinity}', '{"a": 1e9999}')
    for arguments in broken:
        assert dialogue(called(arguments))[1]["tool_calls"][0]["function"]["arguments"] == arguments


def test_the_long_numbers_of_all_arguments_are_counted_together() -> None:
    """They take the time of thousands of characters each; arguments beyond them stay texts."""
    found = dialogue(*[called('{"a": 1e3999}') for _ in range(20)])[1:]
    read = [message["tool_calls"][0]["function"]["arguments"] for message in found]
    assert read == [{"a": 10**3999}] * 16 + ['{"a": 1e3999}'] * 4


# ------------------------------------------------------------------------------------------- variables

THINKS = names_in(
    "{% if enable_thinking is defined %}{{ a.b }}{{ c['d'] }}{% generation %}x{% endgeneration %}"
)
EFFORT = names_in("{{ reasoning_effort }}")
EFFORT_OR_NONE = names_in("{% if reasoning_effort == 'none' %}{% endif %}")
THINKING = names_in("{{ thinking }}")
NEITHER = names_in("{{ messages }}")


def test_what_a_template_looks_at() -> None:
    assert {"enable_thinking", "a", "c"} <= THINKS.variables
    assert "b" not in THINKS.variables
    assert {"b", "d"} <= THINKS.fields


@pytest.mark.parametrize(
    ("wanted", "names", "expected"),
    [
        ({}, NEITHER, {}),
        ({"effort": "none"}, NEITHER, "reasoning_effort"),
        ({"effort": "none"}, THINKS, {"enable_thinking": False}),
        ({"effort": "high"}, THINKS, "reasoning_effort"),
        ({"effort": "high"}, EFFORT, {"reasoning_effort": "high"}),
        ({"effort": "none"}, EFFORT, "reasoning_effort"),
        ({"effort": "none"}, EFFORT_OR_NONE, {"reasoning_effort": "none"}),
        ({"thinks": True}, THINKS, {"enable_thinking": True}),
        ({"thinks": False}, THINKING, {"thinking": False}),
        ({"thinks": False}, NEITHER, "enable_thinking"),
        ({"named": {"a": 1}}, THINKS, {"a": 1}),
        ({"named": {"b": 1}}, THINKS, "chat_template_kwargs.b"),
        ({"named": {"enable_thinking": True}, "thinks": False}, THINKS, "enable_thinking"),
        ({"named": {"enable_thinking": True}, "thinks": True}, THINKS, {"enable_thinking": True}),
        ({"effort": "none", "thinks": True}, THINKS, "reasoning_effort"),
    ],
)
def test_variables_are_given_to_templates_that_look_at_them(
    wanted: dict[str, Any], names: TemplateNames, expected: Any
) -> None:
    variables = TemplateVariables(**wanted)
    if isinstance(expected, dict):
        assert variables.for_template(names, can_think=True) == expected
    else:
        with pytest.raises(ApiError) as caught:
            variables.for_template(names, can_think=True)
        assert caught.value.param == expected
    assert TemplateVariables(effort="none").for_template(NEITHER, can_think=False) == {}


# ---------------------------------------------------------------------------------------------- chunks


def test_a_chunk_has_one_entry_for_each_call() -> None:
    ids = iter("abc")
    calls = CallDeltas(lambda: next(ids))
    assert calls.add([Part("content", "x"), Part("name", "f")]) == [
        {"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}
    ]
    parts = [Part("arguments", '{"a":'), Part("arguments", "1}"), Part("end"), Part("name", "g")]
    assert calls.add([*parts, Part("arguments", "{}")]) == [
        {"index": 0, "function": {"arguments": '{"a":1}'}},
        {"index": 1, "id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    assert json.dumps(calls.add([Part("thought", "x"), Part("end")])) == "[]"
