"""`margin` bounds from below how far logits must move to change a draw: tiny where two tokens are almost
equal, large elsewhere."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowspec.core.protocol.messages import Sampling
from flowspec.model.sampler import Sampler, margin
from flowspec.noise import draw_bits, gumbel
from tests.model.test_sampler import KINDS, SAMPLINGS, biased, make_logits


def drawn(logits: np.ndarray, sampling: Sampling, position: int = 0) -> tuple[int, float]:
    sampler = Sampler(sampling, len(logits))
    token = sampler.draw(logits, position)
    return token, margin(sampler, logits, position, token)


def where_drawn(token: int, logits: np.ndarray, sampling: Sampling) -> int:
    """The first position at which `token` is drawn."""
    sampler = Sampler(sampling, len(logits))
    return next(position for position in range(100_000) if sampler.draw(logits, position) == token)


def shakes(size: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Moves of every logit by at most 1: the extreme and the random ones."""
    one = np.zeros(size)
    one[rng.integers(size)] = 2
    ranks = np.where(np.arange(size) < rng.integers(size + 1), 1.0, -1.0)
    return [rng.uniform(-1, 1, size), rng.choice([-1.0, 1.0], size), one - 1, 1 - one, ranks]


@given(
    SAMPLINGS,
    st.sampled_from([k for k in KINDS if "masked" not in k]),
    st.sampled_from([1, 2, 3, 4, 6, 30]),
    st.integers(0, 2**32),
    st.booleans(),
)
@settings(max_examples=500)
def test_moving_logits_by_less_than_a_quarter_of_the_margin_changes_nothing(
    sampling: Sampling, kind: str, size: int, seed: int, is_biased: bool
) -> None:
    rng = np.random.default_rng(seed)
    logits = make_logits(kind, size, seed)
    sampler = Sampler(biased(sampling, size, seed) if is_biased else sampling, size)
    for position in range(4):
        token = sampler.draw(logits, position)
        least = margin(sampler, logits, position, token)
        assert least >= 0
        step = min(least / 4, 50.0)
        for shake in shakes(size, rng) if step > 1e-4 else ():
            moved = (logits + step * 0.99 * shake).astype(np.float32)
            assert sampler.draw(moved, position) == token, (position, least)


def test_the_lead_over_the_second_best_is_the_margin_of_plain_draws() -> None:
    logits = make_logits("normal", 50, 3)
    for temperature in (0.0, 0.5, 2.0):
        sampling = Sampling(temperature=temperature, seed=1)
        scores = logits + temperature * gumbel(draw_bits(1, 0, np.arange(50)))
        second, first = np.sort(scores)[-2:]
        token, least = drawn(logits, sampling)
        assert token == np.argmax(scores)
        assert least == pytest.approx(first - second, rel=1e-6)


@pytest.mark.parametrize("gap", [0.0, 1e-5, 1e-3])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 3.0])
def test_two_tokens_are_as_near_as_they_were_made(gap: float, temperature: float) -> None:
    noise = gumbel(draw_bits(0, 0, np.arange(4))) * temperature
    logits = (np.array([2.0, 2.0 - gap, -9.0, -9.0]) - noise).astype(np.float32)
    assert drawn(logits, Sampling(temperature=temperature))[1] == pytest.approx(gap, abs=2e-6)


def at_boundary(filters: dict[str, float], logits: list[float], token: int) -> float:
    sampling, row = Sampling(temperature=1.0, **filters), np.array(logits, dtype=np.float32)
    position = where_drawn(token, row, sampling)
    return margin(Sampler(sampling, len(row)), row, position, token)


def test_distances_to_the_boundaries_count() -> None:
    # Token 1 is the last to pass, by 0.001: in top-k, in min-p, and in the mass before it (e^0.001 as against
    # 1).
    assert at_boundary({"top_k": 2}, [1.0, 0.5, 0.499], 1) == pytest.approx(1e-3, abs=1e-6)
    assert at_boundary({"min_p": math.exp(-0.501)}, [1.0, 0.5, -3.0], 1) == pytest.approx(1e-3, abs=1e-6)
    share = 1 / (1 + math.exp(-0.5) + math.exp(-4))
    assert at_boundary({"top_p": share + 1e-4}, [1.0, 0.5, -3.0], 1) == pytest.approx(
        1e-4 / (share * (1 - share)), rel=0.02
    )
    # And farther away they do not: the lead decides.
    assert at_boundary({"top_k": 2}, [1.0, 0.5, -30.0], 1) > 0.01


def test_a_swap_at_the_top_p_boundary_counts() -> None:
    # Equal weights 1, 1, 1: top-p 0.5 keeps the first two, and which those are hangs on 0.001.
    least = at_boundary({"top_p": 0.5}, [0.001, 0.0, -0.001], 1)
    assert least <= 1.1e-3


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p"])
def test_what_a_filter_left_out_counts_if_it_nearly_passed_and_would_nearly_win(name: str) -> None:
    noise = next(
        g for p in range(100) if (g := gumbel(draw_bits(0, p, np.arange(3))))[1] > g[0] + 0.5 and g[2] < 3
    )
    position = next(p for p in range(100) if (gumbel(draw_bits(0, p, np.arange(3))) == noise).all())
    below = float(noise[1] - noise[0]) + 0.002  # the second id loses by 0.002, and fails the filter by 0.001
    logits = np.array([0.0, -below, -20.0], dtype=np.float32)
    share = 1 / (1 + math.exp(-below))
    filters = {"top_k": 1, "top_p": share - 0.001 * share * (1 - share), "min_p": math.exp(0.001 - below)}
    token, least = drawn(logits, Sampling(temperature=1.0, **{name: filters[name]}), position)
    assert token == 0
    assert least == pytest.approx(below if name == "top_k" else 0.002, abs=1e-5)


def test_a_sure_token_is_far_from_any_tie() -> None:
    logits = np.array([30.0, 0.0, 1.0, -2.0], dtype=np.float32)
    for filters in ({}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.05}):
        assert drawn(logits, Sampling(temperature=0.7, **filters))[1] > 1.5
    assert drawn(logits[:1], Sampling(temperature=0.7))[1] == math.inf
    assert drawn(logits[:1], Sampling())[1] == math.inf
