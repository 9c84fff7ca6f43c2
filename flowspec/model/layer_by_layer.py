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
_TENSORS = {part: (tensor, axis) for tensor, (part, axis) in _SHARED.items()}
_PART = re.compile(rf"(.*)layers\.\d+\.{LAYER_INPUT}\.({'|'.join(_TENSORS)})\.weight")
TABLE = f".{LAYER_INPUT}.table.weight"
"""How the name of a layer's own table ends: packed only as files have it."""


def together(weights: Mapping[str, Array]) -> dict[str, Array]:
    """A checkpoint's tensors where `weights` has parts of some, layer after layer; what is no part stays."""
    found, parts = dict[str, Array](), dict[tuple[str, int | None], list[Array]]()
    for name, part in weights.items():
        match = _PART.fullmatch(name)
        if match is None:
            found[name] = part
        else:
            tensor, axis = _TENSORS[match[2]]
            parts.setdefault((f"{match[1]}{tensor}.weight", axis), []).append(part)
    for (name, axis), own in parts.items():
        found[name] = own[0] if axis is None else namespace(own[0]).concatenate(own, axis)
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
