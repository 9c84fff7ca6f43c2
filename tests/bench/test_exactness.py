"""An answer is equal to that of step-by-step decoding, or wrong, and then it is said where."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flowspec.bench.exactness import STOPPED, Case, ClusterAnswer, Difference, judge, parting
from flowspec.bench.margin import margin_of_last
from flowspec.bench.records import EXACT, WRONG
from flowspec.core.protocol.messages import Sampling
from flowspec.model.files import ModelFiles
from flowspec.model.step_by_step import StepByStep
from lab.checks.questions import agreement
from tests.checkpoints import make_variant

STOPS = frozenset([8, 9])


@pytest.mark.parametrize(
    ("expected", "found", "index"),
    [
        ((1, 2, 3), (1, 2, 3), None),
        ((1, 2, 9), (1, 2, STOPPED), None),
        ((), (), None),
        ((1, 2, 3), (1, 2, 4), 2),
        ((1, 2, 3), (1, 2), 2),
        ((1, 2), (1, 2, 3), 2),
        ((1, 2, 9), (1, 2), 2),
        ((1, 2, 9), (1, STOPPED), 1),
        ((1, 2, 3), (), 0),
    ],
)
def test_where_two_answers_part(expected: tuple[int, ...], found: tuple[int, ...], index: int | None) -> None:
    assert parting(expected, found, STOPS) == index
    assert agreement(expected, found, STOPS) == (EXACT if index is None else WRONG)


def test_a_difference_has_both_tokens_and_by_how_much_the_right_one_leads(tmp_path: Path) -> None:
    plain = StepByStep.load(ModelFiles(str(make_variant(tmp_path, "llama-grouped"))), "float32")
    case = Case(prompt_id="a", prompt=(5, 6, 7), sampling=Sampling())
    right = plain.generate(case.prompt, case.sampling, 6, frozenset())
    found = ClusterAnswer(case=case, method="ar", drafter="", stages=1, new_tokens_max=6, tokens=right)
    assert judge(plain, found, frozenset()).kind == EXACT
    other = (*right[:3], right[3] ^ 1, *right[4:])
    verdict = judge(plain, replace(found, tokens=other), frozenset())
    margin = margin_of_last(plain, case.prompt, case.sampling, right[:4])
    assert margin > 0
    assert verdict.kind == WRONG
    assert verdict.difference == Difference(index=3, expected=right[3], found=right[3] ^ 1, margin=margin)
    shorter = judge(plain, replace(found, tokens=right[:5]), frozenset()).difference
    assert shorter is not None
    assert (shorter.index, shorter.expected, shorter.found) == (5, right[5], None)
    longer = judge(plain, replace(found, tokens=(*right, 1)), frozenset())
    assert longer.difference == Difference(index=6, expected=None, found=1, margin=None)


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_tokens_that_are_not_the_likeliest_are_counted(temperature: float, tmp_path: Path) -> None:
    plain = StepByStep.load(ModelFiles(str(make_variant(tmp_path, "llama-grouped"))), "float32")
    case = Case(prompt_id="a", prompt=(5, 6, 7), sampling=Sampling(temperature=temperature, seed=3))
    tokens = plain.generate(case.prompt, case.sampling, 12, frozenset())
    rows = list(plain.logits((*case.prompt, *tokens)))[len(case.prompt) - 1 : -1]
    best = [int(row[0].argmax()) for row in rows]
    found = ClusterAnswer(case=case, method="ar", drafter="", stages=1, new_tokens_max=12, tokens=tokens)
    expected = sum(token != likeliest for token, likeliest in zip(tokens, best, strict=True))
    assert (expected > 0) == (temperature > 0)
    assert judge(plain, found, frozenset()).unlikely == expected
