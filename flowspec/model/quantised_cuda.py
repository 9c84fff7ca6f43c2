"""The packed layers of `quantised.py` on CUDA: the same rounded weights, multiplied by torch's kernels for
GPUs.

*int8*: the digits are rows of one product of integers again (`torch._int_mm`). Sums of integers do not depend
on their order, so a GPU computes what a CPU computes, bit for bit. *int4*: torch's tinygemm kernel in
bfloat16, on GPUs of compute capability 8.0 and newer (from the Orins on).

The int8 layer is tested with the same operator on CPUs, int4's layout with a stand-in for the kernel. As
every kernel they are tried on the GPU itself before a model is loaded (`kernels.py`); on an H200 both were
right.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from flowspec.model.arithmetic.packed import GROUP
from flowspec.model.quantised import Int4Linear, Int8Linear, Rounded

INTEGER_BLOCK = 8
"""`torch._int_mm` takes inputs and outputs in multiples of so many on GPUs,"""
INTEGER_ROWS_MIN = 32
"""and more than 16 rows."""
INT4_OUTPUTS = 8
"""tinygemm takes outputs in blocks of so many,"""
INT4_TILES = 2
"""and inputs in so many tiles of 16: in groups of 32, as they are rounded."""
INT4_CAPABILITY = (8, 0)


class CudaInt8Linear(Int8Linear):
    def pack(self, rounded: Rounded) -> None:
        more = (0, -self.in_features % INTEGER_BLOCK, 0, -self.out_features % INTEGER_BLOCK)
        self._levels = F.pad(rounded["levels"], more)  # [out, in]
        self._unit = rounded["scales"]

    def _products(self, digits: torch.Tensor) -> torch.Tensor:
        rows = -(-max(len(digits), INTEGER_ROWS_MIN) // INTEGER_BLOCK) * INTEGER_BLOCK
        padded = digits.new_zeros((rows, self._levels.shape[1]), dtype=torch.int8)
        padded[: len(digits), : self.in_features] = digits
        sums: torch.Tensor = torch._int_mm(padded, self._levels.t())  # [rows, out] int32
        return sums[: len(digits), : self.out_features].float().mul_(self._unit)


class CudaInt4Linear(Int4Linear):
    def pack(self, rounded: Rounded) -> None:
        more = (0, 0, 0, -self.out_features % INT4_OUTPUTS)
        pairs = F.pad(rounded["levels"], more)
        swapped = pairs << 4 | pairs >> 4  # this kernel wants the first of two inputs in the high bits
        self._packed = torch._convert_weight_to_int4pack(swapped, INT4_TILES)
        scales = F.pad(rounded["scales"], more).bfloat16()  # which has all their digits
        zeros = torch.zeros_like(scales)
        self._scales = torch.stack([scales, zeros], dim=2).transpose(0, 1).contiguous()  # [groups, out, 2]

    def _products(self, rows: torch.Tensor) -> torch.Tensor:
        filled = F.pad(rows.bfloat16(), (0, -self.in_features % GROUP))
        found: torch.Tensor = torch._weight_int4pack_mm(filled, self._packed, GROUP, self._scales)
        return found
