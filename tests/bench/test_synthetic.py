"""Synthetic answers and guesses: always the same, in every process and in every order, and right as often as
they claim."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import numpy as np
import pytest

from flowspec.bench.guesses import WIDTH_MAX, Guesses, MemoDrafter
from flowspec.bench.plain import PlainCase
from flowspec.bench.synthetic import PROMPT_TOKENS, VOCABULARY, Synthetic, synthetic_cases
from flowspec.core.protocol.messages import Sampling

HOT = Sampling(temperature=1.0, seed=4)
PRINTED = """
from flowspec.core.protocol.messages import Sampling
from flowspec.bench.synthetic import Synthetic, synthetic_cases
case = synthetic_cases(2, [Sampling(temperature=1.0, seed=4)], 20)[1]
guesses = Synthetic(0.6, 1024).begin(case)()._guesses
path = guesses.prefixes.chain((*case.prompt, *case.answer))
off = guesses.prefixes.after(path[70], 5)
print(case.answer, guesses.children([*path[60:], off, guesses.prefixes.after(off, 6)]))
"""


def guesses_of(case: PlainCase, acceptance: float = 0.6, *, balanced: bool = False) -> Guesses:
    drafter = Synthetic(acceptance, 100_000, balanced=balanced).begin(case)()
    assert isinstance(drafter, MemoDrafter)
    return drafter._guesses


def test_cases_are_told_apart_by_number_and_sampling_and_are_always_the_same() -> None:
    samplings = [Sampling(), HOT, Sampling(temperature=1.0, seed=5)]
    found = synthetic_cases(3, samplings, 20)
    assert found == synthetic_cases(3, samplings, 20)
    assert [(case.prompt_id, case.sampling) for case in found] == [
        (str(n), sampling) for sampling in samplings for n in (1, 2, 3)
    ]
    assert len({case.prompt for case in found}) == len({case.answer for case in found}) == 9
    for case in found:
        assert (len(case.prompt), len(case.answer), case.new_tokens_max, case.is_stopped) == (
            PROMPT_TOKENS,
            20,
            20,
            False,
        )
        assert all(0 <= token < VOCABULARY for token in (*case.prompt, *case.answer))
    assert synthetic_cases(2, samplings[:1], 20, first=1) == found[1:3]


@pytest.mark.parametrize("acceptance", [0.3, 0.635, 0.8])
def test_guesses_are_right_as_often_as_they_claim(acceptance: float) -> None:
    """Over all places of long answers, by rank: hits lie within four standard errors of the sum of the
    confidences."""
    hits, expected, variance = [0] * WIDTH_MAX, [0.0] * WIDTH_MAX, [0.0] * WIDTH_MAX
    first: list[tuple[float, bool]] = []
    for case in synthetic_cases(2, [Sampling()], 3000):
        guesses = guesses_of(case, acceptance)
        path = guesses.prefixes.chain((*case.prompt, *case.answer))
        for true, children in zip(case.answer, guesses.children(path[PROMPT_TOKENS - 1 : -1]), strict=True):
            assert len(set(children.tokens)) == WIDTH_MAX
            assert list(children.confidences) == sorted(children.confidences, reverse=True)
            assert 0 < sum(children.confidences) <= 1 + 1e-9
            for rank, (token, confidence) in enumerate(
                zip(children.tokens, children.confidences, strict=True)
            ):
                hits[rank] += token == true
                expected[rank] += confidence
                variance[rank] += confidence * (1 - confidence)
            first.append((children.confidences[0], children.tokens[0] == true))
    for rank in range(WIDTH_MAX):
        assert abs(hits[rank] - expected[rank]) <= 4 * variance[rank] ** 0.5 + 1
    assert hits[0] / len(first) == pytest.approx(acceptance, abs=0.03)
    first.sort()
    for at in range(5):  # calibrated where it is unsure and where it is sure
        some = first[at * len(first) // 5 : (at + 1) * len(first) // 5]
        error = sum(confidence * (1 - confidence) for confidence, _ in some) ** 0.5
        assert abs(sum(hit for _, hit in some) - sum(confidence for confidence, _ in some)) <= 4 * error + 1


@pytest.mark.parametrize("acceptance", [0.3, 0.635, 0.8])
def test_balanced_answers_have_their_share_of_right_guesses_each_in_no_order(acceptance: float) -> None:
    """Of 96 tokens as many first guesses are right as there should be, within four; by chance ten more or
    fewer may be. Whether a token is guessed says little of whether the next one is."""
    orders = []
    for case in synthetic_cases(20, [Sampling()], 96):
        guesses = guesses_of(case, acceptance, balanced=True)
        path = guesses.prefixes.chain((*case.prompt, *case.answer))
        found = guesses.children(path[PROMPT_TOKENS - 1 : -1])
        orders.append([true == children.tokens[0] for true, children in zip(case.answer, found, strict=True)])
        assert sum(orders[-1]) == pytest.approx(96 * acceptance, abs=4)
        assert sum(children.confidences[0] for children in found) == pytest.approx(96 * acceptance, abs=1)
    hits = np.array(orders, dtype=float)
    assert abs(np.corrcoef(hits[:, :-1].ravel(), hits[:, 1:].ravel())[0, 1]) < 0.1
    assert len({tuple(order) for order in orders}) == 20


def test_guesses_off_the_path_of_the_answer_lead_nowhere() -> None:
    (case,) = synthetic_cases(1, [Sampling()], 50)
    guesses = guesses_of(case)
    path = guesses.prefixes.chain((*case.prompt, *case.answer))
    off = [guesses.prefixes.after(prefix, 31_999) for prefix in path]
    off += [guesses.prefixes.after(prefix, 7) for prefix in off]
    assert all(len(set(children.tokens)) == WIDTH_MAX for children in guesses.children(off))
    (last,) = guesses.children(path[-1:])
    assert len(last.tokens) == WIDTH_MAX, "behind the answer there is no truth, but there are guesses"


def test_what_is_said_after_a_prefix_depends_on_nothing_but_it() -> None:
    (case,) = synthetic_cases(1, [HOT], 60)
    texts = [(*case.prompt, *case.answer[:n]) for n in range(60)]
    texts += [(*text, 11, 12) for text in texts]
    orders = [texts, texts[::-1], random.Random(1).sample(texts, len(texts))]
    found = []
    for order in orders:
        guesses = guesses_of(case)
        said = {text: guesses.children([guesses.prefixes.chain(text)[-1]])[0] for text in order}
        found.append([said[text] for text in texts])
    assert found[0] == found[1] == found[2]
    together = guesses_of(case)
    assert together.children([together.prefixes.chain(text)[-1] for text in texts]) == found[0]
    other = guesses_of(synthetic_cases(1, [Sampling(temperature=1.0, seed=5)], 60)[0])
    assert other.children([other.prefixes.chain(text)[-1] for text in texts]) != found[0]


def test_every_process_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    other = subprocess.run(
        [sys.executable, "-c", PRINTED],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "1"},
    ).stdout
    exec(PRINTED, {})
    assert capsys.readouterr().out == other
    assert "Children" in other
