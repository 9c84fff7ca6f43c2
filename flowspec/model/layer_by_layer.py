"""What a checkpoint holds of all layers in one tensor (Gemma 4's per-layer embeddings), under names as if
each layer had its own.

There is one table for all layers, `[vocabulary, layers * width]`, and one projection of a token's embedding,
`[layers * width, hidden]`. A slice reads the columns and the rows of its own layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from flowspec.errors import InputError
from flowspec.model.tensors import Tensors, check_shape

if TYPE_CHECKING:
    import torch

LAYER_INPUT = "layer_input"
"""The submodule of a layer."""
_TABLE, _PROJECTION = "embed_tokens_per_layer", "per_layer_model_projection"
_NAMES = {_TABLE: "table", _PROJECTION: "projection", "per_layer_projection_norm": "norm"}
TABLE = f".{LAYER_INPUT}.table.weight"
"""How the name of a layer's own table ends: never packed."""
TABLE_ROWS = 1 << 13
"""Of a table that are read at once: 150 to 180 MB of published ones."""
Place = tuple[str, int]
"""A tensor of the checkpoint, and the layer whose part of it is meant."""


class LayerByLayer(Tensors):
    """Over the `raw` tensors of a checkpoint of so many `layers`: the parts of each for what they share."""

    def __init__(self, model: str, raw: Tensors, layers: int) -> None:
        self._model = model
        self._raw = raw
        self._layers = layers
        self._places: dict[str, Place | None] = {}
        for tensor in raw:
            stem, _, leaf = tensor.rpartition(".")
            root, _, kind = stem.rpartition(".")
            if leaf != "weight" or kind not in _NAMES:
                self._places[tensor] = None
                continue
            for layer in range(layers):
                name = f"{root}.layers.{layer}.{LAYER_INPUT}.{_NAMES[kind]}.weight"
                self._places[name] = tensor, layer

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def files_of(self, name: str) -> tuple[str, ...]:
        place = self._places.get(name)
        return self._raw.files_of(name) if place is None else (place[0],)

    def shape(self, name: str) -> tuple[int, ...]:
        place = self._places.get(name)
        if place is None:
            return self._raw.shape(name)
        shape = list(self._raw.shape(place[0]))
        axis = self._axis(place[0])
        if axis is not None:
            if shape[axis] % self._layers:
                raise InputError(
                    f"tensor {place[0]} of {self._model!r}: expected equal parts for {self._layers} layers, "
                    f"got the shape {shape}"
                )
            shape[axis] //= self._layers
        return tuple(shape)

    def load(self, name: str, shape: tuple[int, ...]) -> Any:
        check_shape(name, self._model, shape, self.shape(name))
        place = self._places.get(name)
        if place is None:
            return self._raw.load(name, shape)
        tensor, layer = place
        whole = self._raw.load(tensor, self._raw.shape(tensor))
        axis = self._axis(tensor)
        return whole if axis is None else whole.chunk(self._layers, dim=axis)[layer]

    def copy_together(self, parts: Mapping[str, torch.Tensor]) -> None:
        """Of tables a block of rows after another: layers lie side by side in each row, and a whole table may
        be larger than memory. The map of a block is dropped before the next."""
        tables = {name: part for name, part in parts.items() if name.endswith(TABLE)}
        super().copy_together({name: part for name, part in parts.items() if name not in tables})
        for name, part in tables.items():
            check_shape(name, self._model, tuple(part.shape), self.shape(name))
        by_tensor: dict[str, list[tuple[int, torch.Tensor]]] = {}
        for name, part in tables.items():
            place = self._places[name]
            assert place is not None, "a table's name is one of ours"
            by_tensor.setdefault(place[0], []).append((place[1], part))
        for tensor, columns in by_tensor.items():
            shape = self._raw.shape(tensor)
            for first in range(0, shape[0], TABLE_ROWS):
                rows = slice(first, first + TABLE_ROWS)
                block = self._raw.load(tensor, shape)[rows].chunk(self._layers, dim=1)
                for layer, part in columns:
                    part[rows].copy_(block[layer])
                del block
                self._raw.close()

    def form(self, name: str) -> str:
        return self._raw.form(name) if self._places.get(name) is None else ""

    def close(self) -> None:
        self._raw.close()

    def _axis(self, tensor: str) -> int | None:
        """The one along which layers lie one after another; None for what all have alike."""
        kind = tensor.removesuffix(".weight").rpartition(".")[2]
        return {_TABLE: 1, _PROJECTION: 0}.get(kind) if len(self._raw.shape(tensor)) == 2 else None
