"""lanes16: what `canonical.c` computes is its definition, number by number, for any shape and threads."""

from __future__ import annotations

import ctypes
import ctypes.util

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowspec.model.arithmetic.compiled import Library
from tests.model.threads import threads_of

LANES = 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def numbers(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.arm
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [5, 64, 531, 1040])
def test_a_row_is_what_fused_steps_in_sixteen_lanes_give(
    library: Library, inputs: int, dtype: torch.dtype
) -> None:
    fused = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
    fused.restype, fused.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    x, weights = numbers((1, inputs), torch.float32, 1), numbers((9, inputs), dtype, 2)
    found = library.linear(x, weights)
    row = x[0].tolist()
    for output, weight in enumerate(weights.float().tolist()):
        lanes = [0.0] * LANES
        for at, (a, b) in enumerate(zip(row, weight, strict=True)):
            lanes[at % LANES] = fused(a, b, lanes[at % LANES])
        sums = np.array(lanes, np.float32)
        while len(sums) > 1:
            sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
        assert found[0, output].item() == sums[0]


@pytest.mark.arm
@given(
    rows=st.integers(2, 140),
    inputs=st.integers(1, 1100),
    outputs=st.integers(1, 120),
    threads=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
)
def test_a_row_has_the_same_bits_in_any_number_of_rows(
    library: Library, rows: int, inputs: int, outputs: int, threads: int, dtype: torch.dtype
) -> None:
    x, weights = numbers((rows, inputs), torch.float32, rows), numbers((outputs, inputs), dtype, outputs)
    with threads_of(threads):
        together = library.linear(x, weights)
    alone = torch.cat([library.linear(row[None], weights) for row in x])
    assert together.equal(alone)
