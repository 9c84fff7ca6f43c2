"""The packed layers of `quantised.py` on CUDA: the same rounded weights, multiplied by torch's kernels for GPUs.

*int8*: the digits are rows of one product of integers again (`torch._int_mm`). Sums of integers do not depend on their order, so a GPU computes
what a CPU computes, bit for bit. *int4*: torch's tinygemm kernel in bfloat16, on GPUs of compute capability 8.0 and newer (from the Orins on).

No GPU was at hand when this was written. The int8 layer was tested with the same operator on CPUs, int4's layout with a stand-in for the kernel. So
what a GPU and its torch make of a small product is compared with the CPU's before a model is loaded, and refused if it differs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from flowspec.errors import InputError
from flowspec.model.quantised import GROUP, LINEARS, Int4Linear, Int8Linear, QuantisedLinear, Rounded, pack

INTEGER_BLOCK = 8
"""`torch._int_mm` takes inputs and outputs in multiples of so many on GPUs,"""
INTEGER_ROWS_MIN = 32
"""and more than 16 rows."""
INT4_OUTPUTS = 8
"""tinygemm takes outputs in blocks of so many,"""
INT4_TILES = 2
"""and inputs in so many tiles of 16: in groups of 32, as they are rounded."""
INT4_CAPABILITY = (8, 0)
CHECK_INPUTS, CHECK_OUTPUTS, CHECK_ROWS = 256, 64, (33, 1, 7)
TOLERANCE = 0.02
"""Largest norm of a difference that is no fault, as a share of the product's: bfloat16 rounds weights and results by up to 0.4%."""


class CudaInt8Linear(Int8Linear):
    """See the module."""

    def pack(self, rounded: Rounded) -> None:
        more = (0, -self.in_features % INTEGER_BLOCK, 0, -self.out_features % INTEGER_BLOCK)
        self._levels = F.pad(rounded["levels"], more)  # [out, in]
        self._unit = rounded["scales"]

    def _products(self, digits: torch.Tensor) -> torch.Tensor:
        rows = -(-max(len(digits), INTEGER_ROWS_MIN) // INTEGER_BLOCK) * INTEGER_BLOCK
        padded = digits.new_zeros((rows, self._levels.shape[1]), dtype=torch.int8)
        padded[: len(digits), : self.in_features] = digits[:, :-2]
        sums: torch.Tensor = torch._int_mm(padded, self._levels.t())  # [rows, out] int32
        return sums[: len(digits), : self.out_features].float().mul_(self._unit)


class CudaInt4Linear(Int4Linear):
    """See the module."""

    def pack(self, rounded: Rounded) -> None:
        more = (0, 0, 0, -self.out_features % INT4_OUTPUTS)
        pairs = F.pad(rounded["levels"], more)
        swapped = pairs << 4 | pairs >> 4  # this kernel wants the first of two inputs in the high bits
        self._packed = torch._convert_weight_to_int4pack(swapped, INT4_TILES)
        scales, zeros = F.pad(rounded["scales"], more), F.pad(rounded["zeros"], more)
        self._scales = torch.stack([scales, zeros], dim=2).transpose(0, 1).contiguous()  # [groups, out, 2]

    def _products(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch._weight_int4pack_mm(rows, self._packed, GROUP, self._scales)
        return found


CUDA_LINEARS: dict[str, type[QuantisedLinear]] = {"int8": CudaInt8Linear, "int4": CudaInt4Linear}


def quantised_for(dtype: str, device: torch.device) -> type[QuantisedLinear]:
    """The packed layer of a quantised precision on a device.

    Raises `InputError` for a device that cannot compute it, or computes something else.
    """
    if device.type == "cpu":
        return LINEARS[dtype]
    if device.type != "cuda":
        raise InputError(f"{dtype} runs on CPUs and CUDA, not on {device.type}; use --dtype bfloat16")
    if dtype == "int4" and torch.cuda.get_device_capability(device) < INT4_CAPABILITY:
        raise InputError(
            f"int4 needs a GPU of compute capability 8.0 (an Orin or newer); use --dtype int8, or --device cpu on {device}'s daemon"
        )
    fault = fault_of(dtype, CUDA_LINEARS[dtype], device)
    if fault:
        raise InputError(f"{dtype} does not run on {device} with torch {torch.__version__}: {fault}; use --dtype float16, or --device cpu")
    return CUDA_LINEARS[dtype]


@torch.inference_mode()
def fault_of(dtype: str, kind: type[QuantisedLinear], device: torch.device) -> str:
    """What is wrong with a small product of packed layers of `kind` on a device, or nothing."""
    values = torch.Generator().manual_seed(1)
    weight = torch.randn((CHECK_OUTPUTS, CHECK_INPUTS), generator=values)
    rows = torch.randn((CHECK_ROWS[0], CHECK_INPUTS), generator=values)
    rounded = LINEARS[dtype].rounded(weight)
    expected = _packed_layer(LINEARS[dtype], rounded)(rows)
    try:
        layer = _packed_layer(kind, {name: part.to(device) for name, part in rounded.items()})
        found, *parts = [layer(rows[:count].to(device)).cpu() for count in CHECK_ROWS]
    except (RuntimeError, NotImplementedError) as error:  # how torch says that it has no kernel for a device
        return str(error).partition("\n")[0]
    if not (found - expected).norm() <= TOLERANCE * expected.norm():
        return "it computes something else than a CPU"
    if any(not torch.equal(part, found[: len(part)]) for part in parts):
        return "its rows depend on the rows beside them"
    return ""


def _packed_layer(kind: type[QuantisedLinear], rounded: Rounded) -> nn.Linear:
    layer = nn.Linear(CHECK_INPUTS, CHECK_OUTPUTS, bias=False)
    pack(layer, rounded, kind)
    return layer
