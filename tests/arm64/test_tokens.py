"""Answers of two machines are compared; where they part, by what plain transformers says there."""

from __future__ import annotations

import dataclasses

import pytest

from flowspec.bench.exactness import STOPPED
from flowspec.errors import InputError
from tests.arm64.tokens import FIRST, Asked, Model, lines, prompts

SUM = [22, 21, 369, 226, 23, 21, 285, 226]
"""How the bundled model begins to answer the first question."""


def asked(answer: list[int]) -> Asked:
    kernels, answers = {"float32": "torch"}, {"float32": [answer]}
    return Asked(new_tokens_max=len(SUM), prompts=[FIRST], kernels=kernels, answers=answers)


def test_the_same_tokens_are_exact() -> None:
    assert list(lines(asked(SUM), asked(SUM))) == [
        (True, "float32: kernel here torch, there torch"),
        (True, "float32, 'What is 17 + 25?': exact: 22 21 369 226 23 21 285 226"),
    ]


def test_a_token_that_the_model_would_not_draw_is_wrong() -> None:
    _, (is_well, line) = lines(asked(SUM), asked([*SUM[:3], 5, *SUM[4:]]))
    assert not is_well
    assert line.startswith("float32, 'What is 17 + 25?': wrong from token 3 on, margin ")
    assert line.endswith(": here 22 21 369 226 23 21 285 226, there 22 21 369 5 23 21 285 226")


def test_two_machines_may_part_where_logits_are_as_near_as_they_need_not_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Model, "_limit", 50.0)
    _, (is_well, line) = lines(asked(SUM), asked([*SUM[:3], 5, *SUM[4:]]))
    assert is_well
    assert line.startswith("float32, 'What is 17 + 25?': parts from token 3 on, margin ")
    assert " 1e+02 allowed: here " in line


@pytest.mark.parametrize("ending", [[], [STOPPED]])
def test_an_answer_that_ends_too_early_is_wrong(ending: list[int]) -> None:
    _, (is_well, line) = lines(asked(SUM), asked([*SUM[:5], *ending]))
    assert not is_well
    assert "wrong from token 5 on" in line


def test_a_precision_that_did_not_run_is_not_well() -> None:
    failed = dataclasses.replace(asked(SUM), answers={}, failures={"float32": "status 1, no memory"})
    assert list(lines(asked(SUM), failed)) == [(False, "float32: did not run: status 1, no memory")]


def test_answers_to_other_questions_are_refused() -> None:
    other = dataclasses.replace(asked(SUM), prompts=["What is 17 + 26?"])
    with pytest.raises(InputError, match="to the same prompts"):
        list(lines(asked(SUM), other))


def test_the_prompts_are_the_readmes_question_and_one_of_each_domain() -> None:
    found = prompts(100)
    assert found[0] == FIRST
    assert len(set(found)) == len(found) > 4
    assert prompts(2) == found[:2]
