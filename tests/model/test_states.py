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

from flowspec.core.stage.events import ClearSlots
from flowspec.model.arithmetic import compiled, operations, plain
from flowspec.model.arithmetic.compiled import Library
from flowspec.model.arithmetic.delta import DeltaRows
from flowspec.model.slice import Slice
from tests.model.slices import job_of, load, part_of, threads_of


def inputs(rows: int, key_heads: int, group: int, key_width: int, value_width: int) -> DeltaRows:
    generator = torch.Generator().manual_seed(rows * key_width + value_width)
    queries, keys = (torch.randn((rows, key_heads, key_width), generator=generator) for _ in range(2))
    values = torch.randn((rows, key_heads * group, value_width), generator=generator)
    decays, shares = (torch.rand((rows, key_heads * group), generator=generator) for _ in range(2))
    return DeltaRows(queries, plain.unit(keys, 1e-6), values, decays, shares)


def first_states(places: int, given: DeltaRows) -> torch.Tensor:
    shape = places, given.values.shape[1], given.keys.shape[2], given.values.shape[2]
    return torch.randn(shape, generator=torch.Generator().manual_seed(places))


def bits(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.view(torch.int32)


@pytest.mark.arm
@given(
    key_heads=st.integers(1, 6),
    group=st.integers(1, 3),
    key_width=st.one_of(st.sampled_from((1, 2, 4, 8, 16, 64, 128, 256)), st.integers(1, 256)),
    value_width=st.one_of(st.sampled_from((8, 16, 20, 32, 64)), st.integers(1, 70)),
    steps=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 2), st.integers(-1, 4)),
        min_size=1,
        max_size=8,
    ),
    threads=st.integers(1, 3),
)
def test_c_gives_the_bits_of_the_definition(
    library: Library,
    key_heads: int,
    group: int,
    key_width: int,
    value_width: int,
    steps: list[tuple[int, int, int, int]],
    threads: int,
) -> None:
    given = inputs(4, key_heads, group, key_width, value_width)
    listed = torch.tensor(steps, dtype=torch.int32)
    expected_states, states = first_states(3, given), first_states(3, given)
    expected = plain.delta_rule(given, expected_states, listed)
    with threads_of(threads):
        found = library.delta_rule(given, states, listed)
    assert bits(found).equal(bits(expected))
    assert bits(states).equal(bits(expected_states))


@pytest.mark.parametrize(("key_width", "value_width"), [(1, 3), (20, 16), (128, 40)])
def test_a_step_is_its_formula(key_width: int, value_width: int) -> None:
    given = inputs(5, 2, 3, key_width, value_width)
    states = first_states(3, given)
    steps = [(0, 0, 0, 2), (1, 0, 1, 0), (2, 0, 2, -1), (3, 1, 1, 1), (4, 2, 0, 4)]
    queries, keys, values, decays, shares = (each.double().numpy() for each in given)
    exact = states.double().numpy()
    expected = np.zeros((5, 6, value_width))
    for row, source, target, output in steps:
        for head in range(6):
            key, query = keys[row, head // 3], queries[row, head // 3]
            faded = exact[source, head] * decays[row, head]
            kept = faded + shares[row, head] * np.outer(key, values[row, head] - key @ faded)
            exact[target, head] = kept
            if output >= 0:
                expected[output, head] = query @ kept
    found = plain.delta_rule(given, states, torch.tensor(steps, dtype=torch.int32))
    np.testing.assert_allclose(found.numpy(), expected, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(states.numpy(), exact, rtol=2e-5, atol=2e-5)
    assert not found[3].any(), "no step has this output"


def test_keys_for_which_c_has_no_room_are_computed_by_the_definition(library: Library) -> None:
    given = inputs(1, 1, 1, compiled.KEY_WIDTH_MAX + 1, 4)
    steps = torch.tensor([[0, 0, 0, 0]], dtype=torch.int32)
    found, expected = (each.delta_rule(given, first_states(1, given), steps) for each in (operations, plain))
    assert bits(found).equal(bits(expected))
    with pytest.raises(AssertionError):
        library.delta_rule(given, first_states(1, given), steps)


def test_c_is_given_no_step_outside_what_is_there_and_no_other_shape_or_dtype(library: Library) -> None:
    given = inputs(2, 1, 2, 8, 8)
    states, steps = first_states(3, given), torch.zeros((1, 4), dtype=torch.int32)
    for outside in ((2, 0, 0, 0), (0, 3, 0, 0), (0, 0, 3, 0), (-1, 0, 0, 0), (0, -1, 0, 0)):
        with pytest.raises(AssertionError):
            library.delta_rule(given, states, torch.tensor([outside], dtype=torch.int32))
    for place in range(len(given)):
        odd = DeltaRows(*(each[:1] if place == other else each for other, each in enumerate(given)))
        with pytest.raises(AssertionError):
            library.delta_rule(odd, states, steps)
    for odd_states in (states[:, :1], states.double(), states.transpose(2, 3)):
        with pytest.raises(AssertionError):
            library.delta_rule(given, odd_states, steps)
    with pytest.raises(AssertionError):
        library.delta_rule(given, states, steps.long())


# ------------------------------------------------------------------------------ functions beside it


def units_off(found: torch.Tensor, exact: torch.Tensor) -> float:
    """By how many units in the last place, at most."""
    sizes = exact.abs().clamp(min=2.0**-126)
    places = 2.0 ** (sizes.log2().floor() - 23)
    return float(((found.double() - exact).abs() / places).max())


def test_softplus_and_sigmoid_are_right_and_a_unit_vector_has_the_length_one() -> None:
    x = torch.cat([torch.linspace(-85, 90, 200_001), torch.linspace(-1, 1, 100_001)])
    wide = x.double()
    assert units_off(plain.softplus(x), torch.logaddexp(wide, torch.zeros_like(wide))) < 3
    assert units_off(plain.sigmoid(x), 1 / (1 + (-wide).exp())) < 3
    x = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0])
    one, none = plain.softplus(x), plain.sigmoid(x)
    assert one[:2].tolist() == [float("inf"), 0.0]
    assert none[0] == 1.0 > 1e-38 > none[1]
    assert one[2].isnan()
    assert none[2].isnan()
    assert none[3:].tolist() == [0.5, 0.5]
    x = 3 * torch.randn((2, 5, 20), generator=torch.Generator().manual_seed(1))
    wide = x.double()
    expected = wide / (wide.square().sum(dim=-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(plain.unit(x, 1e-6).double(), expected, atol=0, rtol=4e-7)


@pytest.mark.parametrize("length", [1, 3, 5])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_convolution_is_torchs(length: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(length)
    text = torch.randn((9, 40), generator=generator)
    weight = torch.randn((40, length), generator=generator)
    bias = torch.randn(40, generator=generator) if has_bias else None
    wide = None if bias is None else bias.double()
    padded = F.pad(text.T.double(), (length - 1, 0))[None]
    expected = F.conv1d(padded, weight.double()[:, None], wide, groups=40)[0].T
    rows = torch.stack([F.pad(text, (0, 0, length - 1, 0))[row : row + length] for row in range(9)])
    torch.testing.assert_close(plain.convolution(rows, weight, bias).double(), expected, atol=1e-5, rtol=1e-5)


def test_products_are_added_from_the_oldest_on() -> None:
    rows = torch.tensor([[[1e8], [-1e8], [1.0]], [[1.0], [1e8], [-1e8]]])
    assert plain.convolution(rows, torch.ones(1, 3), None).tolist() == [[1.0], [0.0]]


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
    cache = convolutions._caches[1].whole
    with torch.inference_mode():
        cache.inputs[:, 2:] = torch.nan
    assert torch.equal(convolutions.forward(job, None)[1], expected)
    convolutions.clear_slots(ClearSlots(request=1, slots=(2, 3)))
    assert not cache.inputs[:, 2:4].any()
    assert cache.inputs[:, 4:].isnan().all()
    positions = np.array([0, 2])
    gap = part_of(1, [7, 8], positions=positions, key_positions=positions.astype(np.int32))
    with pytest.raises(AssertionError, match="does not see the nodes right before it"):
        convolutions.forward(job_of(gap), None)
