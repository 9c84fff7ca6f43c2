"""An answer is equal to that of step-by-step decoding, or wrong, and then it is said where; which cases are
bound by a schema, and why none are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from flowspec.bench import verify
from flowspec.bench.records import EXACT, WRONG
from flowspec.bench.verify import SCHEMA, STOPPED, Case, ClusterAnswer, judge, parting, read_binding
from flowspec.core.protocol.messages import Sampling
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.grammar import check_grammar
from flowspec.model.step_by_step import StepByStep
from flowspec.model.text import Tokenizer, recommended
from flowspec.noise import draw_bits, gumbel
from lab.checks.rigs import agreement
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


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_a_difference_has_both_tokens_and_by_how_much_the_right_one_leads(
    temperature: float, tmp_path: Path
) -> None:
    """Tokens that are not the likeliest are counted."""
    plain = StepByStep.load(ModelFiles(str(make_variant(tmp_path, "llama-grouped"))), "float32")
    case = Case(prompt_id="a", prompt=(5, 6, 7), sampling=Sampling(temperature=temperature, seed=3))
    right = plain.generate(case.prompt, case.sampling, 6, frozenset())
    found = ClusterAnswer(case=case, made_with={"users": 3}, new_tokens_max=6, tokens=right)
    equal = judge(plain, found, frozenset())
    rows = list(plain.logits((*case.prompt, *right)))[len(case.prompt) - 1 : -1]
    unlikely = sum(token != row[0].argmax() for token, row in zip(right, rows, strict=True))
    assert (unlikely > 0) == (temperature > 0)
    assert (equal["verdict"], equal["users"], equal["unlikely_tokens"]) == (EXACT, 3, unlikely)
    logits = rows[3][0].astype(np.float64)
    if temperature > 0:
        logits += temperature * gumbel(draw_bits(3, 6, np.arange(len(logits))))
    margin = logits[right[3]] - logits[right[3] ^ 1]
    assert margin > 0
    for tokens, *difference in (
        ((*right[:3], right[3] ^ 1, *right[4:]), 3, right[3], right[3] ^ 1, pytest.approx(margin)),
        (right[:5], 5, right[5], None, None),
        ((*right, 1), 6, None, 1, None),
    ):
        wrong = judge(plain, replace(found, tokens=tokens), frozenset())
        assert wrong["verdict"] == WRONG
        assert list(wrong["difference"].values()) == difference


def test_the_first_prompt_is_asked_again_with_each_sampling_bound() -> None:
    pytest.importorskip("llguidance")
    files = ModelFiles(BUNDLED)
    binding = read_binding(files, files.config())
    assert binding.why == ""
    cases = [
        Case(prompt_id=name, prompt=prompt, sampling=sampling)
        for sampling in (Sampling(), Sampling(temperature=1.0, seed=3))
        for name, prompt in (("first", (5, 6)), ("second", (7,)))
    ]
    bound = binding.of(cases)
    assert [(case.prompt_id, case.prompt) for case in bound] == [("first as JSON", (5, 6))] * 2
    assert [structs.replace(case.sampling, grammar=None) for case in bound] == [Sampling(), cases[2].sampling]
    grammar = bound[0].sampling.grammar
    assert grammar is not None
    check_grammar(grammar.kind, grammar.text)
    assert json.loads(grammar.text) == SCHEMA
    assert set(grammar.ends) == recommended(files, files.config()).stop_ids


def test_why_answers_cannot_be_bound_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance")
    bare = ModelFiles(str(make_variant(tmp_path / "model", "llama-grouped")))
    assert read_binding(bare, bare.config()).why == "the model has no tokenizer"
    files = ModelFiles(BUNDLED)
    advice = replace(recommended(files, files.config()), stop_ids=frozenset())
    for target, name, value, why in (
        (Tokenizer, "is_in_channels", True, "channels"),
        (verify, "recommended", lambda files, config: advice, "no token that ends answers"),
        (verify, "library_version", lambda: "", "llguidance is not here"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(target, name, value)
            assert why in read_binding(files, files.config()).why
