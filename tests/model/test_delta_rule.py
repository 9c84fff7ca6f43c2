"""Linear attention: the gated delta rule is its formula, and `canonical.c` gives its definition's bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowspec.model.arithmetic import compiled, operations, plain
from flowspec.model.arithmetic.compiled import Library
from flowspec.model.arithmetic.delta import DeltaRows
from tests.model.threads import threads_of


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


def test_what_is_looked_up_is_summed_in_halves() -> None:
    """One after another, 1e8 would swallow one of the ones."""
    state = torch.tensor([1e8, 1.0, -1e8, 1.0]).view(1, 1, 4, 1)
    ones, one = torch.ones(1, 1, 4), torch.ones(1, 1)
    steps = torch.tensor([[0, 0, 0, 0]], dtype=torch.int32)
    rows = DeltaRows(ones, ones, torch.zeros(1, 1, 1), one, torch.zeros(1, 1))
    found = plain.delta_rule(rows, state, steps)
    assert found.item() == 2.0
    state = torch.tensor([1e8, 1.0, -1e8, 1.0]).view(1, 1, 4, 1)
    plain.delta_rule(rows._replace(shares=one), state, steps)
    assert state.flatten().tolist() == [1e8, -1.0, -1e8, -1.0]


def test_no_steps_have_no_outputs(library: Library) -> None:
    given = inputs(2, 1, 2, 8, 8)
    states = first_states(1, given)
    found = operations.delta_rule(given, states, torch.zeros((0, 4), dtype=torch.int32))
    assert found.shape == (0, 2, 8)
    assert states.equal(first_states(1, given))


def test_keys_for_which_c_has_no_room_are_computed_by_the_definition(library: Library) -> None:
    given = inputs(1, 1, 1, compiled.KEY_WIDTH_MAX + 1, 4)
    steps = torch.tensor([[0, 0, 0, 0]], dtype=torch.int32)
    found, expected = (each.delta_rule(given, first_states(1, given), steps) for each in (operations, plain))
    assert bits(found).equal(bits(expected))
    with pytest.raises(AssertionError):
        library.delta_rule(given, first_states(1, given), steps)


@pytest.mark.parametrize("step", [(2, 0, 0, 0), (0, 3, 0, 0), (0, 0, 3, 0), (-1, 0, 0, 0), (0, -1, 0, 0)])
def test_c_is_given_no_step_outside_what_is_there(library: Library, step: tuple[int, int, int, int]) -> None:
    given = inputs(2, 1, 2, 8, 8)
    with pytest.raises(AssertionError):
        library.delta_rule(given, first_states(3, given), torch.tensor([step], dtype=torch.int32))


def test_c_is_given_no_tensor_of_another_shape_or_dtype(library: Library) -> None:
    given = inputs(2, 1, 2, 8, 8)
    states, steps = first_states(3, given), torch.zeros((1, 4), dtype=torch.int32)
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


def test_softplus_and_sigmoid_are_right_but_for_their_last_places() -> None:
    x = torch.cat([torch.linspace(-85, 90, 200_001), torch.linspace(-1, 1, 100_001)])
    wide = x.double()
    assert units_off(plain.softplus(x), torch.logaddexp(wide, torch.zeros_like(wide))) < 3
    assert units_off(plain.sigmoid(x), 1 / (1 + (-wide).exp())) < 3


def test_softplus_and_sigmoid_show_what_is_infinite_or_no_number() -> None:
    x = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0])
    one, none = plain.softplus(x), plain.sigmoid(x)
    assert one[:2].tolist() == [float("inf"), 0.0]
    assert none[0] == 1.0
    assert none[1] < 1e-38
    assert one[2].isnan()
    assert none[2].isnan()
    assert none[3:].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("width", [1, 20, 128])
def test_a_unit_vector_has_the_length_one(width: int) -> None:
    x = 3 * torch.randn((2, 5, width), generator=torch.Generator().manual_seed(width))
    wide = x.double()
    expected = wide / (wide.square().sum(dim=-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(plain.unit(x, 1e-6).double(), expected, atol=0, rtol=4e-7)
