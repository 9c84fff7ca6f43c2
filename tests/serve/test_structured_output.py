"""Answers that a schema, an expression or a grammar binds, by the official client against a real server."""

from __future__ import annotations

import json
import re
import threading
import time
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.serve.servers import MODEL, Running

pytest.importorskip("llguidance")

SUM = [{"role": "user", "content": "What is 17 + 25?"}]
ASKED: dict[str, Any] = {"model": MODEL, "messages": SUM, "max_tokens": 80}


class Sum(BaseModel):
    first: int
    label: str
    is_even: bool


def schema(document: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "asked", "schema": document}}


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_class_of_the_client_comes_back_as_one(server: Running, temperature: int) -> None:
    with server.client() as client:
        reply = client.chat.completions.parse(
            **ASKED, response_format=Sum, temperature=temperature, seed=3, logprobs=True
        )
    (choice,) = reply.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Sum)
    assert list(json.loads(choice.message.content)) == ["first", "label", "is_even"]
    assert len(choice.logprobs.content) == reply.usage.completion_tokens


def test_a_stream_brings_the_same_document(server: Running) -> None:
    wanted = {**ASKED, "response_format": {"type": "json_object"}, "temperature": 1, "seed": 8}
    with server.client() as client:
        whole = client.chat.completions.create(**wanted).choices[0]
        pieces = list(client.chat.completions.create(**wanted, stream=True))
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == whole.message.content
    if whole.finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"regex": r"[A-C]{2}\d"}, r"[A-C]{2}\d"),
        ({"choice": ["a+b", "c (d)"]}, r"a\+b|c \(d\)"),
        ({"grammar": 'start: "<" word ">"\nword: /[a-z]{1,5}/'}, r"<[a-z]{1,5}>"),
        ({"json": {"enum": [17, 42]}}, "17|42"),
        ({"json": '{"enum": [17, 42]}'}, "17|42"),
        ({"json_object": True}, r"\{.*"),
    ],
    ids=str,
)
def test_what_clients_of_vllm_ask_is_obeyed(server: Running, asked: dict[str, Any], pattern: str) -> None:
    with server.client() as client:
        chat = client.chat.completions.create(**ASKED, extra_body={"structured_outputs": asked})
        raw = client.completions.create(
            model=MODEL,
            prompt="It is",
            max_tokens=40,
            temperature=1,
            seed=2,
            n=2,
            extra_body={"structured_outputs": asked},
        )
    for text in (chat.choices[0].message.content, *(choice.text for choice in raw.choices)):
        assert re.fullmatch(pattern, text, re.DOTALL), text


@pytest.mark.parametrize(
    ("asked", "param", "text"),
    [
        (
            {"response_format": schema({"not": {}})},
            "response_format.json_schema.schema",
            'Unimplemented keys: ["not"]',
        ),
        (
            {"response_format": schema({"$ref": "#"})},
            "response_format.json_schema.schema",
            "expected what some text satisfies",
        ),
        ({"response_format": schema(5)}, "response_format.json_schema.schema", "expected a JSON schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_object or json_schema"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema.schema",
            "expected a value",
        ),
        (
            {"response_format": schema({"enum": ["x" * 1_000_000]})},
            "response_format.json_schema.schema",
            "expected at most 65536 bytes",
        ),
        (
            {"response_format": {"type": "json_object"}, "extra_body": {"ignore_eos": True}},
            "ignore_eos",
            "expected false",
        ),
        (
            {"extra_body": {"structured_outputs": {"regex": "("}}},
            "structured_outputs.regex",
            "unclosed group",
        ),
        ({"extra_body": {"structured_outputs": {"choice": []}}}, "structured_outputs.choice", "at least one"),
        (
            {"extra_body": {"structured_outputs": {"regex": "a", "grammar": "b"}}},
            "structured_outputs",
            "expected one of",
        ),
        (
            {"extra_body": {"structured_outputs": {"structural_tag": "a"}}},
            "structured_outputs.structural_tag",
            "unknown field",
        ),
    ],
    ids=range(11),
)
def test_what_cannot_be_obeyed_is_refused_in_one_line(
    server: Running, asked: dict[str, Any], param: str, text: str
) -> None:
    with server.client() as client, pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{**ASKED, **asked})
    assert refused.value.param == param
    assert text in refused.value.message
    assert "\n" not in refused.value.message
    assert len(refused.value.message) < 600


def test_heavy_schemas_keep_nobody_waiting(server: Running) -> None:
    """Large, recursive and contradictory ones, each refused or answered; others are answered meanwhile."""
    heavy = [
        {"enum": [f"value {number}" for number in range(4000)]},
        {"properties": {f"p{n}": {"type": "string", "pattern": "^(a|b)*a(a|b){9}$"} for n in range(900)}},
        {"allOf": [{"anyOf": [{"required": ["a"]}, {"required": [f"b{n}"]}]} for n in range(900)]},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#"}},
    ]
    over: list[str] = []

    def ask(document: Any) -> None:
        with server.client() as client:
            try:
                found = client.chat.completions.create(**ASKED, response_format=schema(document))
                over.append(found.choices[0].finish_reason)
            except openai.APIStatusError as error:
                over.append(str(error.status_code))

    def free() -> float:
        began_s = time.monotonic()
        with server.client() as client:
            assert client.chat.completions.create(**ASKED).choices[0].finish_reason == "stop"
        return time.monotonic() - began_s

    alone_s = free()
    threads = [threading.Thread(target=ask, args=(document,)) for document in heavy]
    for thread in threads:
        thread.start()
    beside_s = [free() for _ in range(3)]
    for thread in threads:
        thread.join(60)
    assert len(over) == len(heavy)
    assert set(over) <= {"stop", "length", "400", "503"}
    assert max(beside_s) < 5 + 10 * alone_s
