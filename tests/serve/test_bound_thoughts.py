"""Answers of a format behind thoughts, by the official client against a real server of a real model: the
bundled one, given the chat template of a family that thinks, and its marks as special tokens. It has never
thought, so it is biased to begin thoughts and to end them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

pytest.importorskip("llguidance")

from flowspec.llm import LLM
from tests.nightly import nightly
from tests.serve.scripted_model import QWEN3
from tests.serve.servers import running
from tests.serve.test_bound_calls import ASKED, Served, folder_of

BEGUN = QWEN3.replace(
    "</think>\n\n{% endif %}{% endif %}", "</think>\n\n{% else %}<think>\n{% endif %}{% endif %}"
)
"""As Qwen3.5's, which begins the thoughts itself."""
MARKS = ("<think>", "</think>")


class Sum(BaseModel):
    model_config = ConfigDict(extra="forbid")
    first: int = Field(ge=0, le=999)
    label: str = Field(max_length=12)
    is_even: bool


FORM: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {"name": "Sum", "schema": Sum.model_json_schema()},
}


@pytest.fixture(scope="module", params=nightly([BEGUN], [QWEN3, BEGUN]))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models") / "thinking"
    vocabulary = folder_of(folder, request.param, MARKS)
    with LLM(str(folder), dtype="float32", local=1, drafter="ngram") as llm, running(llm) as server:
        yield Served(server, server.service.model, vocabulary)


def ask(served: Served, **fields: Any) -> Any:
    return served.ask(**{"tools": openai.omit, "temperature": 1, "seed": 3, **thinking(served), **fields})


def thinking(served: Served, end: int = 8) -> dict[str, Any]:
    """That it begins thoughts where it may, and ends them with so much of a bias."""
    begin, close = (str(served.vocabulary[mark]) for mark in MARKS)
    return {"logit_bias": {begin: 100, close: end}}


def thoughts_of(choice: Any) -> str | None:
    return getattr(choice.message, "reasoning_content", None)


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


def test_a_stream_and_a_response_bring_the_same(served: Served) -> None:
    whole = ask(served, response_format=FORM, max_tokens=300)
    parts = {"content": "", "reasoning_content": ""}
    wanted = {"model": served.name, "temperature": 1}
    with served.server.client() as client:
        for chunk in client.chat.completions.create(
            **wanted, **thinking(served), messages=ASKED, seed=3, stream=True, response_format=FORM
        ):
            for name in parts if chunk.choices else ():
                parts[name] += getattr(chunk.choices[0].delta, name, None) or ""
        response = client.responses.create(
            **wanted,
            input=ASKED[0]["content"],
            text={"format": {"type": "json_schema", **FORM["json_schema"]}},
            extra_body={"seed": 3, **thinking(served)},
        )
    assert (parts["content"], parts["reasoning_content"]) == (whole.message.content, thoughts_of(whole))
    assert Sum.model_validate_json(whole.message.content)
    assert response.output_text == whole.message.content
    (item,) = [each for each in response.output if each.type == "reasoning"]
    assert item.content[0].text == thoughts_of(whole)


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


def test_where_it_is_not_to_think_the_answer_is_bound_from_its_first_token(served: Served) -> None:
    told = ask(served, response_format=FORM, extra_body={"enable_thinking": False})
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    continued = ask(
        served,
        messages=[*ASKED, {"role": "assistant", "content": "I say"}],
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
