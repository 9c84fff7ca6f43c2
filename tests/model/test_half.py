"""Packed weights of 16 bits: the numbers themselves, bit for bit the same for a row whatever rows run beside it, and fallbacks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flowspec.core.events import Submit
from flowspec.core.head import HeadCore
from flowspec.core.messages import Sampling
from flowspec.model.files import ModelFiles
from flowspec.model.half import HalfLinear, packing_of
from flowspec.model.pieces import Span
from flowspec.model.quantised import quantise
from flowspec.model.reference import Reference
from flowspec.model.slice import Slice
from flowspec.runtime.loading import slice_memory
from flowspec.testbed.checkpoints import SMALL, make_checkpoint
from tests.model.slices import CPU, load, pipeline

DTYPES = (torch.bfloat16, torch.float16)
WIDE = {**SMALL, "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 320, "initializer_range": 0.05}
"""The narrowest layers that are packed."""
pytestmark = pytest.mark.skipif("fbgemm" not in torch.backends.quantized.supported_engines, reason="this torch has no FBGEMM")


@pytest.fixture
def as_without_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor without instructions for 16 bits, whatever this one has."""
    monkeypatch.setattr("flowspec.model.half._is_worth_it", lambda dtype: True)


@pytest.fixture(scope="module", autouse=True)
def engine() -> Iterator[None]:
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    yield
    torch.backends.quantized.engine = before


def packed(weight: torch.Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    quantise(layer, weight, HalfLinear)
    return layer


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 3e4, 1e30])
def test_every_weight_is_the_one_that_was_given(dtype: torch.dtype, size: float) -> None:
    torch.manual_seed(1)
    weight = (torch.randn(40, 512) * min(size, 1e4 if dtype == torch.float16 else size)).to(dtype)
    weight[0, :4] = torch.tensor([0.0, -0.0, 1.0, -1.0]) * size
    weight[1] *= 2.0**-20  # far below the largest
    weight = weight.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
    found = packed(weight)(torch.eye(512))  # each row is a column of the weights
    expected = weight.float().t()
    largest = expected.abs().max()
    matters = expected.abs() >= largest * 2.0**-31
    assert torch.equal(found[matters], expected[matters])
    assert (found - expected).abs().max() <= largest * 2.0**-38


@torch.inference_mode()
@settings(max_examples=30)
@given(rows=st.integers(1, 45), shape=st.sampled_from([(1000, 512), (48, 4096), (4100, 64)]), seed=st.integers(0, 9))
def test_a_row_does_not_depend_on_the_rows_beside_it(rows: int, shape: tuple[int, int], seed: int) -> None:
    torch.manual_seed(seed)
    layer = packed((torch.randn(shape) * 0.02).bfloat16())
    x = torch.randn(rows, shape[1])  # float32, so that no rounding hides a difference
    whole = layer(x)
    for count in {1, 2, rows // 2 or 1, rows}:
        first = int(torch.randint(0, max(1, rows - count + 1), ()))
        assert torch.equal(layer(x[first : first + count]), whole[first : first + count])


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_those_of_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    layer, bias = nn.Linear(1024, 70).to(dtype), torch.randn(70)
    layer.bias = nn.Parameter(bias)
    weight = layer.weight.detach().double()
    quantise(layer, layer.weight.detach(), HalfLinear)
    x = torch.randn(3, 5, 1024).to(dtype)
    exact = x.double() @ weight.t() + bias
    assert (layer(x.float()) - exact).norm() < 3e-7 * exact.norm()
    assert layer(x).dtype == dtype
    assert torch.equal(layer(x), layer(x.float()).to(dtype))
    assert layer(x[:0]).shape == (0, 5, 70)
    x[1, 2, 3] = float("nan")
    assert not torch.isfinite(layer(x)[1, 2]).any(), "what overflowed must show, not turn into numbers"
    assert torch.isfinite(layer(x)[0]).all()


@pytest.mark.usefixtures("as_without_instructions")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_slices_follow_the_plain_model_in_one_process(dtype: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", WIDE)
    reference = Reference(ModelFiles(str(folder)), dtype)
    prompt, sampling = tuple(range(3, 60)), Sampling(temperature=1.0, seed=3)
    slices = load(folder, [0, 1, 2], dtype)
    assert isinstance(slices[0].pieces.layers[0].mlp.up_proj, HalfLinear)
    run = pipeline(slices, HeadCore(context=400, stage_count=2))
    run.give(Submit(request=1, prompt=prompt, new_tokens_max=30, sampling=sampling, stop_ids=frozenset()))
    run.settle()
    reference.generate(prompt, sampling, 30, frozenset())
    assert all(difference.margin <= reference.noise_logits for difference in reference.check(prompt, sampling, run.answers[1]))


@pytest.mark.parametrize("is_tied", [False, True])
def test_slices_take_the_memory_that_was_foretold_and_no_more_than_unpacked(
    is_tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ModelFiles(str(make_checkpoint(tmp_path, "llama", {**WIDE, "tie_word_embeddings": is_tied})))
    spans = [Span(first=first, end=end, count=2) for first, end in ((0, 2), (1, 2))]
    monkeypatch.setattr("flowspec.model.half._is_worth_it", lambda dtype: False)
    plain = [Slice.load(files, span, "bfloat16", CPU).weight_bytes for span in spans]
    monkeypatch.setattr("flowspec.model.half._is_worth_it", lambda dtype: True)
    for span, unpacked in zip(spans, plain, strict=True):
        part = Slice.load(files, span, "bfloat16", CPU)
        assert part.weight_bytes == slice_memory(files, span, "bfloat16", 100).weight_bytes == unpacked
        assert isinstance(part.pieces.lm_head, HalfLinear) == (not (is_tied and span.is_first)), "a tied one is not held twice"


@pytest.mark.usefixtures("as_without_instructions")
def test_what_is_not_packed() -> None:
    assert packing_of("bfloat16", CPU) is HalfLinear
    assert packing_of("float32", CPU) is None
    assert packing_of("bfloat16", torch.device("cuda")) is None
    assert HalfLinear.takes(torch.Size((4096, 11008)))  # 2% of padding
    assert not HalfLinear.takes(torch.Size((4096, 896)))
    assert not HalfLinear.takes(torch.Size((8, 512, 512)))


def test_a_torch_without_the_kernel_runs_layers_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.quantized, "engine", "qnnpack")
    assert packing_of("bfloat16", CPU) is None
    monkeypatch.setattr(torch.backends.quantized, "engine", "fbgemm")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    assert packing_of("bfloat16", CPU) is None, "this processor has its own instructions"
