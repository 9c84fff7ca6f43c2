"""Packed weights: the bits of a row whatever runs with it, and slices that follow the reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowspec.model.arithmetic.arrays import narrowed
from flowspec.model.arithmetic.packed import GROUP
from flowspec.model.arithmetic.plain import levels
from flowspec.model.files import ModelFiles
from flowspec.model.reference import Reference
from flowspec.model.rounding import ROUNDINGS
from flowspec.model.weights import Span
from flowspec.runtime.loading import slice_memory
from tests.checkpoints import SMALL, make_checkpoint
from tests.model.functions import multiplied, rounded_matrix
from tests.model.slices import assert_faithful, load_foretold
from tests.nightly import nightly


@given(
    kind=st.sampled_from([*ROUNDINGS]),
    rows=st.integers(1, 45),
    shape=st.sampled_from([(32, 32), (32, 96), (1000, 512), (48, 4096)]),
    seed=st.integers(0, 9),
    size=st.sampled_from([1e-6, 1.0, 1e4]),
)
def test_a_row_does_not_depend_on_the_rows_beside_it(
    kind: str, rows: int, shape: tuple[int, int], seed: int, size: float
) -> None:
    generator = np.random.default_rng(seed)
    matrix = rounded_matrix(kind, narrowed(generator.standard_normal(shape) * 0.02, "bfloat16"))
    x = generator.standard_normal((rows, shape[1])).astype(np.float32) * np.float32(size)
    x[0] *= 100  # float32, so that no rounding hides a difference
    whole = multiplied(x, matrix)
    for count in {1, 2, rows // 2 or 1, rows}:
        first = int(generator.integers(0, max(1, rows - count + 1)))
        assert np.array_equal(multiplied(x[first : first + count], matrix), whole[first : first + count])


@pytest.mark.arm
def test_rows_are_rounded_by_one_division() -> None:
    """A product with a reciprocal has two roundings: numbers between two levels tell."""
    generator = np.random.default_rng(5)
    groups = (generator.integers(-126, 126, (64, 128, GROUP)) + 0.5) / 127
    groups[:, :, 7] = 1.0
    groups = (groups * generator.random((64, 128, 1))).astype(np.float32)
    found, steps = levels(groups)
    peak = np.abs(groups).max(axis=2, keepdims=True)
    assert np.array_equal(found, np.rint(groups * (np.float32(127) / peak)))
    assert np.array_equal(steps, peak / np.float32(127))


@pytest.mark.arm
@pytest.mark.parametrize(("kind", "least", "most"), [("int8", -127, 127), ("int4", -8, 7)])
def test_a_product_is_an_exact_one_of_rounded_weights_and_rounded_rows(
    kind: str, least: int, most: int
) -> None:
    """No product is lost to saturation, even where all are as large as they can be."""
    generator = np.random.default_rng(2)
    weights = generator.integers(least, most + 1, (24, 160)).astype(np.float32)
    x = generator.integers(-127, 128, (9, 160)).astype(np.float32)
    weights[:, ::32], x[:, ::32] = least, 127  # so that each group's scale and step are 1
    weights[0], weights[1], x[0], x[1] = least, np.tile([least, most], 80), 127, -127
    exact = x.astype(np.float64) @ weights.astype(np.float64).T
    assert np.array_equal(multiplied(x, rounded_matrix(kind, weights)), exact)
    assert multiplied(x[:0], rounded_matrix(kind, weights)).shape == (0, 24)


def test_int4_takes_the_scale_by_which_a_group_loses_least() -> None:
    """Beside the one scale of Q4_0's usual rounding, by which the largest weight falls on level -8."""
    groups = np.random.default_rng(4).standard_normal((4096, GROUP), np.float32)
    largest = np.take_along_axis(groups, np.abs(groups).argmax(axis=1)[:, None], 1)
    usual = np.rint(groups / (largest / -8)).clip(-8, 7) * (largest / -8)
    rounding = ROUNDINGS["int4"]
    found = rounding.widen(rounding.round(groups), *groups.shape)
    lost, usually = (np.square(each - groups).sum(axis=1) for each in (found, usual))
    assert (lost < 1.2 * usually).all(), "but for what rounding the scale itself costs"
    assert np.sqrt(lost.sum() / np.square(groups).sum()) < 0.084, "the usual one loses .086"


@pytest.mark.parametrize("kind", ROUNDINGS)
@pytest.mark.parametrize("name", ["qwen2", "qwen3-moe-fused", *nightly([], ["gemma3", "olmoe"])])
def test_slices_are_faithful_to_the_quantised_model(
    kind: str, name: str, variant: Callable[[str], Path]
) -> None:
    assert_faithful(variant(name), kind)


@pytest.mark.parametrize("kind", ROUNDINGS)
@pytest.mark.parametrize("name", ["llama-tied", "qwen3-moe"])
def test_slices_take_the_memory_that_was_foretold(
    kind: str, name: str, variant: Callable[[str], Path]
) -> None:
    files = ModelFiles(str(variant(name)))
    count = len(files.spec.layers)
    for first, end in ((0, count), (0, 2), (2, count)):
        span = Span(first=first, end=end, count=count)
        taken = load_foretold(files, span, kind).weight_bytes
    assert taken < slice_memory(files, span, "bfloat16", 100).weight_bytes


def test_a_model_whose_widths_are_no_whole_groups_is_packed_too(tmp_path: Path) -> None:
    """As the bundled middle model, with layers of 688 inputs."""
    assert_faithful(make_checkpoint(tmp_path, "llama", {**SMALL, "intermediate_size": 48}), "int4")


# ------------------------------------------------------------------------------------------ the reference


@pytest.mark.parametrize("dtype", ROUNDINGS)
def test_widened_weights_are_what_a_kernel_multiplies_by(dtype: str) -> None:
    rounding, weights = ROUNDINGS[dtype], np.random.default_rng(1).standard_normal((50, 96), np.float32)
    found = multiplied(np.eye(96, dtype=np.float32), rounded_matrix(dtype, weights)).T
    values = rounding.widen(rounding.round(weights), *weights.shape)
    assert values.shape == weights.shape
    np.testing.assert_allclose(found, values, rtol=2**-20, atol=1e-6)
    assert np.abs(values - weights).max() < {"int8": 0.02, "int4": 0.35}[dtype], "and that is near the weight"


@pytest.mark.parametrize("dtype", ROUNDINGS)
@pytest.mark.parametrize("name", ["llama-tied", "olmoe"])
def test_of_packed_weights_matrices_are_rounded_and_the_embedding_is_not(
    name: str, dtype: str, variant: Callable[[str], Path]
) -> None:
    files = ModelFiles(str(variant(name)))
    plain, rounded = (Reference(files, each).model.state_dict() for each in ("bfloat16", dtype))
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
