"""Mixture-of-experts layers whose result for a row is the same whatever other rows are in the batch.

Registered with transformers as an experts implementation. Its own ones run all rows of an expert as one matrix product, whose
rounding depends on how many rows of the whole batch chose that expert. Here every row is run alone, as the eager one would run a
batch of one row: its experts in ascending order, summed in the model's dtype. An expert's rows come one after another, while its
weights are in the processor's cache.

Packed experts (`quantised.py`) take all rows of an expert at once: their arithmetic of a row does not depend on the others.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from flowspec.model.quantised import QuantisedLinear, Rounded, pack

EXPERTS_NAME = "flowspec_rows"


def row_experts(experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`[rows, hidden]` from `hidden` of that shape and each row's experts and their weights, `[rows, experts per token]`."""
    if isinstance(experts.gate_up_proj, nn.ModuleList):
        return _packed_experts(experts, hidden, chosen, weights)
    output = torch.zeros_like(hidden)
    pairs = sorted((expert, row, place) for row, own in enumerate(chosen.tolist()) for place, expert in enumerate(own))
    for expert, row, place in pairs:
        gate, up = F.linear(hidden[row : row + 1], experts.gate_up_proj[expert]).chunk(2, dim=-1)
        found = F.linear(experts.act_fn(gate) * up, experts.down_proj[expert]) * weights[row, place]
        output[row : row + 1] += found.to(output.dtype)
    return output


def _packed_experts(experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`row_experts` with a packed layer for each expert."""
    output = torch.zeros_like(hidden)
    for expert in sorted(set(chosen.flatten().tolist())):
        rows, places = (chosen == expert).nonzero(as_tuple=True)
        gate, up = experts.gate_up_proj[expert](hidden[rows]).chunk(2, dim=-1)
        found = experts.down_proj[expert](experts.act_fn(gate) * up) * weights[rows, places, None]
        output.index_add_(0, rows, found.to(output.dtype))  # no row is in `rows` twice
    return output


def pack_experts(experts: nn.Module, name: str, rounded: Rounded, kind: type[QuantisedLinear]) -> None:
    """Puts packed layers in the place of the parameter `name` `[experts, out, in]`; `rounded` has the rows of all, one expert's after another's."""
    count, outputs, inputs = experts.get_parameter(name).shape
    layers = nn.ModuleList()
    for expert in range(count):
        layer = nn.Linear(inputs, outputs, bias=False, device="meta")
        pack(layer, {part: rows[expert * outputs : (expert + 1) * outputs] for part, rows in rounded.items()}, kind)
        layers.append(layer)
    delattr(experts, name)  # what is a parameter cannot become a module
    setattr(experts, name, layers)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, row_experts)
