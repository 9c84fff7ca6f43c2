"""The sampler draws what its definition says, from the right distribution, with penalties as is written, and
drafters do the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Logprobs, Sampling
from flowspec.core.text_before import TextBefore
from flowspec.draft.ranking import Ranker
from flowspec.errors import ClusterError
from flowspec.model.sampler import Sampler, logprobs
from flowspec.noise import draw_bits, gumbel
from tests.nightly import nightly

KINDS = ["normal", "ties", "few-values", "peaked", "masked", "flat", "sloped", "far-masked"]


def make_logits(kind: str, size: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=size) * rng.choice([0.3, 2, 6])
    if kind == "ties":
        logits = np.round(logits * 2) / 2
    elif kind == "few-values":
        logits = rng.choice([-1.0, 0.25, 1.5], size)
    elif kind == "peaked":
        logits[rng.integers(size)] += 40
    elif kind == "flat":
        logits = np.full(size, 0.3)
    elif kind == "sloped":
        logits = -np.arange(size) * 0.01
    elif "masked" in kind:
        logits[rng.random(size) < 0.7] = -1e30 if kind == "masked" else np.finfo(np.float32).min
        logits[rng.integers(size)] = 1.0
    return logits.astype(np.float32)


def naive_biased(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """What is added to logits, token by token, in float32."""
    found = logits.copy()
    for token, bias in sampling.logit_bias:
        if token < len(logits):
            found[token] = np.float32(found[token]) + np.float32(bias)
    for token in sampling.suppress_tokens:
        if token < len(logits):
            found[token] = -np.inf
    return found


def naive_survivors(logits: np.ndarray, sampling: Sampling) -> list[int]:
    """Sort everything that may be drawn by (probability descending, id ascending), then filter; plain
    float64."""
    logits = naive_biased(logits, sampling)
    ids = sorted(
        set(range(len(logits))).difference(sampling.suppress_tokens),
        key=lambda token: (-logits[token], token),
    )
    if sampling.temperature == 0:
        return ids[:1]
    if sampling.top_k:
        ids = ids[: sampling.top_k]
    weights = np.exp((logits[ids].astype(np.float64) - float(logits[ids[0]])) / sampling.temperature)
    before = np.concatenate([[0.0], np.cumsum(weights)[:-1]])
    kept = (before < sampling.top_p * weights.sum()) | (sampling.top_p == 1)
    if sampling.min_p:
        kept &= weights >= sampling.min_p
    return [token for token, keep in zip(ids, kept, strict=True) if keep]


def naive_draw(logits: np.ndarray, sampling: Sampling, position: int) -> int:
    ids, logits = np.array(sorted(naive_survivors(logits, sampling))), naive_biased(logits, sampling)
    if sampling.temperature == 0:
        return int(ids[0])
    scores = logits[ids].astype(np.float64) / sampling.temperature + gumbel(
        draw_bits(sampling.seed, position, ids)
    )
    return int(ids[np.argmax(scores)])


def survivors_of(sampler: Sampler, logits: np.ndarray) -> list[int]:
    shaped = sampler.shaped(logits)
    if sampler.sampling.temperature == 0:
        return [int(np.argmax(shaped))]
    return [int(token) for token in sampler.filtered(shaped) if shaped[token] > -np.inf]


def check(logits: np.ndarray, sampling: Sampling, positions: range) -> None:
    sampler = Sampler(sampling, len(logits))
    before = logits.copy()
    found, expected = survivors_of(sampler, logits), naive_survivors(logits, sampling)
    # The mass is summed in float32, so ids that hold a few millionths of it may change sides.
    if found != expected:
        common, biased = min(len(found), len(expected)), naive_biased(logits, sampling)
        assert found[:common] == expected[:common], sampling
        weights = np.exp((biased.astype(np.float64) - float(biased.max())) / sampling.temperature)
        assert weights[[*found[common:], *expected[common:]]].sum() <= 1e-5 * weights.sum(), sampling
    for position in positions:
        assert sampler.draw(logits, position) == naive_draw(logits, sampling, position), (sampling, position)
    assert (logits == before).all()


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.01, 0.3, 0.7, 1.0, 2.0, 100.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 40, 1000]),
    top_p=st.sampled_from([1.0, 0.95, 0.8, 0.5, 0.3, 1e-9]) | st.floats(0.01, 1),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.3, 0.999]),
    seed=st.integers(0, 2**62 - 1),
)


def biased(sampling: Sampling, size: int, seed: int) -> Sampling:
    """The same sampling with tokens that are never drawn, all but one of them at most, and with biases; some
    of them of tokens that the model does not have."""
    rng = np.random.default_rng(seed)
    left = int(rng.integers(size))
    share = rng.choice([0.0, 0.05, 0.5, 0.95, 1.0])
    suppressed = [token for token in range(size) if token != left and rng.random() < share][:1000]
    named = np.flatnonzero(rng.random(size + 3) < rng.choice([0.0, 0.1, 1.0]))[:500]
    bias = tuple((int(token), float(rng.choice([-100, -2.5, 0, 0.1, 3, 100]))) for token in named)
    return structs.replace(sampling, suppress_tokens=(*suppressed, size, size + 7), logit_bias=bias)


SIZES = st.sampled_from([1, 2, 3, 7, 63, 64, 65, 300])


@given(SAMPLINGS, st.sampled_from(KINDS), SIZES, st.integers(0, 2**32), st.booleans())
@settings(max_examples=nightly(150, 2000))
def test_draws_equal_the_naive_reference(
    sampling: Sampling, kind: str, size: int, seed: int, is_biased: bool
) -> None:
    asked = biased(sampling, size, seed) if is_biased else sampling
    check(make_logits(kind, size, seed), asked, range(6))


@pytest.mark.parametrize("kind", nightly(["normal", "ties", "flat", "far-masked"], KINDS))
def test_draws_equal_the_naive_reference_for_large_vocabularies(kind: str) -> None:
    for size in nightly((9_000,), (9_000, 20_000)):
        logits = make_logits(kind, size, seed=size)
        for seed, (temperature, top_k, top_p, min_p) in enumerate(
            [
                (0.0, 0, 1.0, 0.0),
                (1.0, 0, 1.0, 0.0),
                (0.7, 0, 0.9, 0.0),
                (1.3, 0, 0.3, 0.0),
                (2.0, 0, 1.0, 0.05),
                (1.0, 600, 0.95, 0.01),
                (5.0, 0, 0.999, 1e-9),
            ]
        ):
            sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
            check(logits, sampling, range(1))
            if size == 9_000:
                check(logits, biased(sampling, size, seed), range(1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_suppressed_token_is_never_drawn_and_moves_no_other_draw(temperature: float) -> None:
    logits, free = make_logits("normal", 400, 4), Sampling(temperature=temperature, seed=2)
    suppressed = tuple(range(0, 400, 3))
    sampler = Sampler(structs.replace(free, suppress_tokens=suppressed), len(logits))
    for position in range(200):
        drawn, other = sampler.draw(logits, position), Sampler(free, len(logits)).draw(logits, position)
        assert drawn not in suppressed
        assert other in (*suppressed, drawn), "what may be drawn is drawn as before"
    for none in (
        structs.replace(free, suppress_tokens=tuple(range(400)), top_p=top_p) for top_p in (0.5, 0.99, 1.0)
    ):
        with np.errstate(invalid="ignore"), pytest.raises(ClusterError, match="no token may be drawn"):
            Sampler(structs.replace(none, temperature=1.0), len(logits)).draw(logits, 1)


@pytest.mark.parametrize("top_p", [0.25, 0.75])
def test_the_id_at_which_the_mass_reaches_top_p_exactly_is_the_first_left_out(top_p: float) -> None:
    logits, sampler = np.full(4, 0.3, dtype=np.float32), Sampler(Sampling(temperature=1.0, top_p=top_p), 4)
    assert {sampler.draw(logits, position) for position in range(60)} == set(range(int(4 * top_p)))
    assert survivors_of(sampler, logits) == list(range(int(4 * top_p)))


@pytest.mark.arm
@pytest.mark.parametrize("scale", [1.0, 40.0])
def test_log_probabilities_are_those_of_the_softmax(scale: float) -> None:
    logits = (scale * np.random.default_rng(3).standard_normal(700)).astype(np.float32)
    whole = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    for token in (0, int(logits.argmax()), int(logits.argmin())):
        found = logprobs(logits, token, 20)
        assert found.chosen == pytest.approx(whole[token], abs=1e-5)
        assert found.ids == tuple(np.argsort(-whole, kind="stable")[:20])
        assert found.values == pytest.approx(whole[list(found.ids)], abs=1e-5)
    assert logprobs(logits, 5, 0) == Logprobs(chosen=logprobs(logits, 5, 1).chosen, ids=(), values=())


def test_log_probabilities_of_equals_go_by_id_and_of_the_impossible_are_finite() -> None:
    low = np.finfo(np.float32).min
    found = logprobs(np.array([1.0, 3.0, low, 3.0, -np.inf], dtype=np.float32), 4, 20)
    assert found.ids == (1, 3, 0, 2, 4)
    assert found.chosen == found.values[-1] == float(low)
    assert found.values[0] == found.values[1] == pytest.approx(-np.log(2 + np.exp(-2)))


# ------------------------------------------------------------------------------------------------- penalties


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
@settings(max_examples=nightly(150, 1000))
def test_penalised_draws_equal_the_naive_reference(
    sampling: Sampling, penalties: dict[str, float], kind: str, size: int, seed: int, is_biased: bool
) -> None:
    rng, logits = np.random.default_rng(seed), make_logits(kind, size, seed)
    prompt = rng.integers(size, size=rng.integers(1, 9)).tolist()
    answer = rng.integers(min(size, 5), size=rng.integers(0, 9)).tolist()
    sampling = biased(sampling, size, seed) if is_biased else sampling
    asked = structs.replace(sampling, **penalties)
    shaped = naive_penalised(naive_biased(logits, sampling), asked, prompt, answer)
    sampler, before = Sampler(asked, size), logits.copy()
    assert sampler.shaped(logits, text_of(prompt, answer)).tolist() == shaped.tolist()
    for position in range(4):
        expected = naive_draw(shaped, structs.replace(sampling, logit_bias=()), position)
        assert sampler.draw(logits, position, text_of(prompt, answer)) == expected
    assert (logits == before).all()


def test_repetition_counts_the_prompt_and_what_may_not_be_drawn_stays_so() -> None:
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
    low, high = np.finfo(np.float32).min, np.finfo(np.float32).max
    logits = np.array([low, high, 1.0, 2.0], dtype=np.float32)
    for penalty in (limits.REPETITION_PENALTY_MIN, limits.REPETITION_PENALTY_MAX):
        sampling = Sampling(temperature=1.0, repetition_penalty=penalty, suppress_tokens=(3,))
        shaped = Sampler(sampling, 4).shaped(logits, text_of([0, 1, 3], [3]))
        assert np.isfinite(shaped[:3]).all()
        assert shaped[3] == -np.inf


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
