"""A layer's experts that a checkpoint holds in one tensor for each matrix, under the names that they would
have one by one. So they are read, sent and packed as those of any mixture.

GPT-OSS's are `in_turns`, as transformers saves them: inputs first, and the outputs of gate and up in turns.
As they are published: outputs first, also in turns, as MXFP4, of which these are compressed-tensors' names.

Those of other families in a checkpoint that a tool quantised: outputs first, gate above up, in floats of 8
bits with scales (transformers), or in 16 bits because the tool left them (gptqmodel). Gate and up stay one
matrix, since a block of outputs that share a scale may reach from one into the other.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

from flowspec.errors import InputError
from flowspec.model.arithmetic.arrays import Numbers
from flowspec.model.tensors import View

_JOINED = re.compile(r"(.+\.experts)\.(gate_up|down)_proj(|_[a-z_]+)")
_BLOCKS = "_blocks"
_IN_TURNS = {"": "weight", "_bias": "bias", _BLOCKS: "weight_packed", "_scales": "weight_scale"}
_STACKED = {"": "weight", "_scale_inv": "weight_scale_inv"}
"""By the ends of names in files, those of single experts."""


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
