"""Mixture-of-experts layers whose result for a row is the same whatever other rows are in the batch.

Registered with transformers as an experts implementation. Its own ones run all rows of an expert as one matrix product, whose
rounding depends on how many rows of the whole batch chose that expert. Here every row is run alone, as the eager one would run a
batch of one row: its experts in ascending order, summed in the model's dtype. An expert's rows come one after another, while its
weights are in the processor's cache.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

EXPERTS_NAME = "flowspec_rows"


def row_experts(experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`[rows, hidden]` from `hidden` of that shape and each row's experts and their weights, `[rows, experts per token]`."""
    output = torch.zeros_like(hidden)
    pairs = sorted((expert, row, place) for row, own in enumerate(chosen.tolist()) for place, expert in enumerate(own))
    for expert, row, place in pairs:
        gate, up = F.linear(hidden[row : row + 1], experts.gate_up_proj[expert]).chunk(2, dim=-1)
        found = F.linear(experts.act_fn(gate) * up, experts.down_proj[expert]) * weights[row, place]
        output[row : row + 1] += found.to(output.dtype)
    return output


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, row_experts)
