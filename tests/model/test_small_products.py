"""Products with small matrices, such as a router's: `canonical.c` gives the bits of their definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowspec.model.arithmetic import operations, plain
from flowspec.model.arithmetic.compiled import Library
from tests.model.threads import threads_of


@pytest.mark.arm
@given(
    rows=st.integers(0, 5),
    inputs=st.one_of(st.sampled_from((1, 2, 64, 2048, 2880)), st.integers(1, 200)),
    outputs=st.integers(1, 70),
    zeros=st.integers(0, 40),
    threads=st.integers(1, 3),
)
def test_c_gives_the_bits_of_the_definition(
    library: Library, rows: int, inputs: int, outputs: int, zeros: int, threads: int
) -> None:
    generator = torch.Generator().manual_seed(inputs)
    x = torch.randn((rows, inputs), generator=generator)
    x[:, :zeros] = 0.0  # times less than nothing that is -0
    weights = torch.randn((outputs, inputs), generator=generator)
    with threads_of(threads):
        found = operations.product(x, weights)
    assert found.view(torch.int32).equal(plain.product(x, weights).view(torch.int32))


def test_it_is_summed_in_halves() -> None:
    """One after another, 1e8 would swallow one of the ones."""
    found = plain.product(torch.ones(1, 4), torch.tensor([[1e8, 1.0, -1e8, 1.0]]))
    assert found.item() == 2.0


def test_c_is_given_no_tensor_of_another_shape_or_dtype(library: Library) -> None:
    x, weights = torch.ones(2, 8), torch.ones(3, 8)
    for odd in (weights[:, :7], weights.double(), weights.T, torch.ones(3, 9)):
        with pytest.raises(AssertionError):
            library.halves(x, odd)
    with pytest.raises(AssertionError):
        library.halves(torch.ones(2, 0), torch.ones(3, 0))
