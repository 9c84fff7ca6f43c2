"""Linear layers with packed weights of 8 or 4 bits: fast for few rows, and one arithmetic for a row whatever
rows run beside it.

Each precision has one way of rounding weights (`rounding.py`).

*int8*: weights are rounded per output. An input row is scaled by its largest value and written as two
digits, each within -63..63, the second in units of 1/126 of the first's. Both digits are rows of one product
of integers, which has no rounding: a row's result depends neither on its neighbours nor on how a kernel
blocks its loops. Seven bits a digit because AVX2 adds pairs of 8 by 8 bit products in 16 bits, where eight
bits would saturate. Two digits keep 13 bits of an input, more than bfloat16 has; with one, inputs beside a
large one would lose most of theirs.

*int4*: weights are rounded per group of 32 inputs. A row is rounded, too, group by group, to levels of 8
bits. A group's products and their sum are integers, and the groups follow one another, so that every
processor computes the same bits (`arithmetic/packed.py`). On GPUs torch's own kernel takes inputs in
bfloat16.

Here for CPUs; `quantised_cuda.py` has the same on GPUs, but for int4 on those that are too old for torch's
kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from flowspec.model.arithmetic import compiled_torch
from flowspec.model.arithmetic.operations import packed_product
from flowspec.model.arithmetic.packed import GROUP, PANEL, Q4_0, Levels, int8_panels, packed
from flowspec.model.bridge import array_of, tensor_of
from flowspec.model.products import float_product
from flowspec.model.rounding import MIDDLE, ROUNDINGS, Rounding

DIGIT = 63
TINY = 1e-30
BLOCK_ROWS = 1024
"""Outputs whose weights are widened at once."""
Rounded = Mapping[str, torch.Tensor]
"""A rounded matrix, as in `rounding`."""


class Packed(nn.Module):
    """A module whose weights are packed, and no parameter."""

    @property
    def packed_sizes(self) -> dict[object, int]:
        """Bytes of what is packed, each by what it is known by where several modules share it."""
        raise NotImplementedError


class QuantisedLinear(Packed, nn.Linear):
    """`y = x W^T + b`, `[..., in]` -> `[..., out]` in the dtype of x, from packed weights.

    Made of a linear layer where it stands (`quantise`), so that those who hold that one need not know.
    """

    rounding: ClassVar[Rounding]

    @classmethod
    def rounded(cls, weight: torch.Tensor) -> Rounded:
        """The parts that `weight` `[rows, in]` is rounded to, each row for itself."""
        found = cls.rounding.round(array_of(weight.cpu()))
        return {name: tensor_of(part).to(weight.device) for name, part in found.items()}

    @classmethod
    def widened(cls, rounded: Rounded, inputs: int) -> torch.Tensor:
        """Rounded weights as numbers, float32 `[rows, inputs]`, for the reference. Kernels must agree with
        it, so none of them uses it."""
        found = cls.rounding.widen({name: array_of(part.cpu()) for name, part in rounded.items()}, inputs)
        return tensor_of(found).to(rounded["levels"].device)

    def pack(self, rounded: Rounded) -> None:
        """Takes this layer's rounded weights; no reference to them is kept."""
        raise NotImplementedError

    @property
    def packed_sizes(self) -> dict[object, int]:
        return {id(self): self.rounding.packed_bytes(self.in_features, self.out_features)}


class Int8Linear(QuantisedLinear):
    """See the module. A kernel's `_products` takes digits."""

    rounding = ROUNDINGS["int8"]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = input.reshape(-1, self.in_features).float()
        count = len(rows)
        peak = rows.abs().amax(dim=1, keepdim=True).clamp_min_(TINY)
        scaled = rows * (DIGIT / peak)
        digits = rows.new_empty((2 * count, self.in_features))
        first = torch.round(scaled, out=digits[:count])
        torch.round(scaled.sub_(first).mul_(2 * DIGIT), out=digits[count:])
        sums = self._products(digits)
        found = sums[count:].mul_(1 / (2 * DIGIT)).add_(sums[:count]).mul_(peak / DIGIT)
        if self.bias is not None:
            found += self.bias
        return found.to(input.dtype).view(*input.shape[:-1], self.out_features)

    def _products(self, digits: torch.Tensor) -> torch.Tensor:
        """`[rows, out]` float32, each output times its scale, from `[rows, in]`."""
        raise NotImplementedError


class PanelInt8Linear(Int8Linear):
    """By the library that was built; there must be one."""

    def pack(self, rounded: Rounded) -> None:
        self._panels = int8_panels(rounded["levels"])
        self._scales = F.pad(rounded["scales"].float(), (0, -self.out_features % PANEL))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        library = compiled_torch.library()
        assert library is not None, "a kernel is used only where it is there"
        rows = input.reshape(-1, self.in_features).float().contiguous()
        found = library.digits(rows, self._panels, self._scales, self.out_features)
        if self.bias is not None:
            found += self.bias
        return found.to(input.dtype).view(*input.shape[:-1], self.out_features)


class Int4Linear(QuantisedLinear):
    """See the module. Inputs that are no whole groups are filled up with zeros."""

    rounding = ROUNDINGS["int4"]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = input.reshape(-1, self.in_features)
        if self.bias is not None:
            rows = rows.float()  # so that results are
        found = self._products(rows)[:, : self.out_features]
        if self.bias is not None:
            found = found + self.bias
        return found.to(input.dtype).reshape(*input.shape[:-1], self.out_features)

    def _products(self, rows: torch.Tensor) -> torch.Tensor:
        """`[rows, out or more]` from `[rows, in]`."""
        raise NotImplementedError


class PanelInt4Linear(Int4Linear):
    """On CPUs."""

    def pack(self, rounded: Rounded) -> None:
        pairs = rounded["levels"]
        levels = torch.stack([pairs & 15, pairs >> 4], dim=2).view(len(pairs), -1, GROUP)
        self._panels = packed(Q4_0, Levels(levels=levels, scales=rounded["scales"]))

    def _products(self, rows: torch.Tensor) -> torch.Tensor:
        return packed_product(rows, Q4_0, self._panels, self.out_features)


class PlainInt4Linear(Int4Linear):
    """In float32, the weights of a block of outputs at a time."""

    def pack(self, rounded: Rounded) -> None:
        self._pairs, self._scales = rounded["levels"], rounded["scales"]

    def _products(self, rows: torch.Tensor) -> torch.Tensor:
        wide = F.pad(rows.float(), (0, -self.in_features % GROUP))
        found = wide.new_empty((len(rows), self.out_features))
        for block in _blocks(self.out_features):
            pairs = self._pairs[block]
            levels = torch.stack([pairs & 15, pairs >> 4], dim=2).view(len(pairs), -1, GROUP).float()
            weights = (levels - MIDDLE) * self._scales[block, :, None].float()  # [out, groups, GROUP]
            found[:, block] = float_product(wide, weights.flatten(1))
        return found


LINEARS: dict[str, type[QuantisedLinear]] = {"int8": Int8Linear, "int4": Int4Linear}
"""How matrices are rounded and what they take, by the name of the precision; `kernels.py` has what multiplies
them."""


def quantise(linear: nn.Linear, weight: torch.Tensor, kind: type[QuantisedLinear]) -> None:
    """Makes a packed layer of `linear`, with the values of `weight` `[out, in]`; its bias stays."""
    pack(linear, kind.rounded(weight), kind)


def pack(linear: nn.Linear, rounded: Rounded, kind: type[QuantisedLinear]) -> None:
    """Makes a packed layer of `linear`, with weights that were rounded before; its bias stays."""
    linear.__class__ = kind
    linear.weight = None  # type: ignore[assignment]
    assert isinstance(linear, QuantisedLinear)
    linear.pack(rounded)


def packed_bytes(modules: Iterable[nn.Module]) -> int:
    """What the packed weights in modules take, shared ones once."""
    sizes: dict[object, int] = {}
    for module in modules:
        for part in module.modules():
            if isinstance(part, Packed):
                sizes |= part.packed_sizes
    return sum(sizes.values())


def _blocks(rows: int) -> Iterator[slice]:
    """Slices of `BLOCK_ROWS` and a rest."""
    return (slice(first, first + BLOCK_ROWS) for first in range(0, rows, BLOCK_ROWS))
