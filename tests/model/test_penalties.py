"""Tokens that stand in the text already are penalised as is written, and drafters do the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Sampling
from flowspec.core.text_before import TextBefore
from flowspec.draft.ranking import Ranker
from flowspec.model.sampler import Sampler, logprobs, margin
from tests.model.test_sampler import KINDS, SAMPLINGS, biased, make_logits, naive_biased, naive_draw


def naive_penalised(
    logits: np.ndarray, sampling: Sampling, prompt: Sequence[int], answer: Sequence[int]
) -> np.ndarray:
    """Token by token, in float32: repetition over prompt and answer, then frequency, then presence in the
    answer."""
    found = logits.copy()
    for token in range(len(logits)):
        value = found[token]
        if token in prompt or token in answer:
            penalty = np.float32(sampling.repetition_penalty)
            value = value / penalty if value > 0 else value * penalty
        count = list(answer).count(token)
        if count:
            value = value - np.float32(sampling.frequency_penalty) * np.float32(count)
            value = value - np.float32(sampling.presence_penalty)
        found[token] = value
    return found


def text_of(prompt: Sequence[int], answer: Sequence[int]) -> TextBefore:
    return TextBefore(np.array([*prompt, *answer], dtype=np.int64), len(prompt))


PENALTIES = st.fixed_dictionaries(
    {
        "presence_penalty": st.sampled_from([0.0, 0.5, -2.0, 2.0]) | st.floats(-2, 2),
        "frequency_penalty": st.sampled_from([0.0, 0.3, -0.1, 2.0]) | st.floats(-2, 2),
        "repetition_penalty": st.sampled_from([1.0, 1.05, 0.7, 2.0]) | st.floats(0.1, 10),
    }
)


@given(
    SAMPLINGS,
    PENALTIES,
    st.sampled_from([kind for kind in KINDS if kind != "far-masked"]),
    st.sampled_from([1, 2, 3, 7, 64, 65, 300]),
    st.integers(0, 2**32),
    st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_draws_equal_the_naive_reference(
    sampling: Sampling, penalties: dict[str, float], kind: str, size: int, seed: int, is_biased: bool
) -> None:
    rng, logits = np.random.default_rng(seed), make_logits(kind, size, seed)
    prompt = rng.integers(size, size=rng.integers(1, 9)).tolist()
    answer = rng.integers(min(size, 5), size=rng.integers(0, 9)).tolist()
    sampling = biased(sampling, size, seed) if is_biased else sampling
    asked = replace(sampling, **penalties)
    shaped = naive_penalised(naive_biased(logits, sampling), asked, prompt, answer)
    sampler, before = Sampler(asked, size), logits.copy()
    assert sampler.shaped(logits, text_of(prompt, answer)).tolist() == shaped.tolist()
    for position in range(4):
        expected = naive_draw(shaped, replace(sampling, logit_bias=()), position)
        assert sampler.draw(logits, position, text_of(prompt, answer)) == expected
    assert (logits == before).all()


def test_repetition_counts_the_prompt_and_the_others_the_answer_alone() -> None:
    logits, text = np.array([2.0, -1.0, 4.0, 3.0], dtype=np.float32), text_of([2, 1, 2], [0, 0, 1])
    repetition = Sampler(Sampling(repetition_penalty=2.0), 4).shaped(logits, text)
    assert repetition.tolist() == [1.0, -2.0, 2.0, 3.0]
    assert Sampler(Sampling(frequency_penalty=0.5), 4).shaped(logits, text).tolist() == [1.0, -1.5, 4.0, 3.0]
    assert Sampler(Sampling(presence_penalty=0.5), 4).shaped(logits, text).tolist() == [1.5, -1.5, 4.0, 3.0]
    # Repetition first: what is taken off is not multiplied.
    every = Sampling(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    assert Sampler(every, 4).shaped(logits, text).tolist() == [-0.25, -2.75, 2.0, 3.0]
    # Biases before penalties: a bias that makes a logit positive lets it be divided.
    moved = Sampling(repetition_penalty=2.0, logit_bias=((1, 3.0),))
    assert Sampler(moved, 4).shaped(logits, text).tolist() == [1.0, 1.0, 2.0, 3.0]


def test_log_probabilities_and_other_tokens_are_the_models_own() -> None:
    logits, sampling = make_logits("normal", 50, 3), Sampling(repetition_penalty=3.0, presence_penalty=2.0)
    shaped = Sampler(sampling, 50).shaped(logits, text_of([3], [5, 7]))
    assert np.flatnonzero(shaped != logits).tolist() == [3, 5, 7]
    likeliest = int(logits.argmax())
    assert logprobs(logits, likeliest, 1).ids == (likeliest,)


def test_what_may_not_be_drawn_stays_so_and_no_number_becomes_infinite() -> None:
    low, high = np.finfo(np.float32).min, np.finfo(np.float32).max
    logits = np.array([low, high, 1.0, 2.0], dtype=np.float32)
    for penalty in (limits.REPETITION_PENALTY_MIN, limits.REPETITION_PENALTY_MAX):
        sampling = Sampling(temperature=1.0, repetition_penalty=penalty, suppress_tokens=(3,))
        shaped = Sampler(sampling, 4).shaped(logits, text_of([0, 1, 3], [3]))
        assert np.isfinite(shaped[:3]).all()
        assert shaped[3] == -np.inf


def test_a_margin_is_that_of_what_is_drawn_from() -> None:
    logits = np.array([3.0, 2.0, 0.0], dtype=np.float32)
    sampler, text = Sampler(Sampling(presence_penalty=1.5), 3), text_of([1], [0])
    assert sampler.draw(logits, 2, text) == 1
    assert margin(sampler, logits, 2, 1, text) == pytest.approx(0.5)
    assert sampler.survivors(logits, text).tolist() == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["all", "reduced", "unsorted"])
def test_a_drafter_that_equals_the_target_proposes_first_what_the_target_draws(
    temperature: float, kind: str
) -> None:
    rng = np.random.default_rng(5)
    ids = np.arange(400) if kind == "all" else rng.permutation(400)[:90]
    ids = np.sort(ids) if kind == "reduced" else ids
    sampling = Sampling(
        temperature=temperature,
        seed=4,
        presence_penalty=0.7,
        frequency_penalty=0.4,
        repetition_penalty=1.3,
        logit_bias=((int(ids[2]), 1.5),),
        suppress_tokens=(int(ids.min()),),
    )
    ranker, sampler = Ranker(400, ids=None if kind == "all" else ids), Sampler(sampling, 400)
    rows = rng.normal(0, 2, (40, len(ids))).astype(np.float32)
    texts = [text_of(rng.integers(400, size=30).tolist(), rng.choice(ids, at).tolist()) for at in range(40)]
    best = ranker.best(rows, [(sampling, 30 + at) for at in range(40)], 1, texts)
    for at, (row, text) in enumerate(zip(rows, texts, strict=True)):
        whole = np.full(400, -1e30, dtype=np.float32)  # what a drafter of fewer tokens does not know
        whole[ids] = row
        assert best[at].tokens == (sampler.draw(whole, 30 + at, text),)
