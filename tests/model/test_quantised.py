"""Packed weights: near the plain layer, bit for bit the same for a row whatever rows run beside it, and
slices that follow the reference."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flowspec.bench.checkpoints import SMALL, make_checkpoint, make_variant
from flowspec.errors import InputError
from flowspec.model.files import ModelFiles
from flowspec.model.kernels import kernels_of, packing_of
from flowspec.model.pieces import Span
from flowspec.model.quantised import (
    DIGIT,
    LINEARS,
    QnnpackInt8Linear,
    QuantisedLinear,
    quantise,
)
from flowspec.model.slice import Slice
from flowspec.runtime.loading import slice_memory
from tests.model.slices import CPU, assert_faithful, packed_layer

ERRORS = {"int8": 0.012, "int4": 0.11}
"""Norm of what packing changes in a product, as a share of the product's; normal weights and inputs."""


def kernels(kind: str) -> list[type[QuantisedLinear]]:
    """What is used on this processor, and the plain kernel."""
    packing = packing_of(kind, CPU)
    found = [kernel for kernel in kernels_of(kind, CPU) if kernel.linear is packing or kernel.name == "plain"]
    return [kernel.linear for kernel in found if kernel.linear is not None]


def int8_kernels() -> list[type[QuantisedLinear]]:
    """Also QNNPACK's, which is right wherever it was tried."""
    others = [QnnpackInt8Linear] if "qnnpack" in torch.backends.quantized.supported_engines else []
    return list(dict.fromkeys([*kernels("int8"), *others]))


def packed(
    linear: type[QuantisedLinear], inputs: int, outputs: int, *, has_bias: bool = True
) -> tuple[nn.Linear, nn.Linear]:
    """A layer of random weights as it is, and packed."""
    plain = nn.Linear(inputs, outputs, bias=has_bias)
    found = copy.deepcopy(plain)
    quantise(found, plain.weight.detach(), linear)
    return plain, found


@pytest.mark.arm
@torch.inference_mode()
@pytest.mark.parametrize("kind", LINEARS)
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_packed_layer_is_near_the_plain_one(kind: str, has_bias: bool) -> None:
    for linear in kernels(kind):
        torch.manual_seed(1)
        plain, found = packed(linear, 256, 50, has_bias=has_bias)
        x = torch.randn(2, 5, 256)
        expected, got = plain(x), found(x)
        assert got.shape == expected.shape
        error = ((got - expected).norm() / expected.norm()).item()
        assert ERRORS[kind] / 20 < error < ERRORS[kind]
        assert found.weight is None, "the plain weights are gone"


@torch.inference_mode()
@given(
    rows=st.integers(1, 40),
    inputs=st.sampled_from([32, 96, 512]),
    seed=st.integers(0, 9),
    size=st.sampled_from([1e-6, 1.0, 1e4]),
)
@pytest.mark.parametrize("kind", LINEARS)
def test_a_row_does_not_depend_on_the_rows_beside_it(
    kind: str, rows: int, inputs: int, seed: int, size: float
) -> None:
    for linear in kernels(kind):
        torch.manual_seed(seed)
        _, layer = packed(linear, inputs, 32)
        x = torch.randn(rows, inputs) * size
        x[0] *= 100
        whole = layer(x)
        for count in {1, rows // 2 or 1, rows}:
            first = int(torch.randint(0, rows - count + 1, ()))
            assert torch.equal(layer(x[first : first + count]), whole[first : first + count])


@pytest.mark.arm
@torch.inference_mode()
@given(rows=st.integers(1, 20), inputs=st.sampled_from([32, 515, 4500]), seed=st.integers(0, 9))
@settings(max_examples=20)
def test_all_kernels_of_int8_give_the_same_bits(rows: int, inputs: int, seed: int) -> None:
    torch.manual_seed(seed)
    weight, x = torch.randn(40, inputs), torch.randn(rows, inputs)
    first, *others = [packed_layer(weight, linear)(x) for linear in int8_kernels()]
    assert all(torch.equal(found, first) for found in others)


@pytest.mark.arm
@torch.inference_mode()
def test_int8_is_an_exact_product_of_rounded_weights_and_two_digits() -> None:
    """No product is lost to saturation, even where all are as large as they can be."""
    torch.manual_seed(2)
    weights = torch.randint(-127, 128, (24, 515)).float()
    weights[:, 0] = 127  # so that each output's scale is 1
    weights[0], weights[1] = 127, -127
    x = torch.randint(-DIGIT, DIGIT + 1, (9, 515)).float()
    x[:, 0] = DIGIT  # so that each row's scale is 1, too
    x[0], x[1] = DIGIT, torch.tensor([DIGIT, -DIGIT]).repeat(258)[:515]
    finer = x.clamp(1 - DIGIT, DIGIT - 1) + torch.randint(-DIGIT, DIGIT + 1, x.shape) / (2 * DIGIT)
    finer[:, 0] = DIGIT
    expected = finer.double() @ weights.double().t()
    for linear in int8_kernels():
        layer = packed_layer(weights, linear)
        assert torch.equal(layer(x).double(), x.double() @ weights.double().t())
        assert (layer(finer).double() - expected).abs().max() < 1e-6 * expected.abs().max(), (
            "the second digit is exact, too"
        )


@pytest.mark.arm
@torch.inference_mode()
def test_rows_of_zeros_and_of_no_numbers() -> None:
    for linear in int8_kernels():
        _, layer = packed(linear, 64, 16, has_bias=False)
        assert torch.equal(layer(torch.zeros(3, 64)), torch.zeros(3, 16))
        assert layer(torch.zeros(0, 64)).shape == (0, 16)
        broken = torch.ones(2, 64)
        broken[1, 3] = float("nan")
        found = layer(broken)
        assert torch.isfinite(found[0]).all()
        assert not torch.isfinite(found[1]).any(), "what overflowed must show, not turn into numbers"


@pytest.mark.parametrize("kind", LINEARS)
@pytest.mark.parametrize(
    "variant", ["llama-grouped", "qwen2", "gemma3-text", "gemma3", "olmoe", "qwen3-moe", "qwen3-moe-fused"]
)
def test_slices_are_faithful_to_the_quantised_model(kind: str, variant: str, tmp_path: Path) -> None:
    assert_faithful(make_variant(tmp_path, variant), kind)


@pytest.mark.parametrize("kind", LINEARS)
def test_slices_take_the_memory_that_was_foretold(kind: str, tmp_path: Path) -> None:
    files = ModelFiles(str(make_variant(tmp_path, "llama-tied")))
    for first, end in ((0, 8), (0, 3), (3, 8)):
        span = Span(first=first, end=end, count=8)
        foretold = slice_memory(files, span, kind, 100).weight_bytes
        assert Slice.load(files, span, kind, CPU).weight_bytes == foretold
    assert foretold < slice_memory(files, span, "bfloat16", 100).weight_bytes


@torch.inference_mode()
@pytest.mark.parametrize("kind", LINEARS)
@pytest.mark.parametrize("variant", ["olmoe", "qwen3-moe-fused"])
def test_a_row_of_a_mixture_does_not_depend_on_the_rows_beside_it(
    kind: str, variant: str, tmp_path: Path
) -> None:
    files = ModelFiles(str(make_variant(tmp_path, variant)))
    count = files.config().num_hidden_layers
    mixture = Slice.load(files, Span(first=0, end=1, count=count), kind, CPU).pieces.layers[0].mlp
    torch.manual_seed(4)
    hidden = torch.randn(1, 23, 64).bfloat16()
    chosen = torch.stack([torch.randperm(mixture.experts.num_experts)[:2] for _ in range(23)])
    shares = torch.rand(23, 2).bfloat16()
    whole = mixture.experts(hidden[0], chosen, shares)
    for rows in (slice(0, 1), slice(7, 8), slice(3, 12), slice(22, 23)):
        assert torch.equal(mixture.experts(hidden[0, rows], chosen[rows], shares[rows]), whole[rows])
    assert mixture.gate.weight.dtype == torch.bfloat16, "the router stays as it is"


@torch.inference_mode()
@pytest.mark.parametrize("kind", LINEARS)
def test_packed_experts_are_near_the_plain_ones(kind: str, tmp_path: Path) -> None:
    """Of the right expert, and gate apart from up: any mix-up is as far off as another model."""
    files = ModelFiles(str(make_variant(tmp_path, "qwen3-moe")))
    span = Span(first=0, end=1, count=files.config().num_hidden_layers)
    plain, found = (
        Slice.load(files, span, each, CPU).pieces.layers[0].mlp.experts for each in ("bfloat16", kind)
    )
    torch.manual_seed(5)
    hidden = torch.randn(40, 64).bfloat16()
    chosen = torch.stack([torch.randperm(6)[:3] for _ in range(40)])
    shares = torch.rand(40, 3).bfloat16()
    expected = plain(hidden, chosen, shares)
    error = ((found(hidden, chosen, shares) - expected).norm() / expected.norm()).item()
    assert error < 3 * ERRORS[kind]


@pytest.mark.parametrize("kind", LINEARS)
@pytest.mark.parametrize("variant", ["olmoe", "qwen3-moe"])
def test_a_mixture_takes_the_memory_that_was_foretold(kind: str, variant: str, tmp_path: Path) -> None:
    files = ModelFiles(str(make_variant(tmp_path, variant)))
    span = Span(first=0, end=2, count=files.config().num_hidden_layers)
    assert (
        Slice.load(files, span, kind, CPU).weight_bytes == slice_memory(files, span, kind, 100).weight_bytes
    )


def test_a_model_that_cannot_be_packed_is_refused_by_name(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", {**SMALL, "intermediate_size": 48})
    files = ModelFiles(str(folder))
    span = Span(first=0, end=1, count=files.config().num_hidden_layers)
    expected = (
        f"model '{folder}': int4 takes inputs in groups of 32, but it has a layer of 48; use --dtype int8"
    )
    with pytest.raises(InputError, match=f"^{re.escape(expected)}$"):
        Slice.load(files, span, "int4", CPU)
