"""What a layer computes, by its `LayerSpec`: the definition of its program (`program.py`), step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flowspec.core.protocol.model_spec import LayerSpec
from flowspec.model.arithmetic import plain
from flowspec.model.arithmetic.norms import Norm


@dataclass(slots=True, kw_only=True)
class Held:
    """What a layer holds of one request, as `plain.store` and `plain.attention` have it, and what rows see:
    `paths` `[rows, positions]` int64; the rows' `slots` `[rows]` int64."""

    keys: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor
    paths: torch.Tensor


def run_plainly(
    layer: Any,
    spec: LayerSpec,
    how: Norm,
    hidden: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    held: Held,
) -> torch.Tensor:
    """`[rows, width]` from hidden states of that shape and angles, each `[1, rows, turned width]`."""

    dense = spec.dense
    assert dense is not None, "only such layers have programs"

    def normed(rows: torch.Tensor, norm: Any) -> torch.Tensor:
        return plain.norm(rows, norm.weight, norm.eps, how)

    def named(rows: torch.Tensor, name: str) -> torch.Tensor:
        return normed(rows, getattr(layer, name)) if name else rows

    def added(rows: torch.Tensor, name: str) -> torch.Tensor:
        more = named(rows, name)
        return hidden + (more if dense.added_scale == 1 else more * dense.added_scale)

    part, count, width = layer.self_attn, len(hidden), spec.kv.width
    rows = named(hidden, dense.norm_before_attention)
    if hasattr(part, "qkv_proj"):
        sizes = [heads * width for heads in (spec.heads, spec.kv.count, spec.kv.count)]
        queries, keys, values = part.qkv_proj(rows).split_with_sizes(sizes, dim=1)
    else:
        queries, keys, values = part.q_proj(rows), part.k_proj(rows), part.v_proj(rows)
    if dense.query_norm == "width":
        queries, keys = normed(queries, part.q_norm), normed(keys, part.k_norm)
    queries, keys, values = (each.reshape(1, count, -1, width) for each in (queries, keys, values))
    if dense.query_norm == "head":
        queries, keys = normed(queries, part.q_norm), normed(keys, part.k_norm)
    queries, keys, values = (each.transpose(1, 2) for each in (queries, keys, values))
    if dense.is_turned:
        queries, keys = plain.turned(queries, *angles), plain.turned(keys, *angles)
    plain.store(held.slots, keys[0], values[0], held.keys, held.values, None)
    attending = queries[0].transpose(0, 1).float()
    seen_values = held.values[..., :width]
    found = plain.attention(
        attending, held.keys, seen_values, held.paths, dense.scale, dense.cap or None, None
    )
    hidden = added(part.o_proj(found.to(hidden.dtype).flatten(1)), dense.norm_after_attention)
    rows = named(hidden, dense.norm_before_mlp)
    if hasattr(layer.mlp, "gate_up_proj"):
        gate, up = layer.mlp.gate_up_proj(rows).chunk(2, dim=1)
    else:
        gate, up = layer.mlp.gate_proj(rows), layer.mlp.up_proj(rows)
    gate = plain.FUNCTIONS[dense.activation](gate.float()).to(gate.dtype)
    return added(layer.mlp.down_proj(gate * up), dense.norm_after_mlp)
