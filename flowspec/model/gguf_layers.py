"""Linear layers and embeddings whose weights stay as a GGUF file packs them: one copy, laid out in panels
(`arithmetic/packed.py`), of the bytes that the file has for them.

Weights are those of the file, to the last bit. A row is rounded as in int4, group by group of 32 inputs, and
multiplied by one arithmetic on every processor (`groups32`). A matrix may consist of several, one below
another, each packed in another form: what a layer has joined, a file may hold apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flowspec.model.arithmetic.operations import packed_product, packed_rows
from flowspec.model.arithmetic.packed import FORMS, numbers_of
from flowspec.model.products import float_product
from flowspec.model.quantised import Packed

BLOCK_PANELS = 64
"""So many are widened at once."""


@dataclass(frozen=True, slots=True)
class Part:
    """A packed matrix of `outputs` rows: panels of one of `FORMS`, uint8 `[panels, units, unit_bytes]`."""

    kind: str
    panels: torch.Tensor
    outputs: int


class GgufModule(Packed):
    """A module with the parts of a packed matrix in the place of its weight."""

    parts: tuple[Part, ...]

    @property
    def packed_sizes(self) -> dict[object, int]:
        return {part.panels.data_ptr(): part.panels.nbytes for part in self.parts}


class GgufEmbedding(GgufModule, nn.Embedding):
    """`[..., width]` in `dtype` from token ids `[...]`; of one part."""

    dtype: torch.dtype

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        (part,) = self.parts
        found = packed_rows(FORMS[part.kind], part.panels, input.reshape(-1))
        return found.to(self.dtype).view(*input.shape, self.embedding_dim)


class GgufLinear(GgufModule, nn.Linear):
    """`y = x W^T + b`, `[..., in]` -> `[..., out]` in the dtype of x, rounded once."""

    order: torch.Tensor | None = None
    """Which of the layer's inputs each of the parts' is; None: they are the same."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = input.reshape(-1, self.in_features)
        if self.order is not None:
            rows = rows[:, self.order]
        if self.bias is not None:
            rows = rows.float()  # so that results are
        made = [self._product(rows, part) for part in self.parts]
        found = made[0] if len(made) == 1 else torch.cat(made, dim=1)
        if self.bias is not None:
            found = (found + self.bias).to(input.dtype)
        return found.view(*input.shape[:-1], self.out_features)

    def _product(self, rows: torch.Tensor, part: Part) -> torch.Tensor:
        """`[rows, outputs]` in the dtype of rows."""
        return packed_product(rows, FORMS[part.kind], part.panels, part.outputs)


class PlainGgufLinear(GgufLinear):
    """In float32, the weights of a block of panels at a time: for other devices than CPUs."""

    def _product(self, rows: torch.Tensor, part: Part) -> torch.Tensor:
        wide, form = rows.float(), FORMS[part.kind]
        made = []
        for panels in torch.split(part.panels, BLOCK_PANELS):
            made.append(float_product(wide, numbers_of(form, panels)))
        return torch.cat(made, dim=1)[:, : part.outputs].to(rows.dtype)


def stay_packed(
    module: nn.Linear | nn.Embedding,
    parts: tuple[Part, ...],
    kind: type[GgufLinear],
    dtype: torch.dtype,
    order: torch.Tensor | None = None,
) -> None:
    """Has a layer compute with packed parts, whose outputs are together its own, and whose inputs are its own
    in this `order`; a bias stays. What an embedding gives has this `dtype`."""
    made: Any = module
    made.weight = None
    made.parts = parts
    if order is not None:
        made.order = order.to(parts[0].panels.device)
    if isinstance(module, nn.Embedding):
        module.__class__ = GgufEmbedding
        made.dtype = dtype
    else:
        module.__class__ = kind
        assert sum(part.outputs for part in parts) == module.out_features, "as the file has them"
