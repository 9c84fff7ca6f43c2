"""Short convolutions under trees: a row's inputs are those of its own path, added in one order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from flowspec.bench.checkpoints import make_variant
from flowspec.core.protocol.messages import Sampling
from flowspec.core.stage.events import ClearSlots, JobPart, RunLayers
from flowspec.model.arithmetic import plain
from flowspec.model.files import ModelFiles
from flowspec.model.pieces import Span
from flowspec.model.slice import Slice

CPU = torch.device("cpu")


@pytest.mark.parametrize("length", [1, 2, 3, 5])
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


def part_of(slots: list[int], positions: list[int], held: list[int], seen: list[list[int]]) -> JobPart:
    """Rows in these slots; `held` are the positions of all slots, `seen` the slots that each row sees."""
    visible = np.zeros((len(slots), len(held)), dtype=bool)
    for row, each in enumerate(seen):
        visible[row, each] = True
    return JobPart(
        request=1,
        slots=np.array(slots, dtype=np.int64),
        tokens=np.array([7 + slot for slot in slots], dtype=np.int64),
        positions=np.array(positions, dtype=np.int64),
        key_positions=np.array(held, dtype=np.int32),
        visible=visible,
        sampled=np.zeros(len(slots), dtype=bool),
        sampling=Sampling(),
    )


@pytest.fixture
def convolutions(tmp_path: Path) -> Slice:
    """Two layers, which do not attend."""
    files = ModelFiles(str(make_variant(tmp_path, "lfm2")))
    part = Slice.load(files, Span(first=0, end=2, count=6), "float32", CPU)
    part.open_cache(1, 40)
    return part


def run(part: Slice, rows: JobPart) -> torch.Tensor:
    job = RunLayers(job=0, parts=(rows,), payload=None, rows=tuple(range(len(rows.slots))))
    return part.forward(job, None)[1]


def test_a_slot_that_nobody_sees_may_hold_anything(convolutions: Slice) -> None:
    rows = part_of([0, 1], [0, 1], [0, 1, -1], [[0], [0, 1]])
    expected = run(convolutions, rows)
    cache = convolutions._caches[1].whole
    with torch.inference_mode():
        cache.inputs[:, 2:] = torch.nan
    assert torch.equal(run(convolutions, rows), expected)
    convolutions.clear_slots(ClearSlots(request=1, slots=(2, 3)))
    assert not cache.inputs[:, 2:4].any()
    assert cache.inputs[:, 4:].isnan().all()


def test_a_path_with_a_gap_is_an_error_and_no_zero(convolutions: Slice) -> None:
    with pytest.raises(AssertionError, match="does not see the nodes right before it"):
        run(convolutions, part_of([0, 1], [0, 2], [0, 2], [[0], [0, 1]]))
