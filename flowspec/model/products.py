"""Products of rows with matrices whose weights stay as they are: one arithmetic for a row, whatever rows run
beside it.

*lanes16* is our own, in C (`arithmetic/canonical.c`): sixteen lanes of fused steps, the same bits on every
processor. *pairs16* is our own, too, for processors with an instruction that multiplies pairs of bfloat16
(AVX512_BF16): sixteen lanes of pairs. *in_blocks* is torch's on GPUs, whose libraries choose a kernel by the
number of rows at every size: seen on an H200, where a float32 row alone has other bits than among 16.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from flowspec.model.arithmetic import compiled_torch

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""`x W^T + b`, `[rows, out]` in the dtype of x `[rows, in]`, from W `[out, in]` of that dtype and b `[out]`
or None."""
BLOCKS = {torch.float32: 32, torch.bfloat16: 64, torch.float16: 64}
"""Rows that a GPU multiplies at once, no more and no fewer. So many take hardly longer than one, by the
published speeds of Orins and of server GPUs: reading the weights takes as long."""


def lanes16(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """By the library that was built; there must be one."""
    library = compiled_torch.library()
    assert library is not None, "a kernel is used only where it is there"
    if bias is None:
        return library.linear(x.contiguous(), weight)
    found = library.linear(x.float().contiguous(), weight)  # rounded once, with the bias
    found += bias
    return found.to(x.dtype)


def pairs16(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Of bfloat16, by the library that was built, which must have it."""
    library = compiled_torch.library()
    assert library is not None, "a kernel is used only where it is there"
    if bias is None:
        return library.pairs(x.contiguous(), weight, x.dtype)
    found = library.pairs(x.contiguous(), weight, torch.float32)  # rounded once, with the bias
    found += bias
    return found.to(x.dtype)


def in_blocks(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """By torch, for always the same number of rows."""
    count, size = len(x), BLOCKS[x.dtype]
    if count <= size:  # in fewer calls
        return F.linear(F.pad(x, (0, 0, 0, size - count)), weight, bias)[:count]
    parts = torch.split(F.pad(x, (0, 0, 0, -count % size)), size)
    return torch.cat([F.linear(part, weight, bias) for part in parts])[:count]


def float_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Of float32, for layers on GPUs that unpack weights themselves."""
    return in_blocks(x, weight, None) if x.device.type != "cpu" else lanes16(x, weight, None)
