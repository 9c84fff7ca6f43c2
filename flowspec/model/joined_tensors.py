"""Tensors of a checkpoint that hold several in one, under the names that these would have one by one. So they
are read, sent and packed as those of any other.

*Experts* of a layer, in one tensor for each matrix. GPT-OSS's are `in_turns`, as transformers saves them:
inputs first, and the outputs of gate and up in turns. As they are published: outputs first, also in turns, as
MXFP4, of which these are compressed-tensors' names. Those of other families in a checkpoint that a tool
quantised: outputs first, gate above up, in floats of 8 bits with scales (transformers), or in 16 bits because
the tool left them (gptqmodel). Gate and up stay one matrix, since a block of outputs that share a scale may
reach from one into the other.

*Layers'* inputs (Gemma 4): one table for all, `[vocabulary, layers * width]`, and one projection of a token's
embedding, `[layers * width, hidden]`. A slice reads the columns and the rows of its own layers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

import numpy as np

from flowspec.errors import InputError
from flowspec.model.arithmetic.arrays import Numbers
from flowspec.model.layer import LAYER_INPUT
from flowspec.model.tensors import View

_JOINED = re.compile(r"(.+\.experts)\.(gate_up|down)_proj(|_[a-z_]+)")
_BLOCKS = "_blocks"
_IN_TURNS = {"": "weight", "_bias": "bias", _BLOCKS: "weight_packed", "_scales": "weight_scale"}
_STACKED = {"": "weight", "_scale_inv": "weight_scale_inv"}  # by the ends of names in files


def joined_experts(model: str, tensors: Iterable[str], experts: int, *, in_turns: bool) -> dict[str, View]:
    """Of a checkpoint whose layers have so many `experts`."""
    views, leaves = dict[str, View](), _IN_TURNS if in_turns else _STACKED
    for tensor in tensors:
        match = _JOINED.fullmatch(tensor)
        if match is None or match[3] not in leaves:
            continue
        stem, kind, suffix = match.groups()
        parts = ("gate", "up") if in_turns and kind == "gate_up" else (kind,)
        for expert in range(experts):
            for first, part in enumerate(parts):
                turn = slice(first, None, len(parts)) if in_turns else None
                of = functools.partial(_expert, model, tensor, suffix, experts, expert, turn)
                views[f"{stem}.{expert}.{part}_proj.{leaves[suffix]}"] = View(tensor, of)
    return views


def _expert(
    model: str, tensor: str, suffix: str, experts: int, expert: int, turn: slice | None, whole: Numbers
) -> Numbers:
    """Of a tensor its part of an expert, and of that the outputs whose `turn` it is, in rows."""
    if whole.shape[:1] != (experts,) or (turn is not None and whole.ndim < 2):
        raise InputError(
            f"tensor {tensor} of {model!r}: expected {experts} experts by config.json, got the shape "
            f"{list(whole.shape)}"
        )
    part: Numbers = whole[expert]
    if turn is not None:
        part = (part if suffix else part.T)[turn]
    return part.reshape(len(part), -1) if suffix == _BLOCKS else part


# -------------------------------------------------------------------------------------- layers' inputs

SHARED = {
    "embed_tokens_per_layer": ("table", 1),
    "per_layer_model_projection": ("projection", 0),
    "per_layer_projection_norm": ("norm", None),
}
"""What is one tensor for all layers: what each layer's part of it is called, and along which axis these lie,
one after another; the norm is the same for all."""
_WHOLE = re.compile(rf"(.*\.|)({'|'.join(SHARED)})\.weight")
TABLE = f".{LAYER_INPUT}.table.weight"  # how a layer's own table ends, packed only as files have it


def layer_views(model: str, tensors: Iterable[str], layers: int) -> dict[str, View]:
    """Of a checkpoint of so many `layers`: the part of each of what they share."""
    views = {}
    for match in filter(None, map(_WHOLE.fullmatch, tensors)):
        part, axis = SHARED[match[2]]
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
