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

_SHARED = {
    "embed_tokens_per_layer": ("table", 1),
    "per_layer_model_projection": ("projection", 0),
    "per_layer_projection_norm": ("norm", None),
}
"""What is one tensor for all layers: what each layer's part of it is called, and along which axis these lie,
one after another; the norm is the same for all."""
_WHOLE = re.compile(rf"(.*\.|)({'|'.join(_SHARED)})\.weight")
_TENSORS = {part: tensor for tensor, (part, _) in _SHARED.items()}
_PART = re.compile(rf"(.*)layers\.\d+\.{LAYER_INPUT}\.({'|'.join(_TENSORS)})\.weight")
TABLE = f".{LAYER_INPUT}.table.weight"
"""How the name of a layer's own table ends: packed only as files have it."""


def whole_name(name: str) -> str:
    """The tensor that a checkpoint has of all layers where `name` is one layer's part; else the name."""
    found = _PART.fullmatch(name)
    return name if found is None else f"{found[1]}{_TENSORS[found[2]]}.weight"


def together(weights: Mapping[str, Array]) -> dict[str, Array]:
    """A checkpoint's tensors where `weights` has parts of some, layer after layer; what is no part stays."""
    parts: dict[str, list[Array]] = {}
    for name, part in weights.items():
        parts.setdefault(whole_name(name), []).append(part)
    found = {name: own[0] for name, own in parts.items()}
    for name, own in parts.items():
        match = _WHOLE.fullmatch(name)
        if match is not None and (axis := _SHARED[match[2]][1]) is not None:
            found[name] = namespace(own[0]).concatenate(own, axis)
    return found


def layer_views(model: str, tensors: Iterable[str], layers: int) -> dict[str, View]:
    """Of a checkpoint of so many `layers`: the part of each of what they share."""
    views = {}
    for match in filter(None, map(_WHOLE.fullmatch, tensors)):
        part, axis = _SHARED[match[2]]
        for layer in range(layers):
            of = functools.partial(layer_part, model, match[0], axis, layers, layer)
            name = f"{match[1]}layers.{layer}.{LAYER_INPUT}.{part}.weight"
            views[name] = View(match[0], of, is_table=part == "table")
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
