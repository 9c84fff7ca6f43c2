"""Packed weights: near the plain layer, bit for bit the same for a row whatever rows run beside it, and
slices that follow the reference."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flowspec.bench.checkpoints import SMALL, make_checkpoint, make_variant
from flowspec.model.arithmetic import build
from flowspec.model.arithmetic.packed import GROUP, Q4_0, Levels, groups_of
from flowspec.model.arithmetic.packed import packed as panels_of
from flowspec.model.arithmetic.plain import rounded_groups
from flowspec.model.files import ModelFiles
from flowspec.model.kernels import kernels_of, packing_of
from flowspec.model.pieces import Span
from flowspec.model.quantised import (
    DIGIT,
    LINEARS,
    Int4Linear,
    PanelInt4Linear,
    QnnpackInt8Linear,
    QuantisedLinear,
    quantise,
)
from flowspec.model.reference import Reference
from flowspec.model.slice import Slice
from flowspec.runtime.loading import slice_memory
from tests.model.slices import CPU, PLAIN_LINEARS, assert_faithful, packed_layer
from tests.nightly import nightly

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
@given(rows=st.integers(1, 20), inputs=st.sampled_from([32, 75, 688]), seed=st.integers(0, 9))
@settings(max_examples=20)
def test_int4_gives_the_same_bits_with_and_without_what_is_built(rows: int, inputs: int, seed: int) -> None:
    built = build.build()
    torch.manual_seed(seed)
    layer = packed_layer(torch.randn(40, inputs), PanelInt4Linear)
    x = torch.randn(rows, inputs) * torch.tensor([1e-32, 1.0, 1e20])[torch.randint(0, 3, (rows, 1))]
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for allowed in (None, built):
            patch.setattr(build, "_allowed", allowed)
            found.append(layer(x))
    assert torch.equal(*found)


@pytest.mark.arm
def test_rows_are_rounded_by_one_division() -> None:
    """A product with a reciprocal has two roundings: numbers between two levels tell."""
    generator = np.random.default_rng(5)
    groups = (generator.integers(-126, 126, (64, 128, GROUP)) + 0.5) / 127
    groups[:, :, 7] = 1.0
    groups = (groups * generator.random((64, 128, 1))).astype(np.float32)
    levels, steps = rounded_groups(torch.from_numpy(groups.reshape(64, -1)))
    peak = np.abs(groups).max(axis=2, keepdims=True)
    assert np.array_equal(levels.numpy(), np.rint(groups * (np.float32(127) / peak)))
    assert np.array_equal(steps.numpy(), (peak / np.float32(127))[..., 0])


@pytest.mark.arm
@torch.inference_mode()
def test_int4_is_an_exact_product_of_rounded_weights_and_rounded_rows() -> None:
    """No product is lost to saturation, even where all are as large as they can be."""
    torch.manual_seed(2)
    weights, x = torch.randint(-8, 8, (24, 160)).float(), torch.randint(-127, 128, (9, 160)).float()
    weights[:, ::32], x[:, ::32] = -8, 127  # so that each group's scale and step are 1
    weights[0], weights[1], x[0], x[1] = -8, torch.tensor([-8.0, 7.0]).repeat(80), 127, -127
    expected = x.double() @ weights.double().t()
    assert torch.equal(packed_layer(weights, PanelInt4Linear)(x).double(), expected)


@pytest.mark.arm
@given(outputs=st.integers(1, 40), groups=st.integers(1, 4), seed=st.integers(0, 9))
def test_panels_hold_each_weight_and_scale_once(outputs: int, groups: int, seed: int) -> None:
    torch.manual_seed(seed)
    levels = torch.randint(0, 16, (outputs, groups, GROUP), dtype=torch.uint8)
    scales = torch.randn(outputs, groups).half()
    panels = panels_of(Q4_0, Levels(levels=levels, scales=scales))
    assert panels.numel() == Int4Linear.bytes_of(groups * GROUP, outputs)
    found_levels, found_scales, _ = groups_of(Q4_0, panels)
    assert torch.equal(found_levels[:outputs], levels.short() - 8)
    assert torch.equal(found_scales[:outputs, :, 0], scales.float())
    assert not found_levels[outputs:].any()
    assert not found_scales[outputs:].any()


def test_int4_takes_the_scale_by_which_a_group_loses_least() -> None:
    """Beside the one scale of Q4_0's usual rounding, by which the largest weight falls on level -8."""
    torch.manual_seed(4)
    groups = torch.randn(4096, GROUP)
    largest = groups.gather(1, groups.abs().argmax(dim=1, keepdim=True))
    usual = (groups / (largest / -8)).round().clamp(-8, 7) * (largest / -8)
    found = Int4Linear.widened(Int4Linear.rounded(groups), GROUP)
    lost = (found - groups).square().sum(dim=1)
    usually = (usual - groups).square().sum(dim=1)
    assert (lost < 1.2 * usually).all(), "but for what rounding the scale itself costs"
    assert (lost.sum() / groups.square().sum()).sqrt() < 0.084, "the usual one loses .086"


@pytest.mark.arm
@torch.inference_mode()
def test_rows_of_zeros_and_of_no_numbers() -> None:
    for linear in [*int8_kernels(), *kernels("int4")]:
        _, layer = packed(linear, 64, 16, has_bias=False)
        assert torch.equal(layer(torch.zeros(3, 64)), torch.zeros(3, 16))
        assert layer(torch.zeros(0, 64)).shape == (0, 16)
        broken = torch.ones(2, 64)
        broken[1, 3] = float("nan")
        found = layer(broken)
        assert torch.isfinite(found[0]).all()
        assert not torch.isfinite(found[1]).any(), "what overflowed must show, not turn into numbers"


@pytest.mark.parametrize("kind", LINEARS)
@pytest.mark.parametrize("variant", ["qwen2", "gemma3", *nightly([], ["olmoe"]), "qwen3-moe-fused"])
def test_slices_are_faithful_to_the_quantised_model(kind: str, variant: str, tmp_path: Path) -> None:
    assert_faithful(make_variant(tmp_path, variant), kind)


@pytest.mark.parametrize("kind", LINEARS)
@pytest.mark.parametrize("variant", ["llama-tied", "olmoe", "qwen3-moe"])
def test_slices_take_the_memory_that_was_foretold(kind: str, variant: str, tmp_path: Path) -> None:
    files = ModelFiles(str(make_variant(tmp_path, variant)))
    count = files.config().num_hidden_layers
    for first, end in ((0, count), (0, 2), (2, count)):
        span = Span(first=first, end=end, count=count)
        foretold = slice_memory(files, span, kind, 100).weight_bytes
        assert Slice.load(files, span, kind, CPU).weight_bytes == foretold
    assert foretold < slice_memory(files, span, "bfloat16", 100).weight_bytes


def test_a_model_whose_widths_are_no_whole_groups_is_packed_too(tmp_path: Path) -> None:
    """As the bundled middle model, with layers of 688 inputs."""
    assert_faithful(make_checkpoint(tmp_path, "llama", {**SMALL, "intermediate_size": 48}), "int4")


# ------------------------------------------------------------------------------------------ the reference


@pytest.mark.parametrize("dtype", PLAIN_LINEARS)
def test_widened_weights_are_what_a_kernel_multiplies_by(dtype: str) -> None:
    kind = PLAIN_LINEARS[dtype]
    torch.manual_seed(1)
    weight = torch.randn(50, 96)
    layer = torch.nn.Linear(96, 50, bias=False)
    quantise(layer, weight, kind)
    with torch.inference_mode():
        found = layer(torch.eye(96)).T
    values = kind.widened(kind.rounded(weight), 96)
    assert values.shape == weight.shape
    torch.testing.assert_close(found, values, rtol=2**-20, atol=1e-6)
    assert (values - weight).abs().max() < {"int8": 0.02, "int4": 0.35}[dtype], "and that is near the weight"


@pytest.mark.parametrize(("dtype", "held"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)])
def test_weights_of_sixteen_bits_are_rounded_and_nothing_else(
    dtype: str, held: torch.dtype, tmp_path: Path
) -> None:
    files = ModelFiles(str(make_variant(tmp_path, "llama-grouped")))
    plain, rounded = (Reference(files, each)._model.state_dict() for each in ("float32", dtype))
    for name, values in plain.items():
        assert torch.equal(rounded[name], values.to(held).float()), name


@pytest.mark.parametrize("dtype", PLAIN_LINEARS)
@pytest.mark.parametrize("variant", ["llama-tied", "olmoe"])
def test_of_packed_weights_matrices_are_rounded_and_the_embedding_is_not(
    variant: str, dtype: str, tmp_path: Path
) -> None:
    files = ModelFiles(str(make_variant(tmp_path, variant)))
    plain, rounded = (Reference(files, each)._model.state_dict() for each in ("bfloat16", dtype))
    for name, values in plain.items():
        is_packed = "_proj" in name or name == "lm_head.weight"
        assert torch.equal(rounded[name], values) != is_packed, name


def test_rounding_what_layers_compute_moves_logits_a_little_and_ends(tmp_path: Path) -> None:
    reference = Reference(ModelFiles(str(make_variant(tmp_path, "llama-grouped"))), "float32")
    prompt, answer = tuple(range(3, 20)), list(range(40, 60))

    def logits() -> torch.Tensor:
        return torch.from_numpy(np.stack(reference.forced_logits(prompt, answer)))

    before = logits()
    with reference.rounding_to("bfloat16"):
        coarse = (logits() - before).abs().max()
    with reference.rounding_to("float16"):
        fine = (logits() - before).abs().max()
    assert 0 < 4 * fine < coarse < before.std()
    with reference.rounding_to("float32"):
        assert torch.equal(logits(), before)
    assert torch.equal(logits(), before)
