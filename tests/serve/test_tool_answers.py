"""Tools and thoughts as the official client sees them, whole and streamed. The model's answers are scripted
(`scripted_model.py`); all that makes documents of them is real."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from flowspec.llm import LLM
from tests.serve import scripted_model
from tests.serve.scripted_model import GEMMA4, LFM2, QWEN3, ScriptedModel, scripted
from tests.serve.servers import MODEL, Running

ASKED: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Paris?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
FUNCTION = {"name": "get_weather", "description": "The weather of a city", "parameters": PARAMETERS}
TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'


def streamed(server: Running, **fields: Any) -> dict[str, Any]:
    """A streamed choice put together as a client does, from deltas alone."""
    content: list[str] = []
    thoughts: list[str] = []
    calls: dict[int, dict[str, str]] = {}
    reason = None
    for chunk in server.streamed(messages=ASKED, **fields):
        if not chunk.choices:
            continue
        assert reason is None, "nothing comes behind the end"
        delta = chunk.choices[0].delta
        content.append(delta.content or "")
        thoughts.append(getattr(delta, "reasoning_content", None) or "")
        for call in delta.tool_calls or ():
            if call.id is not None:
                assert call.index == len(calls)
                calls[call.index] = {"id": call.id, "name": call.function.name, "arguments": ""}
            calls[call.index]["arguments"] += call.function.arguments or ""
        reason = chunk.choices[0].finish_reason
    return {
        "content": "".join(content),
        "thoughts": "".join(thoughts),
        "calls": [calls[index] for index in sorted(calls)],
        "reason": reason,
    }


def whole(answer: Any) -> dict[str, Any]:
    """The same of an answer that came at once."""
    message = answer.choices[0].message
    return {
        "content": message.content or "",
        "thoughts": getattr(message, "reasoning_content", None) or "",
        "calls": [
            {"id": call.id, "name": call.function.name, "arguments": call.function.arguments}
            for call in message.tool_calls or ()
        ],
        "reason": answer.choices[0].finish_reason,
    }


def without_ids(found: dict[str, Any]) -> dict[str, Any]:
    return {**found, "calls": [[call["name"], json.loads(call["arguments"])] for call in found["calls"]]}


REPLIES = json.loads((Path(__file__).parents[1] / "data" / "tool_answers.json").read_text())
"""The name of a template, a reply, and what the client is to see of it."""


@pytest.mark.parametrize(("name", "reply", "expected"), REPLIES)
def test_calls_and_thoughts_reach_the_official_client_whole_and_streamed_and_go_back_with_results(
    name: str, reply: str, expected: dict[str, Any], llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = getattr(scripted_model, name)
    with scripted(llm, tmp_path, template, monkeypatch) as (server, model):
        model.reply = reply
        answer = server.ask(tools=TOOLS)
        assert without_ids(whole(answer)) == expected
        assert answer.usage.completion_tokens == model.answered
        assert without_ids(streamed(server, tools=TOOLS)) == expected
        thoughts = answer.usage.completion_tokens_details.reasoning_tokens
        assert (thoughts > 0) == bool(expected["thoughts"])
        assert thoughts < model.answered
        if expected["calls"] and not expected["content"]:
            assert answer.choices[0].message.content is None
        assert "get_weather" in model.prompts[0]
        if expected["calls"]:
            check_next_turn(server, model, answer.choices[0].message)
        model.reply = reply
        check_responses(server, model, expected)


def check_next_turn(server: Running, model: ScriptedModel, message: Any) -> None:
    """Calls and results are given to the template."""
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": f"sunny, {place}"}
        for place, call in enumerate(message.tool_calls)
    ]
    model.reply = "Sunny."
    server.ask(tools=TOOLS, messages=[*ASKED, message.model_dump(exclude_none=True), *results])
    prompt = model.prompts[-1]
    assert '"city": "Paris"' in prompt
    assert "sunny, 0" in prompt
    if getattr(message, "reasoning_content", None):
        assert message.reasoning_content in prompt


def check_responses(server: Running, model: ScriptedModel, expected: dict[str, Any]) -> None:
    """They have an item for each call, and go on with the results."""
    tools: list[Any] = [{"type": "function", **FUNCTION}]
    with server.client() as client:
        found = client.responses.create(model=MODEL, input=ASKED, tools=tools)
        with client.responses.stream(model=MODEL, input=ASKED, tools=tools) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_response()
        for response in (found, streamed):
            calls = [item for item in response.output if item.type == "function_call"]
            assert [[call.name, json.loads(call.arguments)] for call in calls] == expected["calls"]
            assert response.output_text.strip() == expected["content"].strip()
            thoughts = [item.content[0].text for item in response.output if item.type == "reasoning"]
            assert thoughts == [expected["thoughts"]] * bool(expected["thoughts"])
        assert kinds.count("response.function_call_arguments.done") == len(expected["calls"])
        outputs = [
            {"type": "function_call_output", "call_id": call.call_id, "output": f"sunny, {place}"}
            for place, call in enumerate(item for item in found.output if item.type == "function_call")
        ]
        model.reply = "Sunny."
        again = {"model": MODEL, "tools": tools}
        client.responses.create(**again, previous_response_id=found.id, input=outputs or "So?")
        kept = model.prompts[-1]
        sent = [*ASKED, *(item.model_dump(exclude_none=True) for item in found.output)]
        client.responses.create(**again, input=[*sent, *(outputs or [{"role": "user", "content": "So?"}])])
        assert model.prompts[-1] == kept
        assert all(f"sunny, {place}" in kept for place in range(len(outputs)))


@pytest.mark.parametrize("template", [LFM2, GEMMA4], ids=["LFM2", "Gemma 4"])
def test_tools_are_refused_of_a_model_whose_calls_are_written_in_an_unknown_way(
    template: str, llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scripted(llm, tmp_path, template, monkeypatch) as (server, model):
        with pytest.raises(
            openai.BadRequestError, match="how this model writes calls of tools is not known here"
        ):
            server.ask(tools=TOOLS)
        call = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
        made = [
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "content": "5"},
        ]
        with pytest.raises(openai.BadRequestError):
            server.ask(messages=[*ASKED, *made])
        model.reply = "It rains."
        assert whole(server.ask())["content"] == "It rains."


@pytest.fixture
def qwen(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    with scripted(llm, tmp_path, QWEN3, monkeypatch) as found:
        yield found


Qwen = tuple[Running, ScriptedModel]


def test_without_tools_a_call_is_text_and_so_it_is_where_none_is_wanted(qwen: Qwen) -> None:
    server, model = qwen
    model.reply = CALL
    assert server.ask().choices[0].message.content == CALL
    answer = server.ask(tools=TOOLS, tool_choice="none")
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (CALL, "stop")
    assert "get_weather" not in model.prompts[-1]


def test_one_call_only_ends_the_answer(qwen: Qwen) -> None:
    server, model = qwen
    model.reply = CALL + "\n" + CALL + " and more"
    length = model.tokenizer.encode(model.reply)
    for found in (
        whole(server.ask(tools=TOOLS, parallel_tool_calls=False)),
        streamed(server, tools=TOOLS, parallel_tool_calls=False),
    ):
        assert len(found["calls"]) == 1
        assert (found["content"], found["reason"]) == ("", "tool_calls")
        assert model.answered < len(length) // 2 + 1


def test_stop_strings_are_looked_for_in_the_text_alone(qwen: Qwen) -> None:
    server, model = qwen
    model.reply = "<think>\nParis!\n</think>\n\n" + CALL + "In Paris it rains."
    found = whole(server.ask(tools=TOOLS, stop="Paris"))
    assert (found["content"], found["thoughts"], len(found["calls"])) == ("In ", "Paris!", 1)
    model.reply = "In Paris " + CALL
    found = whole(server.ask(tools=TOOLS, stop="Paris"))
    assert (found["content"], found["calls"], found["reason"]) == ("In ", [], "stop")


def test_the_length_cuts_a_call_short(qwen: Qwen) -> None:
    server, model = qwen
    model.reply = CALL
    for tokens in range(1, len(model.tokenizer.encode(CALL)), 3):
        found = streamed(server, tools=TOOLS, max_tokens=tokens)
        assert found["reason"] == "length"
        assert found["content"] == "" or CALL.startswith(found["content"])
        for call in found["calls"]:
            assert '{"city": "Paris", "days": 2}'.startswith(call["arguments"])


def test_a_call_that_ends_the_answer_keeps_its_logprobs(qwen: Qwen) -> None:
    server, model = qwen
    model.reply = "<think>\nHm.\n</think>\n\nYes." + CALL
    answer = server.ask(tools=TOOLS, logprobs=True)
    assert len(answer.choices[0].logprobs.content) == model.answered
    model.reply = "Yes." + CALL + CALL
    answer = server.ask(tools=TOOLS, logprobs=True, parallel_tool_calls=False)
    told = answer.choices[0].logprobs.content
    assert len(told) == model.answered
    assert "".join(each.token for each in told) == "Yes." + CALL.removesuffix("}\n</tool_call>")


def test_thinking_is_switched_by_the_template(qwen: Qwen) -> None:
    server, model = qwen
    model.reply = "Yes."
    off = "<think>\n\n</think>"
    for fields in (
        {"extra_body": {"enable_thinking": False}},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
        {"reasoning_effort": "none"},
    ):
        assert server.ask(**fields).choices[0].message.content == "Yes."
        assert off in model.prompts[-1]
    server.ask(extra_body={"enable_thinking": True})
    assert off not in model.prompts[-1]


MADE = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [MADE]}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS}, "tools"),
        ({"messages": CALLED}, "messages[1].tool_calls"),
        ({"extra_body": {"enable_thinking": False}}, "enable_thinking"),
    ],
)
def test_the_bundled_model_has_no_tools_and_says_so(server: Running, fields: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.ask(**fields)
    assert caught.value.param == param
    assert "this model's chat template" in caught.value.message
    assert server.ask(tools=TOOLS, tool_choice="none", max_tokens=3).choices[0].message.tool_calls is None
