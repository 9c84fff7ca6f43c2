"""Packed weights of 16 bits: the numbers themselves, bit for bit the same for a row whatever rows run beside
it, and fallbacks."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flowspec.bench.checkpoints import SMALL, make_checkpoint
from flowspec.model import half
from flowspec.model.files import ModelFiles
from flowspec.model.half import FbgemmHalfLinear, PlainHalfLinear
from flowspec.model.kernels import packing_of
from flowspec.model.pieces import Span
from flowspec.model.quantised import QuantisedLinear, quantise
from flowspec.model.slice import Slice
from flowspec.model.trials import Trial, TrialVerdict
from flowspec.runtime.loading import slice_memory
from tests.model.slices import CPU, assert_faithful, load, packed_layer

DTYPES = (torch.bfloat16, torch.float16)
WIDE = {
    **SMALL,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "vocab_size": 320,
    "initializer_range": 0.05,
}
"""The narrowest layers that FBGEMM packs."""
fbgemm = pytest.mark.skipif(platform.machine() != "x86_64", reason="FBGEMM is a library for x86")


def use(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor without instructions for 16 bits, where `kernel` was found right; whatever this one
    has."""
    monkeypatch.setattr("flowspec.model.kernels.has_instructions", lambda dtype: False)
    monkeypatch.setattr("flowspec.model.kernels.has_products", lambda dtype: False)
    verdicts = (TrialVerdict(kernel=kernel, fault=""),)
    monkeypatch.setattr(
        "flowspec.model.kernels.tried",
        lambda dtype, device: Trial(dtype=dtype, device=device, verdicts=verdicts),
    )


@fbgemm
@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-30, 1.0, 3e4, 1e30])
def test_every_weight_is_the_one_that_was_given(dtype: torch.dtype, size: float) -> None:
    torch.manual_seed(1)
    weight = (torch.randn(40, 512) * min(size, 1e4 if dtype == torch.float16 else size)).to(dtype)
    weight[0, :4] = torch.tensor([0.0, -0.0, 1.0, -1.0]) * size
    weight[1] *= 2.0**-20  # far below the largest
    weight = weight.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
    found = packed_layer(weight, FbgemmHalfLinear)(torch.eye(512))  # each row is a column of the weights
    expected = weight.float().t()
    largest = expected.abs().max()
    matters = expected.abs() >= largest * 2.0**-31
    assert torch.equal(found[matters], expected[matters])
    assert (found - expected).abs().max() <= largest * 2.0**-38


@fbgemm
@torch.inference_mode()
@settings(max_examples=30)
@given(
    rows=st.integers(1, 45),
    shape=st.sampled_from([(1000, 512), (48, 4096), (4100, 64)]),
    seed=st.integers(0, 9),
)
def test_a_row_does_not_depend_on_the_rows_beside_it(rows: int, shape: tuple[int, int], seed: int) -> None:
    torch.manual_seed(seed)
    layer = packed_layer((torch.randn(shape) * 0.02).bfloat16(), FbgemmHalfLinear)
    x = torch.randn(rows, shape[1])  # float32, so that no rounding hides a difference
    whole = layer(x)
    for count in {1, 2, rows // 2 or 1, rows}:
        first = int(torch.randint(0, max(1, rows - count + 1), ()))
        assert torch.equal(layer(x[first : first + count]), whole[first : first + count])


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "linear",
    [pytest.param(FbgemmHalfLinear, marks=fbgemm), pytest.param(PlainHalfLinear, marks=pytest.mark.arm)],
)
def test_sums_are_those_of_float32(linear: type[QuantisedLinear], dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    layer, bias = nn.Linear(1024, 70).to(dtype), torch.randn(70)
    layer.bias = nn.Parameter(bias)
    weight = layer.weight.detach().double()
    quantise(layer, layer.weight.detach(), linear)
    x = torch.randn(3, 5, 1024).to(dtype)
    exact = x.double() @ weight.t() + bias
    assert (layer(x.float()) - exact).norm() < 3e-7 * exact.norm()
    assert layer(x).dtype == dtype
    assert torch.equal(layer(x), layer(x.float()).to(dtype))
    assert layer(x[:0]).shape == (0, 5, 70)
    x[1, 2, 3] = float("nan")
    assert not torch.isfinite(layer(x)[1, 2]).any(), "what overflowed must show, not turn into numbers"
    assert torch.isfinite(layer(x)[0]).all()


@pytest.mark.arm
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("kernel", "linear", "sizes"),
    [
        pytest.param("fbgemm", FbgemmHalfLinear, WIDE, marks=fbgemm),
        ("plain", PlainHalfLinear, {**SMALL, "num_hidden_layers": 2}),  # it takes any, and takes its time
    ],
)
def test_slices_are_faithful_to_the_plain_model(
    kernel: str,
    linear: type[QuantisedLinear],
    sizes: dict[str, Any],
    dtype: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(kernel, monkeypatch)
    folder = make_checkpoint(tmp_path, "llama", sizes)
    assert isinstance(load(folder, [0, 1, 2], dtype)[0].pieces.layers[0].mlp.up_proj, linear)
    assert_faithful(folder, dtype)


@fbgemm
@pytest.mark.parametrize("is_tied", [False, True])
def test_slices_take_the_memory_that_was_foretold_and_no_more_than_unpacked(
    is_tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ModelFiles(str(make_checkpoint(tmp_path, "llama", {**WIDE, "tie_word_embeddings": is_tied})))
    spans = [Span(first=first, end=end, count=2) for first, end in ((0, 2), (1, 2))]
    use("torch", monkeypatch)
    plain = [Slice.load(files, span, "bfloat16", CPU).weight_bytes for span in spans]
    use("fbgemm", monkeypatch)
    for span, unpacked in zip(spans, plain, strict=True):
        part = Slice.load(files, span, "bfloat16", CPU)
        assert part.weight_bytes == slice_memory(files, span, "bfloat16", 100, CPU).weight_bytes == unpacked
        assert isinstance(part.pieces.lm_head, FbgemmHalfLinear) == (not (is_tied and span.is_first)), (
            "a tied one is not held twice"
        )


@fbgemm
def test_what_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    use("fbgemm", monkeypatch)
    assert packing_of("bfloat16", CPU) is FbgemmHalfLinear
    assert FbgemmHalfLinear.takes(torch.Size((4096, 11008)))  # 2% of padding
    assert not FbgemmHalfLinear.takes(torch.Size((4096, 896)))
    assert not FbgemmHalfLinear.takes(torch.Size((8, 512, 512)))
    assert PlainHalfLinear.takes(torch.Size((8, 512, 512))), "where torch's are wrong nothing is left to them"


def test_instructions_that_onednn_is_kept_from_count_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by ONEDNN_MAX_CPU_ISA: torch's kernel would be several times as slow as ours."""
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: True, raising=False)
    for is_seen in (True, False):
        monkeypatch.setattr(half, "has_instructions", lambda dtype, here=is_seen: here)
        assert half.has_products("bfloat16") == half.has_tiles("bfloat16") == is_seen
