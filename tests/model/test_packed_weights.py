"""Packed weights: the bits of a row whatever runs with it, and slices that follow the reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowspec.bench.checkpoints import SMALL, make_checkpoint
from flowspec.model.arithmetic.packed import GROUP
from flowspec.model.arithmetic.plain import rounded_groups
from flowspec.model.files import ModelFiles
from flowspec.model.pieces import Span
from flowspec.model.quantised import (
    DIGIT,
    LINEARS,
    Int4Linear,
    PanelInt4Linear,
    PanelInt8Linear,
    quantise,
)
from flowspec.model.reference import Reference
from flowspec.runtime.loading import slice_memory
from tests.model.slices import PLAIN_LINEARS, assert_faithful, load_foretold, packed_layer
from tests.nightly import nightly


@torch.inference_mode()
@given(
    kind=st.sampled_from([*LINEARS]),
    rows=st.integers(1, 45),
    shape=st.sampled_from([(32, 32), (32, 96), (1000, 512), (48, 4096)]),
    seed=st.integers(0, 9),
    size=st.sampled_from([1e-6, 1.0, 1e4]),
)
def test_a_row_does_not_depend_on_the_rows_beside_it(
    kind: str, rows: int, shape: tuple[int, int], seed: int, size: float
) -> None:
    torch.manual_seed(seed)
    layer = packed_layer((torch.randn(shape) * 0.02).bfloat16(), PLAIN_LINEARS[kind])
    x = torch.randn(rows, shape[1]) * size  # float32, so that no rounding hides a difference
    x[0] *= 100
    whole = layer(x)
    for count in {1, 2, rows // 2 or 1, rows}:
        first = int(torch.randint(0, max(1, rows - count + 1), ()))
        assert torch.equal(layer(x[first : first + count]), whole[first : first + count])


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
    layer = packed_layer(weights, PanelInt8Linear)
    assert torch.equal(layer(x).double(), x.double() @ weights.double().t())
    assert (layer(finer).double() - expected).abs().max() < 1e-6 * expected.abs().max(), (
        "the second digit is exact, too"
    )


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
    for linear in PLAIN_LINEARS.values():
        layer = packed_layer(torch.randn(16, 64), linear)
        assert torch.equal(layer(torch.zeros(3, 64)), torch.zeros(3, 16))
        assert layer(torch.zeros(0, 64)).shape == (0, 16)
        broken = torch.ones(2, 64)
        broken[1, 3] = float("nan")
        found = layer(broken)
        assert torch.isfinite(found[0]).all()
        assert not torch.isfinite(found[1]).any(), "what overflowed must show, not turn into numbers"


@pytest.mark.parametrize("kind", LINEARS)
@pytest.mark.parametrize("name", ["qwen2", "qwen3-moe-fused", *nightly([], ["gemma3", "olmoe"])])
def test_slices_are_faithful_to_the_quantised_model(
    kind: str, name: str, variant: Callable[[str], Path]
) -> None:
    assert_faithful(variant(name), kind)


@pytest.mark.parametrize("kind", LINEARS)
@pytest.mark.parametrize("name", ["llama-tied", "qwen3-moe"])
def test_slices_take_the_memory_that_was_foretold(
    kind: str, name: str, variant: Callable[[str], Path]
) -> None:
    files = ModelFiles(str(variant(name)))
    count = files.config().num_hidden_layers
    for first, end in ((0, count), (0, 2), (2, count)):
        span = Span(first=first, end=end, count=count)
        taken = load_foretold(files, span, kind).weight_bytes
    assert taken < slice_memory(files, span, "bfloat16", 100).weight_bytes


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


@pytest.mark.parametrize("dtype", PLAIN_LINEARS)
@pytest.mark.parametrize("name", ["llama-tied", "olmoe"])
def test_of_packed_weights_matrices_are_rounded_and_the_embedding_is_not(
    name: str, dtype: str, variant: Callable[[str], Path]
) -> None:
    files = ModelFiles(str(variant(name)))
    plain, rounded = (Reference(files, each)._model.state_dict() for each in ("bfloat16", dtype))
    for weight, values in plain.items():
        is_packed = "_proj" in weight or weight == "lm_head.weight"
        assert torch.equal(rounded[weight], values) != is_packed, weight


def test_rounding_what_layers_compute_moves_logits_a_little_and_ends(variant: Callable[[str], Path]) -> None:
    reference = Reference(ModelFiles(str(variant("llama-grouped"))), "float32")
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
