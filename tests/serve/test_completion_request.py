"""Requests as they come: what is accepted, and what is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from flowspec.errors import ClusterError, InputError
from flowspec.model.text import Recommended
from flowspec.runtime.sampling_params import SamplingParams
from flowspec.serve.completion_request import CompletionRequest, chat_wanted, completion_wanted
from flowspec.serve.fields import parse
from flowspec.serve.other_fields import HARMLESS, NEUTRAL
from flowspec.serve.refusals import ApiError, busy, of_error

HELLO = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> CompletionRequest:
    return chat_wanted({"model": "m", "messages": HELLO, **fields})


def completion(**fields: Any) -> CompletionRequest:
    return completion_wanted({"model": "m", "prompt": "hello", **fields})


def refusal(read: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert caught.value.status == 400
    assert caught.value.document["error"]["type"] == "invalid_request_error"
    return caught.value


def test_a_request_with_everything() -> None:
    found = chat(
        temperature=1,
        top_p=0.5,
        top_k=40,
        min_p=0.1,
        seed=7,
        stop=["a", "b"],
        n=2,
        max_completion_tokens=9,
        logprobs=True,
        top_logprobs=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    assert found.params == SamplingParams(
        temperature=1.0, top_p=0.5, top_k=40, min_p=0.1, seed=7, stop=("a", "b"), logprobs=3
    )
    assert (found.count, found.tokens_max) == (2, 9)
    assert (found.is_streamed, found.includes_usage) == (True, True)


def test_a_request_with_nothing_leaves_all_to_the_server() -> None:
    found = chat()
    assert found.params == SamplingParams()
    assert (found.tokens_max, found.count, found.is_streamed) == (None, 1, False)
    assert completion().tokens_max == 16


def test_another_way_to_draw_is_refused_with_what_there_is() -> None:
    told = refusal(chat, typical_p=0.9).message
    assert told.startswith("typical_p: FlowSpec does not support this; expected 1 or nothing, got 0.9")
    assert "top_k" in told
    assert chat(typical_p=1.0, model=None).model is None


def test_penalties_are_taken_as_they_are() -> None:
    asked = {"presence_penalty": -2, "frequency_penalty": 0.5, "repetition_penalty": 1.1}
    for read in (chat, completion):
        assert read(**asked).params == SamplingParams(
            presence_penalty=-2.0, frequency_penalty=0.5, repetition_penalty=1.1
        )
    assert chat(presence_penalty=None, repetition_penalty=None).params == SamplingParams()


def test_stop_tokens_are_taken_as_they_are() -> None:
    assert chat(stop_token_ids=[7, 3]).params == SamplingParams(stop_token_ids=(7, 3))
    assert completion(stop_token_ids=None).params == SamplingParams()


PREFILLED = [*HELLO, {"role": "assistant", "content": "I am"}]


def test_an_answer_goes_on_in_the_last_message_where_that_is_asked_for() -> None:
    for asked in ({}, {"add_generation_prompt": False}):
        assert chat(messages=PREFILLED, continue_final_message=True, **asked).continues
    for asked in ({}, {"add_generation_prompt": True}, {"continue_final_message": False}):
        assert not chat(messages=PREFILLED, **asked).continues
    assert (
        refusal(chat, messages=HELLO, continue_final_message=True).message
        == "continue_final_message: expected the last message to be the assistant's, got 'user'"
    )
    told = refusal(chat, messages=PREFILLED, continue_final_message=True, add_generation_prompt=True).message
    assert "add_generation_prompt: expected false or nothing" in told
    told = refusal(chat, add_generation_prompt=False).message
    assert "add_generation_prompt: expected true or nothing" in told
    assert refusal(chat, add_generation_prompt=1).code == "invalid_type"


def test_a_completion_may_begin_with_its_prompt() -> None:
    assert completion(echo=True).echoes
    assert not completion(echo=False).echoes
    for count in (0, 3):
        told = refusal(completion, echo=True, logprobs=count).message
        assert told.startswith("echo: expected no logprobs beside it")
    assert refusal(chat, echo=True).code == "unknown_parameter"


def test_fields_that_ask_for_nothing_are_taken() -> None:
    chat(
        presence_penalty=0,
        frequency_penalty=0.0,
        logit_bias={},
        tools=[],
        tool_choice="auto",
        response_format={"type": "text"},
        user="somebody",
        metadata={"a": "b"},
        store=False,
        parallel_tool_calls=True,
        service_tier="auto",
        stop=None,
        seed=None,
        n=None,
        functions=None,
        logprobs=None,
        stream_options=None,
        modalities=["text"],
        reasoning_effort="none",
    )
    assert chat(stop="").params.stop == ()
    completion(echo=False, suffix=None, best_of=1, logprobs=None)
    completion(n=2, best_of=2)


def test_what_cannot_change_an_answer_is_taken_and_named() -> None:
    everything = {field: True for field in HARMLESS}
    for read in (chat, completion):
        found = read(**everything)
        assert set(found.unheeded) == set(HARMLESS)
        assert replace(found, unheeded=()) == read(), "and changes nothing"
        assert read(**dict.fromkeys(HARMLESS)).unheeded == (), "null says nothing"
    assert chat(keep_alive="5m", user="u").unheeded == ("user", "keep_alive")


@pytest.mark.parametrize("field", NEUTRAL)
def test_fields_of_other_servers_are_taken_where_they_ask_for_nothing(field: str) -> None:
    for value in (None, *NEUTRAL[field]):
        assert chat(**{field: value}) == chat()
    assert refusal(chat, **{field: "something"}).code == "unsupported_parameter"


@pytest.mark.parametrize(
    ("field", "meant"),
    [("temprature", "temperature"), ("maxTokens", "max_tokens"), ("cache_prompts", "cache_prompt")],
)
def test_a_field_that_is_misspelt_is_refused_with_what_is_meant(field: str, meant: str) -> None:
    told = refusal(chat, **{field: 1})
    assert (told.code, told.message) == (
        "unknown_parameter",
        f"unknown field {field!r}; did you mean {meant}?",
    )
    for unlike in ("wibble", "colour"):
        assert refusal(chat, **{unlike: 1}).message == f"unknown field {unlike!r}"


def test_a_needed_field_that_is_misspelt_is_looked_for() -> None:
    told = refusal(chat, messages=None, message=[{"role": "user", "content": "hi"}])
    assert told.message == "messages: expected a value, got none; did you write 'message' for it?"
    assert (told.param, told.code) == ("messages", "missing_required_parameter")
    told = refusal(chat, messages=[{"roles": "user", "content": "hi"}])
    assert told.message == "messages[0].role: expected a value, got none; did you write 'roles' for it?"
    assert refusal(chat, messages=None).message == "messages: expected a value, got none"
    told = refusal(chat, messages=None, prompt="hi").message
    assert told == "unknown field 'prompt'; here that is messages (a prompt goes to /v1/completions)"
    told = refusal(completion, prompt=None, messages=[]).message
    assert told == "unknown field 'messages'; here that is prompt (messages go to /v1/chat/completions)"


def test_a_schema_is_refused_at_its_place_or_for_being_text() -> None:
    def told(schema: object) -> str:
        form = {"type": "json_schema", "json_schema": {"schema": schema}}
        return refusal(chat, response_format=form).message

    where = "response_format.json_schema.schema"
    assert told({"properties": {"a": {"type": "strin"}}}) == (
        f"{where}.properties.a: llguidance refuses it: Invalid type: strin"
    )
    assert told("{'type': 1}").startswith(f"{where}: expected an object, got text that is no JSON document (")
    assert told([1]) == f"{where}: expected a JSON schema, which is an object, got [1]"
    regex = refusal(chat, structured_outputs={"regex": "("}).message
    assert regex.startswith("structured_outputs.regex: llguidance refuses it: ")
    function = {"name": "f", "parameters": '{"type": "object"}'}
    assert refusal(chat, tools=[{"type": "function", "function": function}]).message == (
        "tools[0].function.parameters: expected a JSON schema, which is an object, got text; parse it first"
    )


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"lark": "start: /a/"}, "unknown field 'lark'; here that is structured_outputs.grammar"),
        (
            {"structured_outputs": {"lark": "start: /a/"}},
            "unknown field 'structured_outputs.lark'; here that is structured_outputs.grammar",
        ),
        ({"guided_json": {}}, "unknown field 'guided_json'; here that is structured_outputs.json"),
        ({"n_predict": 5}, "unknown field 'n_predict'; here that is max_tokens"),
        ({"prompt": "a"}, "unknown field 'prompt'; here that is messages (a prompt goes to /v1/completions)"),
        (
            {"response_format": {"type": "json_object", "schema": {}}},
            "unknown field 'response_format.schema'; here that is response_format.json_schema.schema",
        ),
    ],
)
def test_a_field_of_another_server_is_refused_with_its_name_here(fields: dict[str, Any], told: str) -> None:
    found = refusal(chat, **fields)
    assert (found.code, found.message) == ("unknown_parameter", told)


@pytest.mark.parametrize(
    ("read", "field", "value"),
    [
        (chat, "messages", []),
        (completion, "prompt", []),
        (completion, "prompt", [[]]),
        (completion, "prompt", [[1], []]),
        (chat, "structured_outputs", {"choice": []}),
        (chat, "structured_outputs", {"choice": [""]}),
    ],
)
def test_an_empty_list_is_no_wrong_type(read: Any, field: str, value: Any) -> None:
    found = refusal(read, **{field: value})
    assert found.code == "invalid_value"
    assert "at least one" in found.message


def test_an_empty_name_of_a_model_is_none() -> None:
    assert chat(model="").model is None


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("presence_penalty", 2.5, "invalid_value"),
        ("presence_penalty", "1", "invalid_type"),
        ("frequency_penalty", -2.1, "invalid_value"),
        ("repetition_penalty", 0, "invalid_value"),
        ("repetition_penalty", -1.1, "invalid_value"),
        ("logit_bias", [5], "invalid_type"),
        ("logit_bias", {"5": 100.5}, "invalid_value"),
        ("logit_bias", {"5": "1"}, "invalid_value"),
        ("logit_bias", {"5": True}, "invalid_value"),
        ("logit_bias", {"5": 10**400}, "invalid_value"),
        ("logit_bias", {"-5": 1}, "invalid_value"),
        ("logit_bias", {"05": 1}, "invalid_value"),
        ("logit_bias", {"hot": 1}, "invalid_value"),
        ("logit_bias", {"9999999": 1}, "invalid_value"),
        ("logit_bias", dict.fromkeys(map(str, range(513)), 1), "invalid_value"),
        ("functions", [{"name": "f"}], "unsupported_parameter"),
        ("reasoning_effort", "much", "invalid_value"),
        ("wibble", None, "unknown_parameter"),
        ("cache_salt", "secret", "unknown_parameter"),
        ("stream_options", {"continuous_usage_stats": True}, "invalid_value"),
        ("temperature", 2.5, "invalid_value"),
        ("temperature", "hot", "invalid_type"),
        ("temperature", True, "invalid_type"),
        ("top_p", -0.1, "invalid_value"),
        ("top_p", 1.5, "invalid_value"),
        ("min_p", 1, "invalid_value"),
        ("min_p", 10**400, "invalid_value"),
        ("min_p", float("inf"), "invalid_value"),
        ("top_k", -1, "invalid_value"),
        ("top_k", 1.5, "invalid_type"),
        ("seed", 1 << 63, "invalid_value"),
        ("seed", -(1 << 63) - 1, "invalid_value"),
        ("n", 0, "invalid_value"),
        ("n", 65, "invalid_value"),
        ("stop", ["a"] * 5, "invalid_value"),
        ("stop", [""], "invalid_value"),
        ("stop", [1], "invalid_type"),
        ("stop", {}, "invalid_type"),
        ("stream", "yes", "invalid_type"),
        ("stream_options", {"include_usage": True}, "invalid_value"),
        ("max_tokens", 0, "invalid_value"),
        ("max_completion_tokens", 1 << 63, "invalid_value"),
        ("top_logprobs", 3, "invalid_value"),
        ("model", 5, "invalid_type"),
        ("messages", None, "missing_required_parameter"),
        ("messages", [], "invalid_value"),
        ("messages", "hello", "invalid_type"),
    ],
)
def test_what_a_chat_is_refused_for(field: str, value: Any, code: str) -> None:
    found = refusal(chat, **{field: value})
    assert (found.param, found.code) == (field, code)
    assert found.message.startswith(field) or repr(field) in found.message


def test_a_format_is_obeyed_or_refused() -> None:
    described = {"schema": {"type": "null"}}
    missing = refusal(chat, response_format={"json_schema": described})
    assert (missing.param, missing.code) == ("response_format.type", "missing_required_parameter")
    beside = refusal(chat, response_format={"type": "json_object", "json_schema": described})
    assert (beside.param, beside.code) == ("response_format.json_schema", "unsupported_parameter")


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("echo", "yes", "echo"),
        ("stop_token_ids", 7, "stop_token_ids"),
        ("stop_token_ids", [-1], "stop_token_ids"),
        ("stop_token_ids", [True], "stop_token_ids"),
        ("stop_token_ids", [5] * 513, "stop_token_ids"),
        ("continue_final_message", True, "continue_final_message"),
        ("suffix", "end", "suffix"),
        ("best_of", 2, "best_of"),
        ("logprobs", 21, "logprobs"),
        ("logprobs", True, "logprobs"),
        ("messages", HELLO, "messages"),
        ("prompt", None, "prompt"),
        ("prompt", [], "prompt"),
        ("prompt", ["a", 1], "prompt"),
        ("prompt", [[]], "prompt"),
        ("prompt", [-1], "prompt"),
        ("prompt", [True], "prompt"),
        ("prompt", ["a"] * 65, "prompt"),
    ],
)
def test_what_a_completion_is_refused_for(field: str, value: Any, param: str) -> None:
    assert refusal(completion, **{field: value}).param == param


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hello", "messages[0]"),
        ({"role": "function", "content": "x"}, "messages[0].role"),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
        ({"role": "tool", "content": "x", "tool_call_id": "1"}, "messages[0].tool_call_id"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
            "messages[0].content[0]",
        ),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": "x", "name": 5}, "messages[0].name"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": "x", "reasoning_content": "y"}, "messages[0].reasoning_content"),
        ({"role": "user", "content": "x", "colour": "red"}, "messages[0].colour"),
        ({"role": "user", "content": "x", "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls"),
        (
            {"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]},
            "messages[0].tool_calls[0].function",
        ),
    ],
)
def test_what_a_message_is_refused_for(message: Any, param: str) -> None:
    assert refusal(chat, messages=[message]).param == param


@pytest.mark.parametrize(
    "fields", [{"top_p": 0}, {"top_p": 0, "temperature": 1}, {"temperature": 1e-8}, {"temperature": 0}]
)
def test_what_leaves_only_the_likeliest_token_is_temperature_0(fields: dict[str, Any]) -> None:
    found = chat(**fields)
    assert (found.params.temperature, found.params.top_p) == (0.0, None)


def test_any_seed_of_64_bits_becomes_one_that_can_be_used() -> None:
    seeds = [-(1 << 63), -7, -1, 0, 7, (1 << 62) - 65, (1 << 63) - 1]
    found = [chat(seed=seed).params.seed for seed in seeds]
    assert found == [
        SamplingParams(seed=seed).sampling(Recommended(stop_ids=frozenset())).seed for seed in seeds
    ], "as elsewhere"
    assert found == [chat(seed=seed).params.seed for seed in seeds]
    assert all(seed is not None and 0 <= seed <= (1 << 62) - 65 for seed in found)
    assert len(set(found[:5])) == 5
    assert found[3:5] == [0, 7]


def test_messages_become_what_chat_templates_take() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    given_back = {
        "role": "assistant",
        "content": "c",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "tool_calls": None,
    }
    given_back |= {"reasoning_content": None, "name": "helper"}
    silent = {"role": "assistant", "content": None}
    found = chat(
        messages=[
            {"role": "developer", "content": "s"},
            {"role": "user", "content": parts},
            given_back,
            silent,
        ]
    )
    expected = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "c"},
    ]
    expected.append({"role": "assistant", "content": ""})
    assert found.prompts == (expected,)


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


def test_either_name_of_the_length_will_do_and_both_if_they_agree() -> None:
    assert [
        chat(max_tokens=5).tokens_max,
        chat(max_completion_tokens=5).tokens_max,
        chat(max_tokens=5, max_completion_tokens=5).tokens_max,
    ] == [5] * 3
    assert chat(max_tokens=2**63 - 1).tokens_max == 2**63 - 1, "who wants no limit"
    assert refusal(chat, max_tokens=5, max_completion_tokens=6).param == "max_tokens"


def test_choices_are_counted_over_all_prompts() -> None:
    assert completion(prompt=["a", "b"], n=32).count == 32
    assert refusal(completion, prompt=["a", "b"], n=33).param == "n"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"a"',
        b"\xff{}",
        b'{"a": NaN}',
        b'{"a": 1e9999}',
        b'{"a": 1e99999999999999999999999}',
        b'{"a": [' + b",".join([b"1e4"] * 99 + [b"1e3999"] * 17) + b"]}",
        b"[" * 100_000,
        b'{"a": ' + b"9" * 5000 + b"}",
        b"null",
    ],
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


@pytest.mark.parametrize(
    "field",
    [
        *("temperature", "top_p", "min_p", "top_k", "seed", "max_tokens", "max_completion_tokens", "n"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "typical_p", "repeat_penalty"),
    ],
)
def test_numbers_beyond_all_bounds_are_refused_by_name(field: str) -> None:
    for number in ("1e400", "-1e400", "1e3999"):
        found = refusal(chat, **parse(f'{{"{field}": {number}}}'.encode()))
        assert (found.status, found.param) == (400, field)
        assert len(found.message) < 300
    biased = refusal(chat, **parse(b'{"logit_bias": {"5": 1e400}}'))
    assert biased.param == "logit_bias"


def test_errors_have_the_form_of_the_api() -> None:
    found = busy(7)
    assert (found.status, found.headers["Retry-After"]) == (429, "7")
    assert set(json.loads(json.dumps(found.document))["error"]) == {"message", "type", "param", "code"}
    assert [of_error(InputError("x")).status, of_error(ClusterError("x")).status] == [400, 503]
