"""Products of `canonical.c`: in lanes, in pairs of bfloat16 and in halves, each is its definition, number by
number, for any shape and threads."""

from __future__ import annotations

import ctypes
import ctypes.util
import struct
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.model.arithmetic import plain
from flowspec.model.arithmetic.arrays import F32, narrowed, widened
from flowspec.model.arithmetic.compiled import Level
from flowspec.model.layer import Plain
from tests.model import functions
from tests.model.defined_products import pairs_product
from tests.model.definition import tensor
from tests.model.functions import BUILDS, Array, are_alike, built, multiplied
from tests.model.slices import threads_of

pytestmark = pytest.mark.arm
DTYPES = ("float32", "bfloat16", "float16")
LEAST = -126
"""Numbers below 2 to this count as zeros."""
Products = Callable[[F32, F32], F32]
"""Of numbers of bfloat16."""


def places(number: Fraction) -> int:
    """The power of two that a number, not zero, is at least, and less than twice."""
    power = number.numerator.bit_length() - number.denominator.bit_length()
    return power if abs(number) >= Fraction(2) ** power else power - 1


def step(a: Fraction, b: Fraction, total: Fraction) -> Fraction:
    """a * b + total, rounded once to 24 places, of two numbers as near to the even one; nothing below 2^-126.
    `round` of a fraction is exact, and takes the even one."""
    a, b = (Fraction(0) if abs(each) < Fraction(2) ** LEAST else each for each in (a, b))
    found = a * b + total
    if not found:
        return found
    unit = Fraction(2) ** (places(abs(found)) - 23)
    found = round(found / unit) * unit
    return found if abs(found) >= Fraction(2) ** LEAST else Fraction(0)


def exactly(x: F32, weights: F32) -> list[list[float]]:
    """What a row of results is, from steps in fractions, and lanes summed in halves by numbers of 32 bits."""

    def one(row: list[float], weight: list[float]) -> float:
        lanes = [Fraction(0)] * 16
        pairs = [*zip(map(Fraction, row), map(Fraction, weight), strict=True)]
        for at in range(0, len(pairs), 2):
            for a, b in reversed(pairs[at : at + 2]):
                lanes[at // 2 % 16] = step(a, b, lanes[at // 2 % 16])
        sums = [float(lane) for lane in lanes]
        while len(sums) > 1:
            half = len(sums) // 2
            wide = [a + b for a, b in zip(sums[:half], sums[half:], strict=True)]
            sums = [struct.unpack("f", struct.pack("f", each))[0] for each in wide]
        return sums[0]

    return [[one(row, weight) for weight in weights.tolist()] for row in x.tolist()]


def numbers(shape: tuple[int, int], powers: tuple[int, int], seed: int) -> F32:
    """Random numbers of bfloat16."""
    return rounded(unrounded(shape, powers, seed))


def unrounded(shape: tuple[int, int], powers: tuple[int, int], seed: int) -> F32:
    """Times powers of two from the first to the last of these."""
    generator = np.random.default_rng(seed)
    times = np.exp2(generator.integers(powers[0], powers[1] + 1, shape))
    found: F32 = (generator.standard_normal(shape) * times).astype(np.float32)
    return found


def rounded(x: Any) -> F32:
    return widened(bits16(x))


def bits16(x: Any) -> Array:
    """As numbers of bfloat16."""
    return narrowed(np.asarray(x, np.float32), "bfloat16")


def any_numbers(shape: tuple[int, int], dtype: str, seed: int) -> Array:
    return narrowed(np.random.default_rng(seed).standard_normal(shape, np.float32), dtype)


def pairs(x: Array, weights: Array) -> Array:
    """By numbers of bfloat16, in the dtype of rows."""
    return multiplied(x, Plain(narrowed(weights, "bfloat16")))


@pytest.fixture(params=[None, *BUILDS], ids=lambda level: "".join(level or ["definition"]))
def products(request: pytest.FixtureRequest) -> Iterator[Products]:
    """The definition's, and those of each build: by an instruction, by fused steps in a mode that flushes
    what is small, or by exact ones."""
    if request.param is None:
        yield pairs_product
        return
    with built(request.param):
        yield pairs
        least = np.array([1e-40], np.float32)
        assert (least * np.float32(1)).view(np.int32) == least.view(np.int32), "the mode is as it was"


@pytest.mark.parametrize("powers", [(0, 0), (-8, 8), (-66, -60), (-140, 20)])
@pytest.mark.parametrize("inputs", [1, 31, 75, 290])
def test_a_row_is_steps_in_fractions(products: Products, inputs: int, powers: tuple[int, int]) -> None:
    x, weights = numbers((2, inputs), powers, 1), numbers((5, inputs), powers, 2)
    assert products(x, weights).tolist() == exactly(x, weights)


def test_orders_roundings_and_what_is_too_small(products: Products) -> None:
    """Sums that another order, one rounding for both products, or another bound would give otherwise."""
    least, tie = 2.0**-63, 2.0**-24
    cases: list[tuple[list[float], list[float]]] = [
        ([1, tie], [-1, 1]),  # the second product first: nothing; the first one first: 2^-24
        ([0, 1, *30 * [0], tie, tie], [1, 1, *30 * [0], 1, 1]),  # 1, in two roundings; 1 + 2^-23 in one
        ([0, 1, *30 * [0], tie, -1], [1, 1, *30 * [0], 1, 1]),
        ([2.0**-130, 2.0**-130], [2.0**60, 1]),  # factors that count as zeros
        (32 * [-(2.0**-70)], 32 * [2.0**-60]),  # products that count as zeros, of that sign
        ([-least * 2.0**-24, least], [least, least]),  # below by a last place, half of one and a quarter,
        ([-least * 2.0**-25, least], [least, least]),
        ([-least * 2.0**-26, least], [least, least]),
        ([-least * 2.0**-25 * (1 + 2.0**-7), least], [least, least]),  # and next to half of one
        ([-least * 2.0**-25 * (1 - 2.0**-8), least], [least, least]),
        ([least, -1.5 * least], [least, least]),  # too small after one step, and right after both
    ]
    for left, right in cases:
        assert rounded(left).tolist() == left
        for before, after in ((0, 0), (0, 1), (0, 30), (32, 0), (64, 35)):  # lanes that are full, and are not
            wide = [rounded([[*before * [0], *each, *after * [0]]]) for each in (left, right)]
            for x, weights in (wide, wide[::-1]):
                found = products(x, weights)
                assert found.tolist() == exactly(x, weights), (left, right)
                assert are_alike(found, pairs_product(x, weights))
    for small, expected in ((2.0**-24, 0.0), (2.0**-25, least**2)):
        assert exactly(rounded([[-least * small, least]]), rounded([[least, least]])) == [[expected]]


def test_what_is_no_number_stays_what_it_is(products: Products) -> None:
    inf, nan, most = float("inf"), float("nan"), 2.0**127
    x = rounded([[inf, 1], [inf, -inf], [nan, 1], [most, most], [most, -inf], [0, inf]])
    weights = rounded([[1, 1], [2, 2], [0, 1]])
    with np.errstate(all="ignore"):
        found = products(x, weights)
    expected = np.array(
        [[inf, inf, nan], [nan, nan, nan], [nan, nan, nan], [inf, inf, most], [-inf, -inf, -inf], [inf] * 3]
    )
    assert np.array_equal(found, expected, equal_nan=True)


@pytest.mark.parametrize("level", BUILDS, ids="".join)
def test_rows_of_any_numbers_are_rounded_first(level: Level) -> None:
    """To the even one of two, to what is infinite, and what is no number to none."""
    for inputs, powers in ((75, (-70, -56)), (290, (-3, 3)), (1, (0, 0)), (64, (-140, 20))):
        x, weights = unrounded((9, inputs), powers, 1), bits16(numbers((7, inputs), powers, 2))
        x[0] = 1 + (np.arange(inputs) % 128 + 0.5) / 128
        x[1:5, 0] = [np.inf, -np.nan, 3.4e38, -1e-40]
        x[5, 0] = np.array(0x7F800001, np.int32).view(np.float32)  # no number, by the bits that are lost
        expected = pairs_product(tensor(x), tensor(weights)).numpy()
        with built(level):
            found = pairs(x, weights)
        assert np.isnan(found[5]).all()
        assert are_alike(found, expected)


@pytest.mark.parametrize("level", BUILDS, ids="".join)
@pytest.mark.parametrize("shape", [(300, 2080, 31), (70, 16416, 13), (23, 600, 700)])
def test_many_rows_and_long_ones_lose_none(shape: tuple[int, int, int], level: Level) -> None:
    """Rows that do not fit beside each other, a block of weights, and outputs that are left over."""
    rows, inputs, outputs = shape
    x, weights = numbers((rows, inputs), (-2, 2), 1), numbers((outputs, inputs), (-2, 2), 2)
    wide = x.astype(np.float64), weights.astype(np.float64).T
    with built(level):
        found = pairs(x, weights)
        for row in (0, rows // 2, rows - 1):
            assert np.array_equal(pairs(x[row : row + 1], weights), found[row : row + 1])
    assert np.abs(found - wide[0] @ wide[1]).max() < 1e-6 * (np.abs(wide[0]) @ np.abs(wide[1])).max()


@pytest.mark.parametrize("level", BUILDS, ids="".join)
def test_numbers_behind_a_row_do_not_matter(level: Level) -> None:
    """Weights of the next row, and what lies behind the last one."""
    room = np.full((4, 75), 0x7FC0, np.uint16)
    room[:2] = bits16(numbers((2, 75), (0, 0), 1))
    x, own, bias = numbers((3, 75), (0, 0), 2), room[:2].copy(), any_numbers((1, 2), "float32", 3)[0]
    with built(level):
        found = pairs(x, room[:2])
        assert np.array_equal(found, pairs(x, own))
        assert np.isfinite(found).all()
        assert pairs(x[:0], room).shape == (0, 4)
        assert np.array_equal(pairs(bits16(x), own), bits16(found))
        biased = multiplied(bits16(x), Plain(own), bias)
    assert np.array_equal(biased, bits16(found + bias)), "which is added before the result is rounded"


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("inputs", [5, 531])
def test_lanes16_is_fused_steps_in_sixteen_lanes(inputs: int, dtype: str) -> None:
    fused = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
    fused.restype, fused.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    x, weights = any_numbers((1, inputs), "float32", 1), any_numbers((9, inputs), dtype, 2)
    found = multiplied(x, Plain(weights))
    row = x[0].tolist()
    for output, weight in enumerate(widened(weights).tolist()):
        lanes = [0.0] * 16
        for at, (a, b) in enumerate(zip(row, weight, strict=True)):
            lanes[at % 16] = fused(a, b, lanes[at % 16])
        sums = np.array(lanes, np.float32)
        while len(sums) > 1:
            sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
        assert found[0, output] == sums[0]


@given(
    rows=st.integers(1, 140),
    inputs=st.integers(1, 1100),
    outputs=st.integers(1, 120),
    threads=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
)
def test_a_row_has_the_same_bits_in_any_number_of_rows(
    rows: int, inputs: int, outputs: int, threads: int, dtype: str
) -> None:
    x = any_numbers((rows, inputs), "float32", rows)
    weights = any_numbers((outputs, inputs), dtype, outputs)
    with threads_of(threads):
        together = multiplied(x, Plain(weights))
    assert np.array_equal(together, np.concatenate([multiplied(row[None], Plain(weights)) for row in x]))
    weights = bits16(widened(weights))
    with threads_of(threads):
        together = pairs(x, weights)
        assert np.array_equal(pairs(bits16(x), weights), bits16(together))
    assert np.array_equal(together, np.concatenate([pairs(row[None], weights) for row in x]))


@given(
    rows=st.integers(0, 5),
    inputs=st.one_of(st.sampled_from((1, 2, 64, 2048, 2880)), st.integers(1, 200)),
    outputs=st.integers(1, 70),
    zeros=st.integers(0, 40),
    threads=st.integers(1, 3),
)
def test_small_products_are_their_definition(
    rows: int, inputs: int, outputs: int, zeros: int, threads: int
) -> None:
    """As of a router."""
    x, weights = any_numbers((rows, inputs), "float32", 1), any_numbers((outputs, inputs), "float32", 2)
    x[:, :zeros] = 0.0  # times less than nothing that is -0
    with threads_of(threads):
        found = functions.product(x, weights)
    assert are_alike(found, plain.product(x, weights))


def test_small_products_are_summed_in_halves() -> None:
    """One after another, 1e8 would swallow one of the ones."""
    x, weights = np.ones((1, 4), np.float32), np.array([[1e8, 1.0, -1e8, 1.0]], np.float32)
    assert plain.product(x, weights).item() == functions.product(x, weights).item() == 2.0
