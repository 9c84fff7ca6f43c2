"""The sampler draws what its definition says, from the right distribution; `margin` bounds what rounding can
change."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowspec.core.protocol.messages import Logprobs, Sampling
from flowspec.model.sampler import Sampler, logprobs, margin
from flowspec.noise import draw_bits, gumbel

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


def check(logits: np.ndarray, sampling: Sampling, positions: range) -> None:
    sampler = Sampler(sampling, len(logits))
    before = logits.copy()
    found, expected = sampler.survivors(logits).tolist(), naive_survivors(logits, sampling)
    if (
        found != expected
    ):  # the mass is summed in float32, so ids that hold a few millionths of it may change sides
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
    return replace(sampling, suppress_tokens=(*suppressed, size, size + 7), logit_bias=bias)


@given(
    SAMPLINGS, st.sampled_from(KINDS), st.sampled_from([1, 2, 3, 7, 63, 64, 65, 300]), st.integers(0, 2**32)
)
@settings(max_examples=400)
def test_draws_equal_the_naive_reference(sampling: Sampling, kind: str, size: int, seed: int) -> None:
    check(make_logits(kind, size, seed), sampling, range(6))


@given(
    SAMPLINGS, st.sampled_from(KINDS), st.sampled_from([1, 2, 3, 7, 63, 64, 65, 300]), st.integers(0, 2**32)
)
@settings(max_examples=200)
def test_biased_draws_equal_the_naive_reference(sampling: Sampling, kind: str, size: int, seed: int) -> None:
    check(make_logits(kind, size, seed), biased(sampling, size, seed), range(6))


@pytest.mark.parametrize("kind", KINDS)
def test_biased_draws_equal_the_naive_reference_for_large_vocabularies(kind: str) -> None:
    logits = make_logits(kind, 9_000, seed=3)
    for seed, (temperature, top_k, top_p, min_p) in enumerate(
        [
            (0.0, 0, 1.0, 0.0),
            (1.0, 0, 1.0, 0.0),
            (0.7, 0, 0.9, 0.0),
            (1.3, 0, 0.3, 0.0),
            (1.0, 600, 0.95, 0.01),
        ]
    ):
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
        check(logits, biased(sampling, len(logits), seed), range(3))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_suppressed_is_never_drawn_and_moves_no_other_draw(temperature: float) -> None:
    logits, free = make_logits("normal", 400, 4), Sampling(temperature=temperature, seed=2)
    suppressed = tuple(range(0, 400, 3))
    sampler = Sampler(replace(free, suppress_tokens=suppressed), len(logits))
    for position in range(200):
        drawn, other = sampler.draw(logits, position), Sampler(free, len(logits)).draw(logits, position)
        assert drawn not in suppressed
        assert other in (*suppressed, drawn), "what may be drawn is drawn as before"


def test_the_only_token_that_may_be_drawn_is_drawn_however_unlikely_it_is() -> None:
    logits = make_logits("masked", 90, 4)
    worst = int(logits.argmin())
    suppressed = tuple(token for token in range(90) if token != worst)
    for filters in ({}, {"top_k": 3}, {"top_p": 0.9}, {"top_p": 0.1}, {"min_p": 0.5}):
        for temperature in (0.0, 1.0):
            sampling = Sampling(temperature=temperature, suppress_tokens=suppressed, **filters)
            sampler = Sampler(sampling, len(logits))
            assert sampler.draw(logits, 3) == worst
            assert sampler.survivors(logits).tolist() == [worst]
            assert margin(sampler, logits, 3, worst) > 0.5


def test_a_bias_multiplies_the_odds_of_its_token() -> None:
    logits, count = np.array([0.3, 1.0, -0.4], dtype=np.float32), 2_000
    bias = ((1, -2.0), (2, 0.5))
    weights = np.exp(np.array([0.3, 1.0 - 2.0, -0.4 + 0.5]))
    seen = np.bincount(
        [
            Sampler(Sampling(temperature=1.0, logit_bias=bias, seed=seed), 3).draw(logits, 9)
            for seed in range(count)
        ],
        minlength=3,
    )
    expected = count * weights / weights.sum()
    assert ((seen - expected) ** 2 / expected).sum() < 13.8  # its 0.1 % point with two degrees of freedom


@pytest.mark.parametrize("kind", KINDS)
def test_draws_equal_the_naive_reference_in_every_combination(kind: str) -> None:
    logits = make_logits(kind, 90, seed=5)
    grid = itertools.product([0.0, 0.5, 1.5], [0, 1, 20, 90, 95], [1.0, 0.9, 0.2], [0.0, 0.1])
    for seed, (temperature, top_k, top_p, min_p) in enumerate(grid):
        check(
            logits,
            Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed),
            range(3),
        )


@pytest.mark.parametrize("size", [9_000, 20_000])
@pytest.mark.parametrize("kind", KINDS)
def test_draws_equal_the_naive_reference_for_large_vocabularies(kind: str, size: int) -> None:
    logits = make_logits(kind, size, seed=size)
    for seed, (temperature, top_k, top_p, min_p) in enumerate(
        [
            (1.0, 0, 1.0, 0.0),
            (0.7, 0, 0.9, 0.0),
            (1.3, 0, 0.3, 0.0),
            (2.0, 0, 1.0, 0.05),
            (1.0, 600, 0.95, 0.01),
            (5.0, 0, 0.999, 1e-9),
        ]
    ):
        check(
            logits,
            Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed),
            range(3),
        )


@pytest.mark.parametrize("top_p", [0.25, 0.5, 0.75])
def test_the_id_at_which_the_mass_reaches_top_p_exactly_is_the_first_left_out(top_p: float) -> None:
    logits, sampler = np.full(4, 0.3, dtype=np.float32), Sampler(Sampling(temperature=1.0, top_p=top_p), 4)
    assert {sampler.draw(logits, position) for position in range(60)} == set(range(int(4 * top_p)))
    assert sampler.survivors(logits).tolist() == list(range(int(4 * top_p)))


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"top_k": 4},
        {"top_p": 0.8},
        {"top_p": 0.4},
        {"min_p": 0.3},
        {"top_k": 5, "top_p": 0.9, "min_p": 0.1},
    ],
    ids=str,
)
def test_draws_over_seeds_follow_the_softmax(filters: dict[str, float]) -> None:
    logits, count = np.array([1.0, 0.2, 0.2, -1.0, 0.8, -0.5, 0.0], dtype=np.float32), 8_000
    sampling = Sampling(temperature=0.8, **filters)
    ids = naive_survivors(logits, sampling)
    weights = np.exp(logits[ids].astype(np.float64) / 0.8)
    expected = np.zeros(len(logits))
    expected[ids] = count * weights / weights.sum()
    seeds = (Sampling(temperature=0.8, **filters, seed=seed) for seed in range(count))
    seen = np.bincount([Sampler(each, len(logits)).draw(logits, 9) for each in seeds], minlength=len(logits))
    assert (seen[expected == 0] == 0).all()
    chi_square = ((seen[ids] - expected[ids]) ** 2 / expected[ids]).sum()
    limit = {1: 10.8, 2: 13.8, 3: 16.3, 4: 18.5, 5: 20.5, 6: 22.5}[
        len(ids) - 1
    ]  # its 0.1 % points, by degrees of freedom
    assert chi_square < limit


def test_positions_draw_independently_of_what_was_drawn_before() -> None:
    logits, sampling = make_logits("sloped", 5_000, 1), Sampling(temperature=1.0, seed=3)
    sampler = Sampler(sampling, len(logits))
    forwards = [sampler.draw(logits, position) for position in range(40)]
    assert [sampler.draw(logits, position) for position in reversed(range(40))] == forwards[::-1]
    assert [Sampler(sampling, len(logits)).draw(logits, position) for position in range(40)] == forwards
    assert len(set(forwards)) > 20


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
