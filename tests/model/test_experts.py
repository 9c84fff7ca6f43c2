"""A mixture's experts in one call: the bits of each expert, row and sum alone."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowspec.model.arithmetic import build, compiled, plain
from flowspec.model.arithmetic.packed import Q4_0
from flowspec.model.experts import row_experts
from flowspec.model.kernel_checks import linear_fault
from flowspec.model.kernels import DIGITS, Kernel
from flowspec.model.products import Product, filled, lanes16, pairs16
from flowspec.model.quantised import PanelInt4Linear, PlainInt8Linear, quantise
from tests.model.slices import CPU

pytestmark = pytest.mark.arm

EXPERTS, CHOSEN, WIDTH, NEURONS = 7, 3, 80, 48
KERNELS = [(filled, torch.float32), (lanes16, torch.float32), (lanes16, torch.bfloat16)]


def matrices(generator: torch.Generator, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Of gate and up, and of down, each `[experts, out, in]`."""
    shapes = (EXPERTS, 2 * NEURONS, WIDTH), (EXPERTS, WIDTH, NEURONS)
    gate_up, down = (0.2 * torch.randn(shape, generator=generator) for shape in shapes)
    return gate_up.to(dtype), down.to(dtype)


def routed(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, and what each row's experts are and how much they count; one expert has no row."""
    chosen = torch.stack([torch.randperm(EXPERTS - 1, generator=generator)[:CHOSEN] for _ in range(rows)])
    hidden = torch.randn((rows, WIDTH), generator=generator)
    return hidden, chosen, torch.rand((rows, CHOSEN), generator=generator)


def activated(gate: torch.Tensor) -> torch.Tensor:
    return plain.FUNCTIONS["silu"](gate.float()).to(gate.dtype)


def one_by_one(
    product: Product,
    gate_up: Sequence[Any],
    down: Sequence[Any],
    biases: tuple[Any, Any],
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """The definition: one row, one expert after another, in ascending order."""
    hidden, chosen, shares = given
    expected = torch.zeros_like(hidden)
    for row, places in enumerate(chosen.argsort(dim=1)):
        for place in places:
            expert = chosen[row, place]
            of_gate_up, of_down = (None if each is None else each[expert] for each in biases)
            gate, up = product(hidden[row, None], gate_up[expert], of_gate_up).chunk(2, dim=-1)
            made = product(activated(gate) * up, down[expert], of_down)
            expected[row] += (made * shares[row, place])[0]
    return expected


@pytest.mark.parametrize("product_dtype", [*KERNELS, (pairs16, torch.bfloat16)])
@pytest.mark.parametrize(("rows", "group_rows"), [(1, 256), (5, 7), (33, 256)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_experts_in_one_call_are_experts_one_by_one(
    product_dtype: tuple[Product, torch.dtype],
    rows: int,
    group_rows: int,
    has_bias: bool,
    library: compiled.Library,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (product, dtype), generator = product_dtype, torch.Generator().manual_seed(rows)
    monkeypatch.setattr("flowspec.model.experts.GROUP_ROWS", group_rows)
    if product is pairs16 and not library.has_pairs:
        pytest.skip("this processor does not multiply pairs of bfloat16")
    gate_up, down = matrices(generator, dtype)
    biases: tuple[Any, Any] = (None, None)
    experts = SimpleNamespace(
        gate_up_proj=gate_up, down_proj=down, product=product, act_fn=activated, limit=None
    )
    if has_bias:
        shapes = (EXPERTS, 2 * NEURONS), (EXPERTS, WIDTH)
        biases = tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
        experts.gate_up_proj_bias, experts.down_proj_bias = biases
    hidden, chosen, shares = routed(rows, generator)
    given = hidden.to(dtype), chosen, shares.to(dtype)
    assert torch.equal(row_experts(experts, *given), one_by_one(product, gate_up, down, biases, given))


@pytest.mark.parametrize("rows", [1, 19])
def test_packed_experts_have_the_same_bits_without_a_compiler(
    rows: int, library: compiled.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(rows)
    layers = []
    for stack in matrices(generator, torch.float32):
        layers.append(torch.nn.ModuleList())
        for matrix in stack:
            layer = torch.nn.Linear(matrix.shape[1], matrix.shape[0], bias=False)
            quantise(layer, matrix, PanelInt4Linear)
            layers[-1].append(layer)
    gate_up, down = layers
    experts = SimpleNamespace(gate_up_proj=gate_up, down_proj=down, act_fn=activated, limit=None)
    hidden, chosen, shares = routed(rows, generator)
    given = hidden.bfloat16(), chosen, shares.bfloat16()

    def defined(x: torch.Tensor, layer: Any, _bias: None) -> torch.Tensor:
        return plain.packed_product(x.float(), Q4_0, layer._panels, layer.out_features).to(x.dtype)

    expected = one_by_one(defined, list(gate_up), list(down), (None, None), given)
    assert compiled.library() is library
    assert torch.equal(row_experts(experts, *given), expected)
    monkeypatch.setattr(build, "_allowed", None)
    assert torch.equal(row_experts(experts, *given), expected)


class OfAnotherLayer(PlainInt8Linear):
    """Right one by one, and with one matrix in a call."""

    @classmethod
    def each(cls, layers: Sequence[Any], counts: Sequence[int], rows: torch.Tensor) -> torch.Tensor:
        return super().each(layers[::-1], counts, rows)


def test_a_kernel_that_mixes_up_matrices_is_found() -> None:
    fault = linear_fault("int8", Kernel(name="broken", linear=OfAnotherLayer, arithmetic=DIGITS), CPU)
    assert fault == "computes several matrices of 64 x 48 otherwise with 1 threads"


@pytest.mark.parametrize("matrix", [-1, EXPERTS])
def test_no_matrix_beyond_a_stack_is_read(matrix: int, library: compiled.Library) -> None:
    rows = torch.zeros((2, WIDTH))
    gate_up, _ = matrices(torch.Generator(), torch.float32)
    with pytest.raises(AssertionError):
        library.linear_each(rows, gate_up, [(matrix, 2)])
    with pytest.raises(AssertionError):
        library.linear_each(rows, gate_up, [(0, 1)])
    assert library.linear_each(rows, gate_up, [(0, 1), (1, 1)]).shape == (2, 2 * NEURONS)
