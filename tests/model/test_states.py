"""Layers that keep a state: linear attention is its formula, and `canonical.c` gives its definition's bits;
short convolutions take the inputs of a row's own path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.protocol.model_spec import DeltaRule
from flowspec.core.stage.events import ClearSlots
from flowspec.model.arithmetic import plain
from flowspec.model.arithmetic.arrays import F32
from flowspec.model.slice import Slice
from tests.model import functions
from tests.model.slices import job_of, load, part_of, threads_of


def normal(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


MIXERS = st.builds(
    lambda group, **shape: DeltaRule(heads=group * shape["key_heads"], **shape),
    group=st.integers(1, 3),
    key_heads=st.integers(1, 6),
    key_width=st.one_of(st.sampled_from((1, 2, 4, 8, 16, 64, 128, 256)), st.integers(1, 256)),
    value_width=st.one_of(st.sampled_from((8, 16, 20, 32, 64)), st.integers(1, 70)),
    length=st.integers(1, 5),
)
STEP = st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 2), st.integers(-1, 4))


@pytest.mark.arm
@given(mixer=MIXERS, steps=st.lists(STEP, min_size=1, max_size=8), threads=st.integers(1, 3))
def test_c_gives_the_bits_of_the_definition(
    mixer: DeltaRule, steps: list[tuple[int, int, int, int]], threads: int
) -> None:
    length = mixer.length
    seed, listed = mixer.key_width * length + mixer.value_width, [(0, 0, 0, 0)]
    for row, source, target, output in steps:  # only states that were made are gone on from
        made = [0, *(before[2] for before in listed)]
        listed.append((row, source if source in made else 0, target, output))
    held, lines = normal(seed, 9, mixer.inputs), np.random.default_rng(seed).integers(-1, 9, (4, length))
    lines[:, -1] = np.abs(lines[:, -1])
    taps, rates = normal(1, length, mixer.inputs - 2 * mixer.heads), np.abs(normal(2, 2 * mixer.heads))
    states = normal(3, 3, mixer.heads, mixer.key_width, mixer.value_width)
    state, order = states[0].copy(), np.array(listed, np.int32)
    expected = plain.delta_rule(plain.delta_rows(mixer, held, lines, taps, rates), states, order)
    with threads_of(threads):
        found = functions.delta_rule(mixer, held, lines, taps, rates, state, order, 3)
    asked = sorted({*order[:, 3]} - {-1})
    assert functions.are_alike(found[asked], expected[asked])
    assert functions.are_alike(state, states[0])


@pytest.mark.parametrize(("key_width", "value_width"), [(1, 3), (20, 16), (128, 40)])
def test_a_step_is_its_formula(key_width: int, value_width: int) -> None:
    generator = np.random.default_rng(key_width)
    given = (
        normal(1, 5, 2, key_width),
        plain.unit(normal(2, 5, 2, key_width), 1e-6),
        normal(3, 5, 6, value_width),
        *(generator.random((5, 6), np.float32) for _ in range(2)),
    )
    states = normal(4, 3, 6, key_width, value_width)
    steps = [(0, 0, 0, 2), (1, 0, 1, 0), (2, 0, 2, -1), (3, 1, 1, 1), (4, 2, 0, 4)]
    queries, keys, values, decays, shares = (each.astype(np.float64) for each in given)
    exact = states.astype(np.float64)
    expected = np.zeros((5, 6, value_width))
    for row, source, target, output in steps:
        for head in range(6):
            key, query = keys[row, head // 3], queries[row, head // 3]
            faded = exact[source, head] * decays[row, head]
            kept = faded + shares[row, head] * np.outer(key, values[row, head] - key @ faded)
            exact[target, head] = kept
            if output >= 0:
                expected[output, head] = query @ kept
    found = plain.delta_rule(given, states, np.array(steps, np.int32))
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(states, exact, rtol=2e-5, atol=2e-5)
    assert not found[3].any(), "no step has this output"


# ------------------------------------------------------------------------------ functions beside it


def units_off(found: F32, exact: np.ndarray) -> float:
    """By how many units in the last place, at most."""
    places = 2.0 ** (np.floor(np.log2(np.abs(exact).clip(2.0**-126))) - 23)
    return float((np.abs(found - exact) / places).max())


def test_softplus_and_sigmoid_are_right_and_a_unit_vector_has_the_length_one() -> None:
    x = np.concatenate([np.linspace(-85, 90, 200_001), np.linspace(-1, 1, 100_001)]).astype(np.float32)
    wide = x.astype(np.float64)
    assert units_off(plain.softplus(x), np.logaddexp(wide, 0.0)) < 3
    assert units_off(plain.sigmoid(x), 1 / (1 + np.exp(-wide))) < 3
    x = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0], np.float32)
    with np.errstate(all="ignore"):
        one, none = plain.softplus(x), plain.sigmoid(x)
    assert one[:2].tolist() == [np.inf, 0.0]
    assert none[0] == 1.0 > 1e-38 > none[1]
    assert np.isnan([one[2], none[2]]).all()
    assert none[3:].tolist() == [0.5, 0.5]
    x = 3 * normal(1, 2, 5, 20)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt(np.square(wide).sum(axis=-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(plain.unit(x, 1e-6), expected, atol=0, rtol=4e-7)


@pytest.mark.parametrize("length", [1, 3, 5])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_convolution_is_torchs(length: int, has_bias: bool) -> None:
    text, weight = normal(length, 9, 40), normal(length + 1, 40, length)
    bias = normal(9, 40) if has_bias else None
    wide = None if bias is None else torch.from_numpy(bias).double()
    padded = np.pad(text, ((length - 1, 0), (0, 0)))
    given = torch.from_numpy(padded.T).double()[None], torch.from_numpy(weight).double()[:, None]
    expected = F.conv1d(*given, wide, groups=40)[0].T.numpy()
    lines = np.maximum(np.arange(9)[:, None] + np.arange(length) - (length - 1), -1)
    np.testing.assert_allclose(plain.convolution(text, lines, weight.T, bias), expected, atol=1e-5, rtol=1e-5)


def test_products_are_added_from_the_oldest_on() -> None:
    held, lines = np.array([[1e8], [-1e8], [1.0]], np.float32), np.array([[0, 1, 2], [2, 0, 1]])
    assert plain.convolution(held, lines, np.ones((3, 1), np.float32)).tolist() == [[1.0], [0.0]]


@pytest.fixture
def convolutions(variant: Callable[[str], Path]) -> Slice:
    """Two layers, which do not attend."""
    part = load(variant("lfm2"), [0, 2, 6])[0]
    part.open_cache(1, 40)
    return part


def test_an_unseen_slot_may_hold_anything_and_a_gap_is_an_error(convolutions: Slice) -> None:
    whole = part_of(1, [7, 8])
    seen = np.pad(whole.visible, ((0, 0), (0, 1)))
    job = job_of(replace(whole, visible=seen, key_positions=np.array([0, 1, -1], dtype=np.int32)))
    _, expected = convolutions.forward(job, None)
    cache = convolutions._caches[1][0]
    held = [cache.inputs(layer) for layer in range(2)]
    for each in held:
        each[2:] = np.nan
    assert np.array_equal(convolutions.forward(job, None)[1], expected)
    convolutions.clear_slots(ClearSlots(request=1, slots=(2, 3)))
    assert not any(each[2:4].any() for each in held)
    assert all(np.isnan(each[4:]).all() for each in held)
    positions = np.array([0, 2])
    gap = part_of(1, [7, 8], positions=positions, key_positions=positions.astype(np.int32))
    with pytest.raises(AssertionError, match="does not see the nodes right before it"):
        convolutions.forward(job_of(gap), None)
