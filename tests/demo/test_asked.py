"""Prompts that the general drafter never saw: what becomes one, and that none is both trained and held
out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowspec.model.files import bundled_folder
from flowspec.model.prompts import read_prompts
from tests.recipe import asked

MODULE = """import { thing } from './thing.js';

var limit = 10;
function short(a) {
  return a;
}
export default function longer(first, second) {
  return thing(first) + thing(second) + limit;
}
const named = function (value) {
  if (value > limit) { return limit; }
  return value;
};
"""
NOVEL = "\n\n".join(
    f"This is paragraph {number}, which is long enough to be taken." + " And more." for number in range(7)
)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (7, "seven"),
        (40, "forty"),
        (99, "ninety-nine"),
        (300, "three hundred"),
        (905, "nine hundred and five"),
    ],
)
def test_a_number_is_said_as_people_say_it(number: int, words: str) -> None:
    assert asked.in_words(number) == words


def test_functions_are_asked_for_by_their_first_line_and_copies_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "package" / "dist").mkdir(parents=True)
    (tmp_path / "package" / "module.js").write_text(MODULE)
    (tmp_path / "package" / "dist" / "all.js").write_text(MODULE.replace("longer", "copied"))
    assert [prompt.splitlines()[1] for prompt in asked.functions(tmp_path)] == [
        "const named = function (value) {",
        "function longer(first, second) {",
    ]


def test_passages_of_novels_lie_apart(tmp_path: Path) -> None:
    (tmp_path / "novel.txt").write_text(f"CHAPTER I\n\nShort.\n\n{NOVEL}")
    assert [prompt.partition("paragraph ")[2][0] for prompt in asked.passages([tmp_path / "novel.txt"])] == [
        "0",
        "3",
    ]


def test_what_is_held_out_is_trained_nowhere_not_even_as_a_second_copy() -> None:
    prompts = [f"prompt {number // 2}" for number in range(200)]
    held_out, trained = asked.split(prompts)
    assert len(held_out) == asked.HELD_OUT
    assert set(held_out).isdisjoint(trained)
    assert set(held_out) | set(trained) == set(prompts)


def test_the_shipped_sums_in_words_are_held_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["asked", "--held-out", "words"])
    asked.main()
    held_out = [json.loads(line)["turns"][0] for line in capsys.readouterr().out.splitlines()]
    shipped = [
        prompt.turns[0]
        for prompt in read_prompts(bundled_folder("bench-unseen.jsonl"))
        if prompt.domain == "words"
    ]
    assert shipped == held_out[: len(shipped)]
    assert len(shipped) == 8
