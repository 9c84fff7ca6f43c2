"""Calls that are bound, and answers of a format behind thoughts, by the official client against a real
server of a real model: the bundled one, given the chat template of a family that calls tools, and its marks.

It has never seen a call, so whatever is right in one is the grammar's doing; nor has it ever thought, so it
is biased to begin thoughts and to end them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

pytest.importorskip("llguidance")

from flowspec.llm import LLM
from tests.nightly import nightly
from tests.schemas import allows
from tests.serve.scripted_model import GPT_OSS, QWEN3
from tests.serve.servers import MODEL, SUM, Running, running
from tests.serve.templated_model import folder_of

BEGUN = QWEN3.replace(
    "</think>\n\n{% endif %}{% endif %}", "</think>\n\n{% else %}<think>\n{% endif %}{% endif %}"
)
"""As Qwen3.5's, which begins the thoughts itself."""
CODER = QWEN3.replace("return a json object within", "write <function=NAME><parameter=KEY> within")


class Add(BaseModel):
    """Adds two numbers."""

    model_config = ConfigDict(extra="forbid")
    first: int = Field(ge=0, le=999)
    second: int = Field(ge=0, le=999)
    unit: Literal["apples", "none"]


class Note(BaseModel):
    """Takes a note."""

    model_config = ConfigDict(extra="forbid")
    text: str = Field(max_length=12)


STRICT = [openai.pydantic_function_tool(Add), openai.pydantic_function_tool(Note)]
LOOSE: list[Any] = [
    {"type": "function", "function": {key: tool["function"][key] for key in ("name", "parameters")}}
    for tool in STRICT
]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in STRICT}


@dataclass(slots=True)
class Served:
    """A server, the model's name, and its vocabulary."""

    server: Running
    name: str
    vocabulary: dict[str, int]

    @property
    def asked(self) -> dict[str, Any]:
        return {"model": self.name, "messages": SUM, "max_tokens": 200, "tools": LOOSE}

    def ask(self, **fields: Any) -> Any:
        return self.server.ask(**{**self.asked, **fields}).choices[0]

    def refused(self, **fields: Any) -> openai.BadRequestError:
        with pytest.raises(openai.BadRequestError) as refused:
            self.ask(**fields)
        assert "\n" not in refused.value.message
        return refused.value


THOUGHTS = ("<think>", "</think>")
CALLS = ("<tool_call>", "</tool_call>")
FAMILIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "Hermes": (QWEN3, CALLS + THOUGHTS),
    "begun": (BEGUN, CALLS + THOUGHTS),
    "spelled": (QWEN3, ()),
    "XML": (CODER, CALLS + THOUGHTS),
    "channels": (
        GPT_OSS,
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>"),
    ),
}


@pytest.fixture(scope="module", params=nightly(("begun", "channels"), tuple(FAMILIES)))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models") / request.param
    vocabulary = folder_of(folder, *FAMILIES[request.param])
    with LLM(str(folder), dtype="float32", local=1, drafter="ngram") as llm, running(llm) as server:
        yield Served(server, server.service.model, vocabulary)


def check(call: Any) -> None:
    assert allows(SCHEMAS[call.function.name], json.loads(call.function.arguments)), call


def unthinking(served: Served) -> dict[str, Any]:
    """For answers that are to have no thoughts, which the toy would not end."""
    if "<|channel|>" not in served.vocabulary:
        return {"extra_body": {"enable_thinking": False}}
    word = "analysis"  # the channel that it would begin
    beginnings = [served.vocabulary.get(word[:size]) for size in range(1, len(word))]
    return {"logit_bias": {str(token): -100 for token in beginnings if token is not None}}


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_call_that_is_required_is_made(served: Served, temperature: int) -> None:
    asked = {"temperature": temperature, "seed": 4, "parallel_tool_calls": False}
    found = served.ask(tool_choice="required", **asked, **unthinking(served))
    assert found.finish_reason == "tool_calls"
    (call,) = found.message.tool_calls
    check(call)
    assert not (found.message.content or "").strip()


def test_a_function_that_is_named_is_called_once(served: Served) -> None:
    choice = {"type": "function", "function": {"name": "Note"}}
    found = served.ask(tool_choice=choice, temperature=1, seed=2, n=2, **unthinking(served))
    (call,) = found.message.tool_calls
    assert call.function.name == "Note"
    check(call)
    some = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [choice]}}
    allowed = served.ask(tool_choice=some, parallel_tool_calls=False, **unthinking(served))
    assert allowed.message.tool_calls[0].function.name == "Note"


def test_a_stream_brings_the_same_call(served: Served) -> None:
    choice = {"type": "function", "function": {"name": "Add"}}
    wanted = {"tool_choice": choice, "temperature": 1, "seed": 7, **unthinking(served)}
    (call,) = served.ask(**wanted).message.tool_calls
    name, arguments = "", ""
    with served.server.client() as client:
        for chunk in client.chat.completions.create(**served.asked, stream=True, **wanted):
            for piece in chunk.choices[0].delta.tool_calls or () if chunk.choices else ():
                name += piece.function.name or ""
                arguments += piece.function.arguments or ""
    assert (name, arguments) == (call.function.name, call.function.arguments)


def test_strict_tools_of_the_client_come_back_as_their_classes(served: Served) -> None:
    """Where the model calls, which it does where the mark of a call is made likely; else its text is any."""
    asked = {"tools": STRICT, "parallel_tool_calls": False, **unthinking(served)}
    if "<tool_call>" not in served.vocabulary:
        for call in served.ask(**asked).message.tool_calls or ():
            check(call)
        return
    bias = {str(served.vocabulary["<tool_call>"]): 100}
    with served.server.client() as client:
        warm = {**served.asked, "temperature": 1, "seed": 3, "logit_bias": bias}
        found = client.chat.completions.parse(**{**warm, **asked})
    (call,) = found.choices[0].message.tool_calls
    check(call)
    assert isinstance(call.function.parsed_arguments, Add | Note)


def test_a_text_of_a_format_may_stand_in_place_of_a_call(served: Served) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMAS["Add"]}}
    found = served.ask(
        response_format=form, temperature=1, seed=1, parallel_tool_calls=False, **unthinking(served)
    )
    if found.message.tool_calls:
        for call in found.message.tool_calls:
            check(call)
        assert not found.message.content
    else:
        assert allows(SCHEMAS["Add"], json.loads(found.message.content))
    alone = served.ask(response_format=form, tools=openai.omit, seed=1, **unthinking(served))
    assert allows(SCHEMAS["Add"], json.loads(alone.message.content))


def test_nothing_of_a_call_that_max_tokens_cuts_is_text(served: Served) -> None:
    for most in (14, 17):
        found = served.ask(tool_choice="required", max_tokens=most, **unthinking(served))
        assert found.finish_reason == "length"
        assert not (found.message.content or "").strip()


def test_what_cannot_be_obeyed_is_refused_in_one_line(served: Served) -> None:
    broken = {"type": "function", "function": {"name": "f", "parameters": {"not": {}}, "strict": True}}
    assert served.refused(tools=[broken]).param == "tools"
    lark = {"structured_outputs": {"grammar": 'start: "a"'}}
    assert served.refused(extra_body=lark).param == "structured_outputs"


class Sum(BaseModel):
    model_config = ConfigDict(extra="forbid")
    first: int = Field(ge=0, le=999)
    label: str = Field(max_length=12)
    is_even: bool


FORM: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {"name": "Sum", "schema": Sum.model_json_schema()},
}


thinks = pytest.mark.parametrize(
    "served", nightly(["begun"], ["Hermes", "begun"]), indirect=True, scope="module"
)


def ask(served: Served, **fields: Any) -> Any:
    return served.ask(**{"tools": openai.omit, "temperature": 1, "seed": 3, **thinking(served), **fields})


def thinking(served: Served, end: int = 8) -> dict[str, Any]:
    """That it begins thoughts where it may, and ends them with so much of a bias."""
    begin, close = (str(served.vocabulary[mark]) for mark in THOUGHTS)
    return {"logit_bias": {begin: 100, close: end}}


def thoughts_of(choice: Any) -> str | None:
    return getattr(choice.message, "reasoning_content", None)


@thinks
def test_a_class_of_the_client_comes_back_behind_thoughts(served: Served) -> None:
    asked = {**served.asked, "tools": openai.omit, "max_tokens": 300, "temperature": 1, "seed": 1}
    with served.server.client() as client:
        found = client.chat.completions.parse(**asked, **thinking(served), response_format=Sum, logprobs=True)
    (choice,) = found.choices
    assert choice.finish_reason == "stop"
    assert json.loads(choice.message.content) == choice.message.parsed.model_dump()
    assert 0 < found.usage.completion_tokens_details.reasoning_tokens < found.usage.completion_tokens
    assert len(choice.logprobs.content) == found.usage.completion_tokens
    assert thoughts_of(choice)


@thinks
def test_a_stream_and_a_response_bring_the_same(served: Served) -> None:
    whole = ask(served, response_format=FORM, max_tokens=300)
    parts = {"content": "", "reasoning_content": ""}
    wanted = {"model": served.name, "temperature": 1}
    with served.server.client() as client:
        for chunk in client.chat.completions.create(
            **wanted, **thinking(served), messages=SUM, seed=3, stream=True, response_format=FORM
        ):
            for name in parts if chunk.choices else ():
                parts[name] += getattr(chunk.choices[0].delta, name, None) or ""
        response = client.responses.create(
            **wanted,
            input=SUM[0]["content"],
            text={"format": {"type": "json_schema", **FORM["json_schema"]}},
            extra_body={"seed": 3, **thinking(served)},
        )
    assert (parts["content"], parts["reasoning_content"]) == (whole.message.content, thoughts_of(whole))
    assert Sum.model_validate_json(whole.message.content)
    assert response.output_text == whole.message.content
    (item,) = [each for each in response.output if each.type == "reasoning"]
    assert item.content[0].text == thoughts_of(whole)


@thinks
def test_stop_texts_and_lengths_are_looked_for_behind_thoughts(served: Served) -> None:
    free = ask(served, response_format=FORM)
    stop = '"first'
    assert stop in free.message.content
    cut = ask(served, response_format=FORM, stop=stop)
    assert (cut.message.content, cut.finish_reason) == ("{", "stop")
    assert thoughts_of(cut) == thoughts_of(free)
    long = ask(served, response_format=FORM, max_tokens=12, **thinking(served, end=-100))
    assert (long.finish_reason, bool(long.message.content)) == ("length", False)
    assert thoughts_of(long)
    chosen = ask(served, extra_body={"structured_outputs": {"regex": r"[A-C]{2}\d"}})
    assert thoughts_of(chosen)
    assert re.fullmatch(r"[A-C]{2}\d", chosen.message.content)
    fields = {"response_format": FORM, "extra_body": {"stop_token_ids": [served.vocabulary["</think>"]]}}
    assert served.refused(**{"tools": openai.omit, **fields}).param == "response_format"


@thinks
def test_where_it_is_not_to_think_the_answer_is_bound_from_its_first_token(served: Served) -> None:
    told = ask(served, response_format=FORM, extra_body={"enable_thinking": False})
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    continued = ask(
        served,
        messages=[*SUM, {"role": "assistant", "content": "I say"}],
        extra_body={"structured_outputs": {"regex": "(yes|no)"}, **goes_on},
    )
    lark = ask(served, extra_body={"structured_outputs": {"grammar": 'start: "yes" | "no"'}})
    spaced = ask(served, extra_body={"structured_outputs": {"choice": [" yes", " no"]}})
    for found in (told, continued, lark, spaced):
        assert not thoughts_of(found)
    assert Sum.model_validate_json(told.message.content)
    assert continued.message.content in ("yes", "no")
    assert lark.message.content in ("yes", "no")
    assert spaced.message.content in (" yes", " no")


@thinks
def test_completions_and_python_know_no_thoughts(served: Served) -> None:
    with served.server.client() as client:
        raw = client.completions.create(
            model=served.name,
            prompt="It is",
            extra_body={"structured_outputs": {"regex": "yes|no"}, **thinking(served)},
        )
    assert raw.choices[0].text in ("yes", "no")
    llm = served.server.service._llm
    bias = {int(token): value for token, value in thinking(served)["logit_bias"].items()}
    assert llm.generate("What is 17 + 25?", regex="yes|no", logit_bias=bias).text in ("yes", "no")


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"regex": r"[A-C]{2}\d"}, r"[A-C]{2}\d"),
        ({"choice": ["a+b", "c (d)"]}, r"a\+b|c \(d\)"),
        ({"grammar": 'start: "<" word ">"\nword: /[a-z]{1,5}/'}, r"<[a-z]{1,5}>"),
        ({"json": {"enum": [17, 42]}}, "17|42"),
        ({"json_object": True}, r"\{.*"),
    ],
    ids=str,
)
def test_what_clients_of_vllm_ask_is_obeyed(server: Running, asked: dict[str, Any], pattern: str) -> None:
    bound: dict[str, Any] = {"model": MODEL, "extra_body": {"structured_outputs": asked}}
    with server.client() as client:
        chat = client.chat.completions.create(messages=SUM, max_tokens=80, **bound)
        raw = client.completions.create(
            prompt="It is",
            max_tokens=40,
            temperature=1,
            seed=2,
            n=2,
            **bound,
        )
    for text in (chat.choices[0].message.content, *(choice.text for choice in raw.choices)):
        assert re.fullmatch(pattern, text, re.DOTALL), text
