"""What each layer of Gemma 4 takes of a token beside its hidden state (per-layer embeddings).

A layer adds a part that follows from the token alone: looked up in a table of its own, plus a projection of
the token's embedding. Transformers makes those of all layers at once; here each layer has its own
(`layer_by_layer.py`), so a slice holds no more than its layers need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class LayerInput(nn.Module):
    """Of one layer, after `project_per_layer_inputs` of transformers' Gemma4TextModel."""

    def __init__(self, config: Any, norm: Callable[..., nn.Module]) -> None:
        super().__init__()
        width = config.hidden_size_per_layer_input
        self.table = nn.Embedding(config.vocab_size_per_layer_input, width)
        self.projection = nn.Linear(config.hidden_size, width, bias=False)
        self.norm = norm(width, eps=config.rms_norm_eps)
        self.table_scale = width**0.5
        self.projection_scale = config.hidden_size**-0.5

    def forward(self, tokens: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """`[1, rows, width]` from token ids `[rows]` and their scaled embeddings `[1, rows, hidden]`."""
        looked_up = self.table(tokens)[None]
        scale = torch.tensor(self.table_scale).to(looked_up.dtype).item()
        projected = self.norm(self.projection(embedding) * self.projection_scale)
        found: torch.Tensor = (projected + looked_up * scale) * 2.0**-0.5
        return found
