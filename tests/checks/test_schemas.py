"""The check of schemas: what it counts, and that it finds an answer that is not allowed, or not the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llguidance")

from flowspec.model import shaping
from flowspec.model.grammar import GrammarMasks, Mask
from flowspec.model.sampler import Sampler
from tests.checks.json_validity import UnknownError, equal, is_valid, read
from tests.checks.schemas import DRAFTS, asked_for, entries, main

OBJECT = {"properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
SCHEMAS: dict[str, list[tuple[Any, list[tuple[Any, bool]]]]] = {
    "draft2020-12/first": [
        (OBJECT, [({"a": True}, True), ({"a": 1}, False), ([], True)]),
        ({"not": {}}, [(1, False)]),
    ],
    "draft7/second": [
        ({"enum": [12, "é"]}, [(12, True), (13, False)]),
        ({"$id": "urn:x", "type": "null"}, [(None, True)]),
    ],
}


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    for name, groups in SCHEMAS.items():
        path = tmp_path / "tests" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        found = [
            {"schema": schema, "tests": [{"data": data, "valid": valid} for data, valid in documents]}
            for schema, documents in groups
        ]
        path.write_text(json.dumps(found), "utf-8")
    return tmp_path


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command changes for all."""
    monkeypatch.setattr(shaping, "BESIDE_TOKENS_MIN", shaping.BESIDE_TOKENS_MIN)


def run(suite: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, Any]]:
    status = main([str(suite), "--methods", "continuous,ar", "--json", *flags])
    return status, json.loads(capsys.readouterr().out)


def test_every_schema_is_answered_refused_or_named(suite: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [each.name.partition("/")[0] for each in entries(suite)] == [DRAFTS[0]] * 2 + [DRAFTS[1]] * 2
    status, found = run(suite, capsys, "--done", str(suite / "done"))
    assert status == 0
    assert found["schemas"] == 4
    assert found["refused"] == {'Unimplemented keys: ["not"]': 1}
    assert found["unchecked"] == {"$id": 1}
    assert (found["answers"], found["whole"], found["checked"]) == (6, 6, 4)
    assert found["invalid"] == found["wrong"] == []
    kept = [json.loads(line) for line in (suite / "done").read_text().splitlines()]
    assert set(kept[0]["texts"]) <= {'{"a":true}', '{"a":false}', '{"a": true}', '{"a": false}'}
    kept[0]["texts"] = ["kept"] * 2
    kept[0]["invalid"] = [1]
    (suite / "done").write_text("".join(json.dumps(each) + "\n" for each in kept))
    status, found = run(suite, capsys, "--done", str(suite / "done"))
    assert (status, found["invalid"]) == (1, [["draft2020-12/first#0", "kept"]])


def test_what_the_schema_does_not_allow_is_found(
    suite: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without masks a model says what it likes."""
    true = GrammarMasks.allowed

    def allowed(masks: GrammarMasks, answer: Sequence[int]) -> Mask:
        return np.ones_like(true(masks, answer))

    monkeypatch.setattr(GrammarMasks, "allowed", allowed)
    status, found = run(suite, capsys, "--limit", "1")
    assert status == 1
    assert found["wrong"] == []
    assert len(found["invalid"]) == found["whole"] > 0


def test_an_answer_that_is_not_plain_decoding_s_is_found(
    suite: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages are given masks, step by step decoding is not: here those say that all may follow."""
    true = Sampler.draw

    def draw(sampler: Sampler, logits: Any, position: int, text: Any = None, mask: Any = None) -> int:
        return true(sampler, logits, position, text, None if mask is None else np.ones_like(mask))

    monkeypatch.setattr(Sampler, "draw", draw)
    status, found = run(suite, capsys, "--limit", "1")
    assert status == 1
    assert {other.partition(" ")[0].rstrip(",") for _, other in found["wrong"]} == {"continuous", "ar"}


def test_a_folder_that_is_not_the_suite_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 2
    assert "expected JSON-Schema-Test-Suite with tests/draft2020-12" in capsys.readouterr().err


def test_a_schema_that_allows_anything_is_asked_for_what_it_speaks_of() -> None:
    assert asked_for({"items": {}}) == {"items": {}, "type": "array"}
    assert asked_for({"maximum": 3}) == {"maximum": 3, "type": "number"}
    for schema in ({"items": {}, "type": "object"}, {"enum": [1]}, {"anyOf": [{}]}, True):
        assert asked_for(schema) == schema


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": ["integer", "null"]}, [1, 1.0, None], [True, 1.5, "1"]),
        ({"enum": [1, {"a": [0]}]}, [1.0, {"a": [0]}], [True, {"a": [False]}]),
        ({"const": 0}, [0, 0.0], [False, None]),
        ({"multipleOf": 0.1}, [0.3, 7, "x"], [0.25]),
        ({"minLength": 2, "maxLength": 2}, ["éé", 3], ["é", "ééé"]),
        ({"pattern": "^a+$"}, ["aa", 1], ["aa\n", "b"]),
        ({"items": {"type": "null"}, "minItems": 1}, [[None], {}], [[], [1]]),
        ({"prefixItems": [True, {"type": "null"}], "items": False}, [[1], [1, None]], [[1, 1], [1, None, 2]]),
        ({"contains": {"const": 1}, "maxContains": 1}, [[0, 1]], [[0], [1, 1]]),
        ({"uniqueItems": True}, [[1, True, "1"]], [[1, 1.0], [{}, {}]]),
        (
            {
                "properties": {"a": True},
                "patternProperties": {"^b": {"type": "null"}},
                "additionalProperties": False,
            },
            [{"a": 1, "b": None}],
            [{"c": 1}, {"b": 1}],
        ),
        ({"dependentRequired": {"a": ["b"]}}, [{"b": 1}, {"a": 1, "b": 1}], [{"a": 1}]),
        ({"oneOf": [{"minimum": 2}, {"maximum": 4}]}, [1, 5], [3]),
        ({"not": {"type": "null"}}, [1], [None]),
        ({"if": {"minimum": 0}, "then": {"maximum": 9}, "else": False}, [5], [-1, 10]),
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "null"}}}, [None], [1]),
        (True, [1, None], []),
        (False, [], [1]),
    ],
)
def test_our_checker_is_right_by_the_specification(schema: Any, right: list[Any], wrong: list[Any]) -> None:
    assert [is_valid(schema, value, is_draft7=False) for value in right] == [True] * len(right)
    assert [is_valid(schema, value, is_draft7=False) for value in wrong] == [False] * len(wrong)


def test_drafts_differ_and_what_is_unknown_is_said() -> None:
    assert is_valid({"$ref": "#/definitions/a", "maximum": 0, "definitions": {"a": True}}, 1, is_draft7=True)
    listed = {"items": [{"type": "null"}], "additionalItems": False}
    assert is_valid(listed, [None], is_draft7=True)
    assert not is_valid(listed, [None, 1], is_draft7=True)
    for schema in (
        {"$id": "x"},
        {"unevaluatedItems": False},
        {"$ref": "http://x"},
        {"pattern": "\\d"},
        listed,
        {"$ref": "#"},
    ):
        with pytest.raises(UnknownError):
            is_valid(schema, "1", is_draft7=False)
    assert is_valid({"multipleOf": 1.5}, read("40000000000780000000900000000000.5"), is_draft7=False)
    assert not is_valid({"multipleOf": 1.5}, read("40000000000780000000900000000001.5"), is_draft7=False)
    assert is_valid({"type": "integer", "enum": [1]}, read("1.0"), is_draft7=False)
    with pytest.raises(UnknownError):
        read("1e401")
    assert equal([{"a": 1}], [{"a": 1.0}])
    assert not equal({"a": 1}, {"b": 1})
