"""What a checkpoint holds of all layers in one tensor (Gemma 4's per-layer embeddings), under names as if
each layer had its own.

There is one table for all layers, `[vocabulary, layers * width]`, and one projection of a token's embedding,
`[layers * width, hidden]`. A slice reads the columns and the rows of its own layers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from flowspec.errors import InputError
from flowspec.model.arithmetic.arrays import Array, Numbers, fill, in_room, namespace
from flowspec.model.arithmetic.levels import as_q8_0
from flowspec.model.arithmetic.packed import FORMS, packed
from flowspec.model.tensors import ROUNDED_ANEW, Panels, PartsOfTensors, Tensors, check_shape

LAYER_INPUT = "layer_input"
"""The submodule of a layer."""
_TABLE, _PROJECTION = "embed_tokens_per_layer", "per_layer_model_projection"
_AXES = {_TABLE: 1, _PROJECTION: 0}
"""Along which layers lie one after another; the norm is the same for all."""
_SHARED = {_TABLE: "table", _PROJECTION: "projection", "per_layer_projection_norm": "norm"}
"""What is one tensor for all layers, and what each layer's part of it is called."""
_WHOLE = {part: tensor for tensor, part in _SHARED.items()}
_PART = re.compile(rf"(?P<root>.*)layers\.\d+\.{LAYER_INPUT}\.(?P<part>{'|'.join(_WHOLE)})\.weight")
TABLE = f".{LAYER_INPUT}.table.weight"
"""How the name of a layer's own table ends: packed only as files have it."""
TABLE_ROWS = 1 << 13
"""Of a table that are read at once: 150 to 180 MB of published ones."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor of the checkpoint, and the layer whose part of it is meant."""

    tensor: str
    layer: int


def whole_name(name: str) -> str:
    """The tensor that a checkpoint has of all layers where `name` is one layer's part; else the name."""
    found = _PART.fullmatch(name)
    return name if found is None else f"{found['root']}{_WHOLE[found['part']]}.weight"


def together(weights: Mapping[str, Array]) -> dict[str, Array]:
    """A checkpoint's tensors where `weights` has parts of some, layer after layer; what is no part stays."""
    parts: dict[str, list[Array]] = {}
    for name, part in weights.items():
        parts.setdefault(whole_name(name), []).append(part)
    found = {}
    for name, own in parts.items():
        axis = _AXES.get(name.removesuffix(".weight").rpartition(".")[2])
        found[name] = own[0] if axis is None else namespace(own[0]).concatenate(own, axis)
    return found


class LayerByLayer(PartsOfTensors[_Place]):
    """Over the `raw` tensors of a checkpoint of so many `layers`: the parts of each for what they share."""

    def __init__(self, model: str, raw: Tensors, layers: int) -> None:
        super().__init__(model, raw)
        self._layers = layers
        for tensor in raw:
            stem, _, leaf = tensor.rpartition(".")
            root, _, kind = stem.rpartition(".")
            if leaf != "weight" or kind not in _SHARED:
                self._places[tensor] = None
                continue
            for layer in range(layers):
                name = f"{root}.layers.{layer}.{LAYER_INPUT}.{_SHARED[kind]}.weight"
                self._places[name] = _Place(tensor, layer)

    def _shape_of(self, place: _Place) -> tuple[int, ...]:
        shape = list(self._raw.shape(place.tensor))
        axis = self._axis(place.tensor)
        if axis is not None:
            if shape[axis] % self._layers:
                raise InputError(
                    f"tensor {place.tensor} of {self._model!r}: expected equal parts for {self._layers} "
                    f"layers, got the shape {shape}"
                )
            shape[axis] //= self._layers
        return tuple(shape)

    def _part(self, place: _Place, whole: Numbers) -> Numbers:
        axis = self._axis(place.tensor)
        return whole if axis is None else np.split(whole, self._layers, axis)[place.layer]

    def form(self, name: str) -> str:
        """Of a layer's projection where the checkpoint is quantised: it is rounded anew, whatever is there. A
        table stays as it is."""
        place = self._places.get(name)
        if place is None:
            return super().form(name)
        is_rounded = self._axis(place.tensor) == 0 and self._raw.form(place.tensor)
        return ROUNDED_ANEW if is_rounded else ""

    def is_rounded_anew(self, name: str) -> bool:
        return super().is_rounded_anew(name) if self._places.get(name) is None else bool(self.form(name))

    def packed_bytes(self, name: str) -> int:
        if self._places.get(name) is None:
            return super().packed_bytes(name)
        outputs, inputs = self.shape(name)
        return FORMS[ROUNDED_ANEW].panel_bytes(inputs, outputs)

    def panels(self, name: str, shape: tuple[int, ...]) -> Panels:
        if self._places.get(name) is None:
            return super().panels(name, shape)
        return in_room(packed(FORMS[ROUNDED_ANEW], as_q8_0(self.load(name, shape))))

    def copy_together(self, parts: Mapping[str, Numbers]) -> None:
        """Of tables a block of rows after another: layers lie side by side in each row, and a whole table may
        be larger than memory. The map of a block is dropped before the next."""
        tables = {name: part for name, part in parts.items() if name.endswith(TABLE)}
        super().copy_together({name: part for name, part in parts.items() if name not in tables})
        for name, part in tables.items():
            check_shape(name, self._model, part.shape, self.shape(name))
        by_tensor: dict[str, list[tuple[int, Numbers]]] = {}
        for name, part in tables.items():
            place = self._places[name]
            assert place is not None, "a table's name is one of ours"
            by_tensor.setdefault(place.tensor, []).append((place.layer, part))
        for tensor, columns in by_tensor.items():
            shape = self._raw.shape(tensor)
            for first in range(0, shape[0], TABLE_ROWS):
                rows = slice(first, first + TABLE_ROWS)
                block = np.split(self._raw.load(tensor, shape)[rows], self._layers, 1)
                for layer, part in columns:
                    fill(part[rows], block[layer])
                del block

    def _axis(self, tensor: str) -> int | None:
        """As in `_AXES`."""
        kind = tensor.removesuffix(".weight").rpartition(".")[2]
        return _AXES.get(kind) if len(self._raw.shape(tensor)) == 2 else None
