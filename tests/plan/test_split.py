"""A split gives every device a layer, loses none, and gives the stronger device no less; memory is counted to
the byte."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.protocol import limits
from flowspec.core.protocol.shared_keys import Heads
from flowspec.core.stage.slots import WORK_BYTES
from flowspec.errors import InputError
from flowspec.plan.memory import SliceMemory, cache_bytes
from flowspec.plan.shape import layers_held
from flowspec.plan.split import checked_split, even_split, weighted_split

WEIGHTS = st.lists(st.one_of(st.integers(1, 16).map(float), st.floats(1, 2.0**62)), min_size=1, max_size=12)
SPARE = st.integers(0, 90)
"""Layers beyond one for each stage."""


@given(WEIGHTS, SPARE)
def test_a_weighted_split_sums_up_and_follows_the_weights(weights: list[float], spare: int) -> None:
    counts = weighted_split(len(weights) + spare, weights)
    assert len(counts) == len(weights)
    assert sum(counts) == len(weights) + spare
    assert min(counts) >= 1
    ordered = sorted(zip(weights, counts, strict=True))
    assert all(a <= b for (low, a), (high, b) in pairwise(ordered) if low < high)


@given(WEIGHTS, SPARE, st.integers(0, 11), st.floats(1, 100))
def test_a_device_that_grows_loses_no_layer(weights: list[float], spare: int, at: int, factor: float) -> None:
    at %= len(weights)
    grown = [weight * factor if index == at else weight for index, weight in enumerate(weights)]
    assert (
        weighted_split(len(weights) + spare, grown)[at] >= weighted_split(len(weights) + spare, weights)[at]
    )


@given(st.lists(st.integers(1, 20), min_size=1, max_size=10), st.integers(1, 1 << 30))
def test_weights_that_divide_evenly_are_followed_exactly(counts: list[int], unit: int) -> None:
    assert weighted_split(sum(counts), [float(count * unit) for count in counts]) == counts


@given(st.integers(1, 12), SPARE)
def test_an_even_split_differs_by_one_and_spares_the_last(stages: int, spare: int) -> None:
    counts = even_split(stages + spare, stages)
    assert sum(counts) == stages + spare
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True), "the last stage also runs lm_head"


def test_more_devices_than_layers_are_refused() -> None:
    with pytest.raises(InputError, match=r"9 devices but only 8 layers.*use fewer devices"):
        even_split(8, 9)


def test_a_split_by_hand_is_taken_as_it_is_or_refused() -> None:
    assert checked_split((3, 1, 2, 2), 8, 4) == [3, 1, 2, 2]
    with pytest.raises(InputError, match="--layers: expected 4 numbers, one for each device, got 2"):
        checked_split((4, 4), 8, 4)
    with pytest.raises(InputError, match=r"--layers: 3\+1\+2\+1 is 7, but the model has 8"):
        checked_split((3, 1, 2, 1), 8, 4)
    for counts in ((9, -1), (8, 0)):
        with pytest.raises(
            InputError, match=f"--layers: expected at least one layer for each device, got 8?9?,{counts[1]}"
        ):
            checked_split(counts, 8, 2)


def test_memory_is_keys_and_values_of_context_and_tree() -> None:
    found = cache_bytes(layers_held([Heads(count=5, width=64)] * 3), context=1000, held="bfloat16")
    assert found == 2 * 3 * 5 * 64 * (1000 + limits.TREE_NODES_MAX) * 2
    assert SliceMemory(weight_bytes=7, cache_bytes=found).total_bytes == 7 + found + WORK_BYTES
