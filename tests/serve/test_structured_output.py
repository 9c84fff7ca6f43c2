"""Answers that a schema, an expression or a grammar binds, by the official client against a real server."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.serve.servers import MODEL, Running

pytest.importorskip("llguidance")

SUM = [{"role": "user", "content": "What is 17 + 25?"}]
ASKED: dict[str, Any] = {"model": MODEL, "messages": SUM, "max_tokens": 80}


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
