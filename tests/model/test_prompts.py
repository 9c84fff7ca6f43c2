"""Prompts files, whole and hostile: each is read, or refused by one line that names file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flowspec.core.protocol import limits
from flowspec.errors import InputError
from flowspec.model.prompts import Prompt, of_each_domain, read_prompts
from flowspec.plan.tables import read_toml
from tests.mutations import mutants

ROW = {"turns": ["a", "b"], "question_id": 7, "category": "x", "more": {"x": 1}}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prompts") / "p.jsonl"


def read_or_refused(path: Path) -> list[Prompt]:
    try:
        return read_prompts(path)
    except InputError as error:
        said = str(error)
    assert str(path) in said
    assert len(said.splitlines()) == 1
    assert len(said) < 1000
    return []


@given(st.lists(mutants(ROW), max_size=3))
@example([{"turns": ["\ud800"]}])
@example([{"turns": ["\x00"], "question_id": "\x1b[2J"}])
def test_any_rows_are_read_or_refused(path: Path, rows: list[Any]) -> None:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    for prompt in read_or_refused(path):
        assert all(turn.strip() and turn.encode() for turn in prompt.turns)
        assert (prompt.prompt_id + prompt.domain).isprintable()


@given(st.binary(max_size=80) | st.text(max_size=12).map(str.encode))
def test_any_bytes_are_read_or_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    read_or_refused(path)
    plain = path.with_suffix(".txt")
    plain.write_bytes(content)
    read_or_refused(plain)


def test_a_line_that_nests_or_counts_too_far_is_named(path: Path) -> None:
    for line in ("[" * 100_000, '{"turns": ' * 100_000, '{"turns": [' + "1" * 5000 + "]}"):
        path.write_text('{"turns": ["a"]}\n' + line)
        with pytest.raises(InputError, match="line 2: expected"):
            read_prompts(path)


def test_prompts_without_a_category_have_their_file_s(path: Path) -> None:
    path.write_text('{"turns": ["a"]}\n{"turns": ["b"], "category": ""}\n{"turns": ["c"], "category": "x"}')
    assert [prompt.domain for prompt in read_prompts(path)] == [path.stem, path.stem, "x"]


def test_what_is_too_long_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PROMPT_CHARS_MAX", 1000)
    path.write_text(json.dumps({"turns": ["x" * 1001]}))
    with pytest.raises(InputError, match=r"line 1: .* a turn of more than 1000 characters"):
        read_prompts(path)
    with path.open("wb") as file:
        file.truncate(limits.PROMPTS_BYTES_MAX + 1)
    with pytest.raises(InputError, match=f"at most {limits.PROMPTS_BYTES_MAX} bytes together"):
        read_prompts(path)


def test_only_the_end_of_a_line_ends_one(path: Path) -> None:
    path.write_bytes('{"turns": ["a\u2028b\x85c"]}\r\n{"turns": ["d"], "question_id": 7}\n'.encode())
    assert [prompt.turns for prompt in read_prompts(path)] == [("a\u2028b\x85c",), ("d",)]
    plain = path.with_suffix(".txt")
    plain.write_bytes(b"one\r\ntwo\n")
    assert [prompt.turns for prompt in read_prompts(plain)] == [("one",), ("two",)]


def test_toml_that_nests_or_counts_too_far_or_is_too_large_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    brackets, digits = b"a = " + b"[" * 100_000, b"a = " + b"9" * 5000
    for content in (
        brackets,
        digits,
        b"a" * 3000 + b".b" * 3000 + b" = 1",
        b"\xff",
        b"\x00 = 1",
        b"[" * 50_000,
    ):
        path.write_bytes(content)
        with pytest.raises(InputError) as caught:
            read_toml(path, "a cluster file").check(())
        assert len(str(caught.value).splitlines()) == 1
    with path.open("wb") as file:
        file.truncate(limits.TOML_BYTES_MAX + 1)
    with pytest.raises(InputError, match=f"a cluster file of at most {limits.TOML_BYTES_MAX} bytes"):
        read_toml(path, "a cluster file")


def test_a_few_prompts_are_of_each_domain_in_turn() -> None:
    names = ("a1", "a2", "a3", "b1", "c1", "c2")
    prompts = [Prompt(prompt_id=name, domain=name[0], turns=(name,)) for name in names]
    for count, expected in ((3, "a1 b1 c1"), (5, "a1 b1 c1 a2 c2"), (9, "a1 b1 c1 a2 c2 a3")):
        assert [prompt.prompt_id for prompt in of_each_domain(prompts, count)] == expected.split()
