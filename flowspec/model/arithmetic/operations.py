"""The canonical arithmetic's operations, each by `canonical.c` where that may be used, else as `plain.py`
defines it.

Tensors may have any dtype that a layer computes in; results have it, too, rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from flowspec.model.arithmetic import compiled, plain
from flowspec.model.arithmetic.packed import Form

LANES = 16
"""Slots whose keys lie side by side in a cache."""


def normal(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Rows over the root of their mean square, in float32: `[..., width]`."""
    library = _library(x)
    wide = x.float().contiguous()
    return plain.normal(wide, eps) if library is None else library.normal(wide, eps)


def function(x: torch.Tensor, name: str) -> torch.Tensor:
    """`silu`, `gelu_tanh` or `tanh`, number by number."""
    library = _library(x)
    wide = x.float().contiguous()
    found = plain.FUNCTIONS[name](wide) if library is None else library.function(wide, name)
    return found.to(x.dtype)


def packed_product(x: torch.Tensor, form: Form, panels: torch.Tensor, outputs: int) -> torch.Tensor:
    """`x W^T`, `[rows, outputs]` float32, from rows `[rows, in]` and the panels of W (`packed.py`)."""
    library = _library(x)
    wide = x.float().contiguous()
    product = plain.packed_product if library is None else library.packed
    return product(wide, form, panels, outputs)


def packed_rows(form: Form, panels: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Rows of a packed matrix as numbers, `[ids, in]` float32, from ids `[ids]` int64."""
    library = _library(panels)
    return (plain.packed_rows if library is None else library.packed_rows)(form, panels, ids)


def levels(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `[rows, width]` as levels, int8, and the step between them for each 32 numbers, float32 `[rows,
    width / 32]`, rounded up."""
    library = _library(x)
    wide = x.float().contiguous()
    return plain.levels(wide) if library is None else library.levels(wide)


@dataclass(slots=True)
class Sight:
    """What each row of a job sees of a cache: `seen` `[rows, high]` bool, `key_positions` `[high]` int32 of
    the slots.

    A row sees at most one slot for each position.
    """

    seen: torch.Tensor
    key_positions: torch.Tensor
    _order: tuple[torch.Tensor, torch.Tensor] | None = None
    _paths: torch.Tensor | None = None

    def order(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots that any row sees by position, and where among them each block of positions ends; both int32,
        on the CPU."""
        if self._order is None:
            slots = np.flatnonzero(self.seen.numpy().any(axis=0))
            positions = self.key_positions.numpy()[slots]
            places = np.argsort(positions, kind="stable")
            blocks = positions[places] // plain.BLOCK
            ends = np.append(np.flatnonzero(blocks[1:] != blocks[:-1]) + 1, len(blocks))
            self._order = (
                torch.from_numpy(slots[places].astype(np.int32)),
                torch.from_numpy(ends.astype(np.int32)),
            )
        return self._order

    def paths(self) -> torch.Tensor:
        """The slot that a row sees at a position, or -1: `[rows, positions]` int64."""
        if self._paths is None:
            rows, slots = self.seen.nonzero(as_tuple=True)
            positions = self.key_positions[slots].long()
            self._paths = slots.new_full((len(self.seen), int(positions.max()) + 1), -1)
            self._paths[rows, positions] = slots
        return self._paths


def attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sight: Sight,
    scale: float,
    cap: float | None = None,
    steps: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """`[rows, heads, width]` from queries of that shape, `keys` `[kv_heads, slots / 16, width, 16]` and
    `values` `[kv_heads, slots, width filled up to a multiple of 16]`.

    Keys and values in int8 are levels; `steps` has the step between them for each 32 numbers of a slot, in
    float16: `[kv_heads, slots / 16, width / 32, 16]` and `[kv_heads, slots, width / 32]`, rounded up.
    """
    library = _library(queries)
    wide = queries.float().contiguous()
    if library is None:
        if steps is not None:
            keys, values = plain.of_levels(keys, steps[0], 2), plain.of_levels(values, steps[1], 2)
        found = plain.attention(wide, keys, values[..., : queries.shape[2]], sight.paths(), scale, cap)
    else:
        found = library.attention(wide, keys, values, steps, sight.seen, *sight.order(), scale, cap)
    return found.to(queries.dtype)


def _library(x: torch.Tensor) -> compiled.Library | None:
    return compiled.library() if x.device.type == "cpu" else None
