"""Requests as they come: what chats, completions and responses mean, with their tools, calls and what
templates are told, and what each is refused for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from flowspec.core.protocol.messages import SAMPLING_FIELDS, Sampling
from flowspec.errors import ClusterError, InputError
from flowspec.model.chat_template import TemplateNames, names_in
from flowspec.model.reply.bound import Wanted
from flowspec.model.reply.parts import Part, Tool
from flowspec.model.text import Recommended
from flowspec.runtime.question import Question
from flowspec.runtime.sampling_params import SamplingParams
from flowspec.runtime.session import Limits
from flowspec.serve.bodies import Neutral, notes
from flowspec.serve.completion_form import Choice
from flowspec.serve.completion_request import (
    ChatBody,
    CompletionBody,
    CompletionRequest,
    RequestBody,
    chat_wanted,
    completion_wanted,
)
from flowspec.serve.documents import ApiError, of_error
from flowspec.serve.messages import TOOL_BYTES_MAX, TOOLS_MAX, ToolUse, variables_of
from flowspec.serve.responses.request import ITEMS_MAX, ResponseBody, response_wanted
from flowspec.serve.responses.store import ResponseStore

HELLO = [{"role": "user", "content": "hello"}]
PREFILLED = [*HELLO, {"role": "assistant", "content": "I am"}]


def chat(**fields: Any) -> CompletionRequest[ChatBody]:
    return chat_wanted(json.dumps({"model": "m", "messages": HELLO, **fields}).encode())


def completion(**fields: Any) -> CompletionRequest[CompletionBody]:
    return completion_wanted(json.dumps({"model": "m", "prompt": "hello", **fields}).encode())


def response(**fields: Any) -> CompletionRequest[ResponseBody]:
    return response_wanted(ResponseStore(), json.dumps({"input": "hello", **fields}).encode())


READERS: dict[str, Callable[..., CompletionRequest[Any]]] = {
    "chat": chat,
    "completion": completion,
    "response": response,
}


def refusal(read: Callable[..., CompletionRequest[Any]], **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    found = caught.value
    assert (found.status, found.document["error"]["type"]) == (400, "invalid_request_error")
    assert "\n" not in found.message
    assert len(found.message) < 600
    assert found.param is None or found.message.startswith(found.param) or repr(found.param) in found.message
    return found


# ------------------------------------------------------------------------------------- what is refused

REFUSED = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "data" / "refused_requests.jsonl")
    .read_text("utf-8")
    .splitlines()
]
"""Kinds of request, the fields, the refusal's `param` and `code`, and how it begins where
it tells what was meant."""
FUNCTION = {"type": "function", "function": {"name": "f", "description": "x" * TOOL_BYTES_MAX}}
LARGE: list[tuple[str, str, Any]] = [
    ("chat", "logit_bias", {"5": 10**400}),
    ("chat", "logit_bias", dict.fromkeys(map(str, range(513)), 1)),
    ("chat", "min_p", 10**400),
    ("chat", "tools", [FUNCTION]),
    ("chat", "tools", [{**FUNCTION, "function": {"name": f"f{n}"}} for n in range(TOOLS_MAX + 1)]),
    ("chat", "tools[0].function.name", [{**FUNCTION, "function": {"name": "a" * 65}}]),
    ("chat", "chat_template_kwargs", {"a": "x" * (1 << 16)}),
    ("chat", "chat_template_kwargs", {f"a{place}": 1 for place in range(65)}),
    ("chat", "structured_outputs.json", {"json": {"enum": ["x" * 10**6]}}),
    ("completion", "stop_token_ids", [5] * 513),
    ("completion", "prompt", ["a"] * 65),
    ("response", "metadata", {str(n): "" for n in range(17)}),
]
"""Kinds of request, the refusal's `param`, and what the field holds that it begins with."""


@pytest.mark.parametrize("kind", READERS)
def test_what_is_refused_is_named_by_its_field_and_a_code(kind: str) -> None:
    rows = [row for row in REFUSED if kind in row[0].split()]
    assert len(rows) > 40
    for _, fields, param, code, *told in rows:
        found = refusal(READERS[kind], **fields)
        assert (found.param, found.code or "invalid_value") == (param, code), fields
        assert all(found.message.startswith(text) for text in told), found.message


BODIES = {"chat": ChatBody, "completion": CompletionBody, "response": ResponseBody}


@pytest.mark.parametrize("kind", READERS)
def test_every_field_refuses_what_is_of_another_type(kind: str) -> None:
    body: Any = BODIES[kind]
    noted = {name for _, name, _ in notes(body)}
    for name in {each.encode_name for each in msgspec.structs.fields(body)} - noted:
        is_real = SAMPLING_FIELDS.get(name) is float or name == "best_of"
        found = refusal(READERS[kind], **{name: "x" if is_real else 5.5})
        assert (found.param, found.code) == (name, "invalid_type")


@pytest.mark.parametrize(("kind", "param", "value"), LARGE, ids=range(len(LARGE)))
def test_what_is_too_much_is_refused(kind: str, param: str, value: Any) -> None:
    assert refusal(READERS[kind], **{re.split(r"[.[]", param)[0]: value}).param == param
    assert refusal(completion, prompt=["a", "b"], n=33).param == "n", "of all prompts together"


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b'"a"', b"null", b"\xff{}", b'{"user": NaN}', b"[" * 100_000),
        *(b'{"user": 1e400}', b'{"user": 1e99999999999999999999999}', b'{"top_p": 1e400}'),
        *(b'{"user": ' + b"9" * 5000 + b"}", b'{"user": "\\ud800"}', b'{"user": ' + b"[" * 100_000),
    ],
    ids=range(14),
)
@pytest.mark.parametrize("read", [chat_wanted, completion_wanted, partial(response_wanted, ResponseStore())])
def test_what_is_no_json_object_is_refused(read: Callable[[bytes], Any], body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        read(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_errors_have_the_form_of_the_api() -> None:
    found = of_error(InputError("x"))
    error = json.loads(msgspec.json.encode(found.document))["error"]
    assert error == {"message": "x", "type": "invalid_request_error", "param": None, "code": "invalid_value"}
    assert [found.status, of_error(ClusterError("x")).status] == [400, 503]


# ------------------------------------------------------------------------------------- what is meant


def test_a_request_with_everything() -> None:
    sampling = {"temperature": 1, "top_p": 0.5, "top_k": 40, "min_p": 0.1, "seed": 7, "stop": ["a", "b"]}
    sampling |= {"presence_penalty": -2, "frequency_penalty": 0.5, "repetition_penalty": 1.1}
    expected = SamplingParams(**{**sampling, "stop": ("a", "b"), "stop_token_ids": (7, 3)})
    sampling["stop_token_ids"] = [7, 3]
    for kind, read in READERS.items():
        most = 16 if kind == "completion" else None
        assert read(**sampling, stream=True).params == replace(expected, max_new_tokens=most)
        nulls = read(**dict.fromkeys(sampling))
        assert nulls.params == SamplingParams(max_new_tokens=most), "null leaves it to the server"
    found = chat(
        **sampling,
        n=2,
        max_completion_tokens=9,
        logprobs=True,
        top_logprobs=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    assert found.params == replace(expected, logprobs=3, max_new_tokens=9)
    assert (found.body.count, found.body.stream) == (2, True)


def test_a_request_with_nothing_leaves_all_to_the_server() -> None:
    found = chat()
    assert found.params == SamplingParams()
    assert (found.body.count, found.body.stream) == (1, None)
    assert completion().params.max_new_tokens == 16
    assert chat(stop="").params.stop == ()


def test_an_answer_goes_on_in_the_last_message_where_that_is_asked_for() -> None:
    for asked in ({}, {"add_generation_prompt": False}):
        assert chat(messages=PREFILLED, continue_final_message=True, **asked).body.continue_final_message
    for asked in ({}, {"add_generation_prompt": True}, {"continue_final_message": False}):
        assert not chat(messages=PREFILLED, **asked).body.continue_final_message


def test_fields_that_ask_for_nothing_are_taken() -> None:
    tools = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "functions": None}
    chat(**tools, presence_penalty=0, frequency_penalty=0.0, logit_bias={}, typical_p=1.0)
    chat(response_format={"type": "text"}, logprobs=None, stream_options=None, modalities=["text"])
    chat(reasoning_effort="none")
    completion(echo=False, suffix=None, best_of=1, logprobs=None)
    completion(n=2, best_of=2)
    neutral = {name: note.values for _, name, note in notes(RequestBody) if isinstance(note, Neutral)}
    assert len(neutral) > 20
    for field, values in neutral.items():
        for value in (None, *values):
            assert replace(chat(**{field: value}), body=chat().body) == chat()
        assert refusal(chat, **{field: "something"}).code == "unsupported_parameter"


def test_what_cannot_change_an_answer_is_taken_and_named() -> None:
    harmless = [name for _, name, note in notes(RequestBody) if isinstance(note, str)]
    assert {"user", "speculative.n_max"} < set(harmless)
    for read in (chat, completion):
        found = read(**dict.fromkeys(harmless, True))
        assert list(found.body.unheeded) == harmless
        assert replace(found, body=read().body) == read(), "and changes nothing"
        assert read(**dict.fromkeys(harmless)).body.unheeded == {}, "null says nothing"
    assert list(chat(keep_alive="5m", user="u").body.unheeded) == ["user", "keep_alive"]
    assert list(response(user="u", store=True, metadata={"a": "b"}).body.unheeded) == ["user"]


@pytest.mark.parametrize(
    "fields", [{"top_p": 0}, {"top_p": 0, "temperature": 1}, {"temperature": 1e-8}, {"temperature": 0}]
)
def test_what_leaves_only_the_likeliest_token_is_temperature_0(fields: dict[str, Any]) -> None:
    found = chat(**fields)
    assert (found.params.temperature, found.params.top_p) == (0.0, None)


def test_any_seed_of_64_bits_becomes_one_that_can_be_used() -> None:
    seeds = [-(1 << 63), -7, -1, 0, 7, (1 << 62) - 65, (1 << 63) - 1]
    found = [chat(seed=seed).params.seed for seed in seeds]
    usual = Recommended(stop_ids=frozenset())
    assert found == [SamplingParams(seed=seed).sampling(usual).seed for seed in seeds], "as elsewhere"
    assert all(seed is not None and 0 <= seed <= (1 << 62) - 65 for seed in found)
    assert len(set(found[:5])) == 5
    assert found[3:5] == [0, 7]


def test_messages_become_what_chat_templates_take() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    nothing = dict.fromkeys(("refusal", "audio", "tool_calls", "reasoning_content"))
    given_back = {"role": "assistant", "content": "c", "annotations": [], "name": "helper", **nothing}
    silent = {"role": "assistant", "content": None}
    messages = [{"role": "developer", "content": "s"}, {"role": "user", "content": parts}, given_back, silent]
    assert chat(messages=messages).prompts == (
        [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "ab"},
            {"role": "assistant", "content": "c"},
            {"role": "assistant", "content": ""},
        ],
    )


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
        ([5] * 100, ((5,) * 100,)),
    ],
)
def test_the_forms_of_a_prompt(prompt: Any, expected: tuple[Any, ...]) -> None:
    assert completion(prompt=prompt).prompts == expected
    assert completion(prompt=["a", "b"], n=32).body.count == 32, "choices are counted over all prompts"


def test_either_name_of_the_length_will_do_and_both_if_they_agree() -> None:
    old, new = {"max_tokens": 5}, {"max_completion_tokens": 5}
    for fields in (old, new, old | new):
        assert chat(**fields).params.max_new_tokens == 5
    assert chat(max_tokens=2**63 - 1).params.max_new_tokens == 2**63 - 1, "who wants no limit"


def test_a_response_has_at_most_so_many_items() -> None:
    assert response(input=HELLO * ITEMS_MAX)
    assert refusal(response, input=HELLO * (ITEMS_MAX + 1)).param == "input"


def test_a_response_is_the_chat_that_it_stands_for() -> None:
    both = {"temperature": 0.5, "top_p": 0.5, "seed": 7, "top_k": 3, "stop": ["x"], "stream": True}
    both["user"] = "u"
    found = response(
        **both,
        instructions="Be short.",
        max_output_tokens=1,
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
        top_logprobs=2,
        reasoning={"effort": "none", "summary": "auto"},
        text={"format": {"type": "text"}, "verbosity": "medium"},
        truncation="disabled",
    )
    same = chat(
        **both,
        model=None,
        messages=[{"role": "system", "content": "Be short."}, *HELLO],
        max_tokens=1,
        logprobs=True,
        top_logprobs=2,
        reasoning_effort="none",
    )
    own = {"body": found.body, "places": found.places, "items": found.items}
    assert replace(cast(Any, same), **own) == found
    assert found.places == ("instructions", "input")
    names = "instructions max_output_tokens previous_response_id store metadata include tools tool_choice"
    names += " text n reasoning truncation background top_logprobs conversation prompt stream messages"
    names += " stream_options"
    nulls = response(**dict.fromkeys([*names.split(), "max_tool_calls"]))
    plain = response()
    assert replace(nulls, body=plain.body, items=plain.items) == plain, "but for their items' ids"


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def tool(name: Any = "get_weather", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [tool(name) for name in names]}}


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
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_call_id": "call_1", "name": "f"},
    ]
    assert (
        dialogue({"role": "assistant", "content": "x", "reasoning": "Hm."})[1]["reasoning_content"] == "Hm."
    )


def test_arguments_that_are_no_object_stay_the_text_that_the_model_wrote() -> None:
    broken = ("oops", "[1]", '{"a": ', "[" * 100_000, '{"a": NaN}', '{"a": -Infinity}', '{"a": 1e9999}')
    for arguments in broken:
        assert dialogue(called(arguments))[1]["tool_calls"][0]["function"]["arguments"] == arguments


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
    asked: Any = {"named": {}, "thinks": None, "effort": None, **wanted}
    if isinstance(expected, dict):
        assert variables_of(names=names, can_think=True, **asked) == expected
    else:
        with pytest.raises(ApiError) as caught:
            variables_of(names=names, can_think=True, **asked)
        assert caught.value.param == expected
    assert variables_of({}, None, "none", NEITHER, can_think=False) == {}


# ---------------------------------------------------------------------------------------------- chunks


def test_a_chunk_has_one_entry_for_each_call() -> None:
    ids = iter("abc")
    question = Question(prompt=(), sampling=Sampling(), limits=Limits(new_tokens_max=1, stop_ids=frozenset()))
    choice = Choice(question, new_id=lambda: next(ids))

    def told(*parts: Part) -> Any:
        return msgspec.to_builtins(choice.calls_in(parts))

    assert told(Part("content", "x"), Part("name", "f")) == [
        {"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}
    ]
    parts = [Part("arguments", '{"a":'), Part("arguments", "1}"), Part("end"), Part("name", "g")]
    assert told(*parts, Part("arguments", "{}")) == [
        {"index": 0, "function": {"arguments": '{"a":1}'}},
        {"index": 1, "id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    assert told(Part("thought", "x"), Part("end")) == []
