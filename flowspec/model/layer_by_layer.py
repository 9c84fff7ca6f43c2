"""What a checkpoint holds of all layers in one tensor (Gemma 4's per-layer embeddings), under names as if
each layer had its own.

There is one table for all layers, `[vocabulary, layers * width]`, and one projection of a token's embedding,
`[layers * width, hidden]`. A slice reads the columns and the rows of its own layers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping

import numpy as np

from flowspec.errors import InputError
from flowspec.model.arithmetic.arrays import Array, Numbers, namespace
from flowspec.model.parts import LAYER_INPUT
from flowspec.model.tensors import View

_TABLE, _PROJECTION = "embed_tokens_per_layer", "per_layer_model_projection"
_AXES = {_TABLE: 1, _PROJECTION: 0}
"""Along which layers lie one after another; the norm is the same for all."""
_SHARED = {_TABLE: "table", _PROJECTION: "projection", "per_layer_projection_norm": "norm"}
"""What is one tensor for all layers, and what each layer's part of it is called."""
_WHOLE = {part: tensor for tensor, part in _SHARED.items()}
_PART = re.compile(rf"(?P<root>.*)layers\.\d+\.{LAYER_INPUT}\.(?P<part>{'|'.join(_WHOLE)})\.weight")
TABLE = f".{LAYER_INPUT}.table.weight"
"""How the name of a layer's own table ends: packed only as files have it."""


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
        axis = _AXES.get(_kind(name))
        found[name] = own[0] if axis is None else namespace(own[0]).concatenate(own, axis)
    return found


def _kind(tensor: str) -> str:
    return tensor.removesuffix(".weight").rpartition(".")[2]


def layer_views(model: str, tensors: Iterable[str], layers: int) -> dict[str, View]:
    """Of a checkpoint of so many `layers`: the part of each of what they share."""
    views = {}
    for tensor in tensors:
        kind = _kind(tensor)
        if not tensor.endswith(f"{kind}.weight") or kind not in _SHARED:
            continue
        root = tensor.removesuffix(f"{kind}.weight")
        for layer in range(layers):
            of = functools.partial(layer_part, model, tensor, _AXES.get(kind), layers, layer)
            view = View(tensor, of, is_table=kind == _TABLE)
            views[f"{root}layers.{layer}.{LAYER_INPUT}.{_SHARED[kind]}.weight"] = view
    return views


def layer_part(model: str, tensor: str, axis: int | None, layers: int, layer: int, whole: Numbers) -> Numbers:
    """The part of one of the `layers`, which lie along an axis; None: all have the same."""
    if axis is None or whole.ndim != 2:
        return whole
    if whole.shape[axis] % layers:
        raise InputError(
            f"tensor {tensor} of {model!r}: expected equal parts for {layers} layers, got the shape "
            f"{list(whole.shape)}"
        )
    return np.split(whole, layers, axis)[layer]
