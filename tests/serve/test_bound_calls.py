"""Calls that are bound, by the official client against a real server of a real model: the bundled one, given
the chat template of a family that calls tools, and its marks as special tokens. It has never seen a call, so
whatever is right in one is the grammar's doing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

pytest.importorskip("llguidance")

from flowspec.llm import LLM
from tests.nightly import nightly
from tests.schemas import allows
from tests.serve.scripted_model import GPT_OSS, QWEN3
from tests.serve.servers import Running, running
from tests.serve.templated_model import folder_of

CODER = QWEN3.replace("return a json object within", "write <function=NAME><parameter=KEY> within")
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "What is 17 + 25?"}]


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
        return {"model": self.name, "messages": ASKED, "max_tokens": 200, "tools": LOOSE}

    def ask(self, **fields: Any) -> Any:
        with self.server.client() as client:
            return client.chat.completions.create(**{**self.asked, **fields}).choices[0]

    def refused(self, **fields: Any) -> openai.BadRequestError:
        with pytest.raises(openai.BadRequestError) as refused:
            self.ask(**fields)
        assert "\n" not in refused.value.message
        return refused.value


FAMILIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "Hermes": (QWEN3, ("<tool_call>", "</tool_call>", "<think>", "</think>")),
    "spelled": (QWEN3, ()),
    "XML": (CODER, ("<tool_call>", "</tool_call>", "<think>", "</think>")),
    "channels": (
        GPT_OSS,
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>"),
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module", params=nightly(("Hermes", "channels"), tuple(FAMILIES)))
def served(request: pytest.FixtureRequest, folders: Path) -> Iterator[Served]:
    template, names = FAMILIES[request.param]
    folder = folders / request.param
    vocabulary = folder_of(folder, template, names)
    with LLM(str(folder), dtype="float32", local=1, drafter="ngram") as llm, running(llm) as server:
        yield Served(server, server.service.model, vocabulary)


def check(call: Any) -> None:
    assert allows(SCHEMAS[call.function.name], json.loads(call.function.arguments)), call


def unthinking(served: Served) -> dict[str, Any]:
    """For answers that are to have no thoughts, which the toy would not end."""
    if served.name != "channels":
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
