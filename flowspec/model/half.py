"""Linear layers with weights of 16 bits on processors that have no instructions for such numbers, or where
torch's are wrong.

On x86 without AVX-512 torch multiplies bfloat16 row by row: sixteen rows take sixteen times as long as one,
and its results depend on their number. FBGEMM's kernel for float16 weights widens them in registers and
multiplies and sums in float32, at the speed of float32 for many rows and of memory for few. bfloat16 weights
are taken to float16 without a rounding: multiplied by the power of two that brings the largest just below
float16's, all down to 2^-31 of it are exact there, and those below move by less than 2^-38 of it. Inputs are
widened exactly; the sum is multiplied back.

FBGEMM runs rows in groups of up to 6. Groups of 3 to 6 sum a row alike, one or two rows that are left over
are summed in another order. So rows of zeros fill up to a multiple of 3, which leaves none over, and a row's
result does not depend on the others. This is tried before it is used (`kernels.py`), not guaranteed.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from flowspec.model.products import float_product
from flowspec.model.quantised import BLOCK_ROWS, QuantisedLinear, Rounded, quantised_engine

INPUT_BLOCK = 512
OUTPUT_BLOCK = 16
"""FBGEMM's packed weights are whole blocks of these sizes."""
ROWS = 3
PADDING_MAX = 1 / 32
"""Of a layer's weights: one whose packed form would take more than this on top is left as it is."""
PACKED_AT_ONCE = 4096
"""Outputs: packing makes a copy of so many in float32."""
EXPONENT_MAX = 15
"""Weights are scaled to below 2 to this."""


class FbgemmHalfLinear(QuantisedLinear):
    """By FBGEMM; see the module. Takes weights in bfloat16 or float16."""

    copies_tied = False

    @staticmethod
    def takes(shape: torch.Size) -> bool:
        if len(shape) != 2:
            return False
        outputs, inputs = shape
        return FbgemmHalfLinear.bytes_of(inputs, outputs) <= (1 + PADDING_MAX) * 2 * shape.numel()

    @staticmethod
    def rounded(weight: torch.Tensor) -> Rounded:
        """`weights` as they are."""
        return {"weights": weight}

    def pack(self, rounded: Rounded) -> None:
        weight = rounded["weights"]
        largest = weight.abs().max().item()
        self._scale = 2.0 ** (EXPONENT_MAX - math.frexp(largest)[1]) if 0 < largest < math.inf else 1.0
        blocks = (
            weight[first : first + PACKED_AT_ONCE] for first in range(0, self.out_features, PACKED_AT_ONCE)
        )
        with quantised_engine("fbgemm"):
            self._packed = [
                torch.ops.quantized.linear_prepack_fp16(block.float() * self._scale, None) for block in blocks
            ]

    @staticmethod
    def bytes_of(inputs: int, outputs: int) -> int:
        return 2 * (-(-inputs // INPUT_BLOCK) * INPUT_BLOCK) * (-(-outputs // OUTPUT_BLOCK) * OUTPUT_BLOCK)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = input.reshape(-1, self.in_features).float()
        count = len(rows)
        filled = F.pad(rows, (0, 0, 0, -count % ROWS))
        parts = [torch.ops.quantized.linear_dynamic_fp16(filled, packed)[:count] for packed in self._packed]
        found = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)) / self._scale
        if self.bias is not None:
            found += self.bias
        return found.to(input.dtype).view(*input.shape[:-1], self.out_features)


class PlainHalfLinear(QuantisedLinear):
    """The weights of a block of outputs at a time, widened to float32: slow, but right wherever torch
    multiplies float32."""

    copies_tied = False

    @staticmethod
    def rounded(weight: torch.Tensor) -> Rounded:
        """`weights` as they are."""
        return {"weights": weight}

    def pack(self, rounded: Rounded) -> None:
        self._weights = rounded["weights"]

    @staticmethod
    def bytes_of(inputs: int, outputs: int) -> int:
        return 2 * inputs * outputs

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = input.reshape(-1, self.in_features).float()
        found = rows.new_empty((len(rows), self.out_features))
        for first in range(0, self.out_features, BLOCK_ROWS):
            block = slice(first, first + BLOCK_ROWS)
            found[:, block] = float_product(rows, self._weights[block].float())
        if self.bias is not None:
            found += self.bias
        return found.to(input.dtype).view(*input.shape[:-1], self.out_features)


def has_instructions(dtype: str) -> bool:
    """Whether this x86 processor has instructions for bfloat16 or float16, as torch's oneDNN sees it; True
    where it cannot tell."""
    name = {"bfloat16": "_is_mkldnn_bf16_supported", "float16": "_is_mkldnn_fp16_supported"}[dtype]
    supported = getattr(torch.ops.mkldnn, name, None)
    return supported is None or bool(supported())


def has_products(dtype: str) -> bool:
    """Whether this x86 processor multiplies numbers of 16 bits and adds up in 32 in one step, and torch's
    oneDNN makes use of it; False where torch cannot tell."""
    has_pairs = dtype == "bfloat16" and has_instructions(dtype) and _has("_is_avx512_bf16_supported")
    return has_tiles(dtype) or has_pairs


def has_tiles(dtype: str) -> bool:
    """Whether it does so for whole tiles of a matrix (AMX), of which torch's kernels make use; False where
    torch cannot tell."""
    name = {"bfloat16": "_is_amx_tile_supported", "float16": "_is_amx_fp16_supported"}[dtype]
    return has_instructions(dtype) and _has(name)


def _has(name: str) -> bool:
    asked = getattr(torch.cpu, name, None)
    return asked is not None and bool(asked())
