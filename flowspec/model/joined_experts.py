"""A layer's experts that a checkpoint holds in one tensor for each matrix, under the names that they would
have one by one. So they are read, sent and packed as those of any mixture.

GPT-OSS's, as transformers saves them: inputs first, and the outputs of gate and up in turns. As they are
published: outputs first, also in turns, as MXFP4, of which these are compressed-tensors' names.

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

_JOINED = re.compile(r"(.+\.experts\.)(gate_up|down)_proj(|_bias|_blocks|_scales)")
_STACKED = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)(|_scale_inv)")
_NUMBERS, _BLOCKS = "", "_blocks"
_LEAVES = {_NUMBERS: "weight", "_bias": "bias", _BLOCKS: "weight_packed", "_scales": "weight_scale"}
_AXES = {_NUMBERS: 3, "_bias": 2, _BLOCKS: 4, "_scales": 3}
_PARTS = {"gate_up": ("gate", "up"), "down": ("down",)}


def joined_experts(model: str, tensors: Iterable[str], experts: int) -> dict[str, View]:
    """Of GPT-OSS's checkpoints, whose layers have so many `experts`."""
    views = {}
    for tensor in tensors:
        if (match := _JOINED.fullmatch(tensor)) is None:
            continue
        stem, kind, suffix = match.groups()
        parts = _PARTS[kind]
        for expert in range(experts):
            for first, part in enumerate(parts):
                turn = slice(first, None, len(parts))
                of = functools.partial(_expert_in_turns, model, tensor, suffix, experts, expert, turn)
                views[f"{stem}{expert}.{part}_proj.{_LEAVES[suffix]}"] = View(tensor, of)
    return views


def _expert_in_turns(
    model: str, tensor: str, suffix: str, experts: int, expert: int, turn: slice, whole: Numbers
) -> Numbers:
    outputs = whole.shape[-1 if suffix == _NUMBERS else 1] if whole.ndim > 1 else 0
    if whole.ndim != _AXES[suffix] or len(whole) != experts or outputs % turn.step:
        raise InputError(
            f"tensor {tensor} of {model!r}: expected {experts} experts and {_AXES[suffix]} axes by "
            f"config.json, got the shape {list(whole.shape)}"
        )
    part = (whole[expert].T if suffix == _NUMBERS else whole[expert])[turn]
    return part.reshape(len(part), -1) if suffix == _BLOCKS else part


def stacked_experts(model: str, tensors: Iterable[str], experts: int) -> dict[str, View]:
    """As `joined_experts`, of families whose matrices have their outputs first."""
    views = {}
    for tensor in tensors:
        if (match := _STACKED.fullmatch(tensor)) is None:
            continue
        stem, kind, suffix = match.groups()
        for expert in range(experts):
            of = functools.partial(_expert, model, tensor, experts, expert)
            views[f"{stem}.{expert}.{kind}.weight{suffix}"] = View(tensor, of)
    return views


def _expert(model: str, tensor: str, experts: int, expert: int, whole: Numbers) -> Numbers:
    if whole.shape[:1] != (experts,):
        raise InputError(
            f"tensor {tensor} of {model!r}: expected {experts} experts by config.json, got the shape "
            f"{list(whole.shape)}"
        )
    part: Numbers = whole[expert]
    return part
