"""Short convolutions under trees: a row's inputs are those of its own path, added in one order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from flowspec.core.stage.events import ClearSlots
from flowspec.model.arithmetic import plain
from flowspec.model.slice import Slice
from tests.model.slices import job_of, load, part_of


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


def test_a_slot_that_nobody_sees_may_hold_anything(convolutions: Slice) -> None:
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


def test_a_path_with_a_gap_is_an_error_and_no_zero(convolutions: Slice) -> None:
    positions = np.array([0, 2])
    gap = part_of(1, [7, 8], positions=positions, key_positions=positions.astype(np.int32))
    with pytest.raises(AssertionError, match="does not see the nodes right before it"):
        convolutions.forward(job_of(gap), None)
