"""Short convolutions under trees: what a layer does that mixes a row with the few before it, and does not
attend (LFM2).

Such a layer makes an input of each row, `B * x`, and sums it with those of the row's ancestors. It keeps
inputs as attention keeps keys and values: one in the slot of each node (`attention.TreeCache`). A row takes
those of its own path, by the mask that says what it sees. So whatever lies beside it in a slot or in the job
changes no bit, and dropped, committed and lost rows need nothing of their own. The sum is `arithmetic`'s.
"""

from __future__ import annotations

from typing import Any

import torch

from flowspec.model.arithmetic import plain
from flowspec.model.attention import TreeBatch


def tree_convolution(
    module: Any, hidden_states: torch.Tensor, *, tree: TreeBatch, **_unused: Any
) -> torch.Tensor:
    """What transformers' Lfm2ShortConv computes: `[1, rows, hidden]` from that shape. Writes the rows' inputs
    to their slots."""
    before, after, x = module.in_proj(hidden_states).chunk(3, dim=-1)
    inputs = (before * x)[0]  # [rows, hidden]
    layer = module.layer_idx - tree.first_layer
    weight = module.conv.weight[:, 0].float()  # [hidden, length]
    bias = None if module.conv.bias is None else module.conv.bias.float()
    outputs = []
    for request in tree.requests:
        rows = request.of(layer)
        held = rows.cache.inputs[rows.cache.places[layer]]  # [slots, hidden]
        held.index_copy_(0, rows.slots, inputs[rows.first : rows.first + len(rows.slots)])
        outputs.append(plain.convolution(seen_inputs(held, rows.line(weight.shape[1])), weight, bias))
    mixed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    found: torch.Tensor = module.out_proj(after * mixed.to(inputs.dtype))
    return found


def convolving_layer(
    layer: Any, hidden_states: torch.Tensor, *, tree: TreeBatch, **_unused: Any
) -> torch.Tensor:
    """What transformers' Lfm2DecoderLayer computes where it does not attend. Before 5.22 that keeps from its
    convolution what rows see."""
    mixed = layer.conv(layer.operator_norm(hidden_states), tree=tree) + hidden_states
    found: torch.Tensor = mixed + layer.feed_forward(layer.ffn_norm(mixed))
    return found


def seen_inputs(held: torch.Tensor, lines: torch.Tensor) -> torch.Tensor:
    """Inputs `[rows, length, width]` float32 that lie in slots `lines` `[rows, length]` of those that are
    `held` `[slots, width]`; zeros for -1, where the text has not begun."""
    return held[lines.clamp(min=0)].float().masked_fill(lines[..., None] < 0, 0.0)
