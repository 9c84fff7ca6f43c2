"""The coupled noise is the generator it claims to be, is Gumbel, is uncorrelated, and its integer bound
misses nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flowspec.noise import CACHE_BYTES_MAX, NoiseCache, bits_above, draw_bits, gumbel, position_key

GOLDEN = 0x9E3779B97F4A7C15
BITS_MAX = 2**53 - 1
SEEDS = st.integers(0, 2**62 - 1)
POSITIONS = st.integers(0, 2**20)


def mix(state: int) -> int:
    """splitmix64's output function on a Python integer."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    return state ^ (state >> 31)


def plain_bits(seed: int, position: int, token: int) -> int:
    """The documented definition, one value at a time, in integers without a size."""
    key = mix((mix((seed + GOLDEN) % 2**64) + position * GOLDEN) % 2**64)
    return mix((key + (token + 1) * GOLDEN) % 2**64) >> 11


def test_values_never_change_between_releases() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [mix((1234567 + k * GOLDEN) % 2**64) for k in (1, 2, 3)] == published, "splitmix64, seed 1234567"
    found = draw_bits(7, 40, np.array([0, 151_935]))
    assert found.tolist() == [7723835621292222, 4014202468464990]
    assert gumbel(found).tolist() == pytest.approx([1.8726674532842191, 0.21296368605098728], abs=1e-12)


@given(SEEDS, POSITIONS, st.lists(st.integers(0, 2**22), min_size=1, max_size=20))
@example(2**62 - 1, 2**20, [2**22, 0])
def test_bits_follow_the_definition_whatever_else_is_asked_for(
    seed: int, position: int, tokens: list[int]
) -> None:
    ids = np.array(tokens)
    found = draw_bits(seed, position, ids)
    assert found.tolist() == [plain_bits(seed, position, token) for token in tokens]
    assert 0 <= position_key(seed, position) < 2**64
    assert ids.tolist() == tokens, "the ids asked for are left as they were"


@given(st.lists(st.integers(0, BITS_MAX), min_size=1, max_size=50))
@example([0, 1, 2**52, BITS_MAX - 2, BITS_MAX - 1, BITS_MAX])
def test_gumbel_follows_its_formula_and_grows_with_the_bits(bits: list[int]) -> None:
    found = gumbel(np.array(sorted(bits), dtype=np.uint64))
    for value, bit in zip(found, sorted(bits), strict=True):
        if bit < 2**53 - 2**20:  # beyond, the formula itself is at the end of float64
            assert value == pytest.approx(-math.log(-math.log((bit + 0.5) / 2**53)), rel=1e-9, abs=1e-9)
    assert (np.diff(found) >= 0).all()
    assert -4 < found[0] <= found[-1] < 38


def test_noise_has_the_moments_and_the_shape_of_gumbel() -> None:
    count = 200_000
    noise = np.sort(
        np.concatenate([gumbel(draw_bits(3, position, np.arange(count // 100))) for position in range(100)])
    )
    assert noise.mean() == pytest.approx(0.5772156649, abs=4 * 1.2826 / count**0.5)
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=4 * 3.46 / count**0.5)
    ranks = np.arange(count + 1) / count
    cdf = np.exp(-np.exp(-noise))
    distance = max((ranks[1:] - cdf).max(), (cdf - ranks[:-1]).max())
    assert distance * count**0.5 < 1.95  # Kolmogorov's 0.1 % point


@pytest.mark.parametrize(
    "step", [(0, 0, 1), (0, 1, 0), (1, 0, 0), (1, -1, 0), (0, 1, -1), (0, -1, 1), (1, 0, -1), (2**32, 0, 0)]
)
def test_neighbours_are_uncorrelated(step: tuple[int, int, int]) -> None:
    count, rows = 2_000, 40

    def uniforms(seed: int, position: int, first: int) -> np.ndarray:
        drawn = [draw_bits(seed, position + row, np.arange(first, first + count)) for row in range(rows)]
        return (np.concatenate(drawn) + 0.5) / 2**53

    here, there = uniforms(11, 5, 1), uniforms(11 + step[0], 5 + step[1], 1 + step[2])
    bound = 4 / (rows * count) ** 0.5
    assert abs(np.corrcoef(here, there)[0, 1]) < bound
    assert abs(np.corrcoef(abs(here - 0.5), abs(there - 0.5))[0, 1]) < bound
    assert not (here == there).any()


@given(st.integers(0, BITS_MAX), st.floats(0, 1e-6))
@example(BITS_MAX, 0.0)
@example(0, 0.0)
def test_no_winner_lies_below_bits_above(bits: int, less: float) -> None:
    noise = float(gumbel(np.array([bits], dtype=np.uint64))[0])
    assert 0 <= bits_above(noise - less) <= bits
    assert bits_above(noise) >= bits - 2**10, "the bound is tight enough to be of use"


@given(st.floats(-700, 1e300))
def test_bits_above_is_a_53_bit_integer_for_any_noise(noise: float) -> None:
    bound = bits_above(noise)
    assert 0 <= bound < 2**53
    if bound:
        assert float(gumbel(np.array([bound - 1], dtype=np.uint64))[0]) <= noise


def test_the_cache_gives_what_is_drawn_and_stays_bounded() -> None:
    cache = NoiseCache(5, 1000, bytes_max=3 * 8 * 1000)
    assert cache.count_max == 3
    kept = cache.bits(0)
    for position in (1, 2, 0, 3, 0, 4, 5, 0, 1):
        assert cache.bits(position).tolist() == draw_bits(5, position, np.arange(1000)).tolist()
        assert len(cache._bits) <= 3
    assert cache.bits(0) is kept, "a position in use is not dropped"
    assert NoiseCache(5, 2**22).count_max == 2, "however large the vocabulary, two positions fit"
    assert NoiseCache(5, 32_000).count_max * 8 * 32_000 <= CACHE_BYTES_MAX
