"""Answers that a schema, an expression or a grammar binds, by the official client against a real server."""

from __future__ import annotations

import json
import re
import threading
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


def test_a_class_of_the_client_comes_back_as_one(server: Running) -> None:
    with server.client() as client:
        reply = client.chat.completions.parse(
            **ASKED, response_format=Sum, temperature=1, seed=3, logprobs=True
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

    threads = [threading.Thread(target=ask, args=(document,)) for document in heavy]
    for thread in threads:
        thread.start()
    with server.client() as client:
        for _ in range(3):
            assert client.chat.completions.create(**ASKED).choices[0].finish_reason == "stop"
    for thread in threads:
        thread.join(60)
    assert len(over) == len(heavy)
    assert set(over) <= {"stop", "length", "400", "503"}
