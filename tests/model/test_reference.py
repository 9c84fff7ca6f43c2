"""The plain model through transformers, with weights as a precision holds them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from flowspec.bench.checkpoints import make_variant
from flowspec.model.files import ModelFiles
from flowspec.model.quantised import quantise
from flowspec.model.reference import Reference
from tests.model.slices import PLAIN_LINEARS


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
