"""The tree cache and the tree attention, registered with transformers so that model code is used unchanged.

A node's keys and values sit in a slot; RoPE is baked in by position and the mask decides who sees whom, so pruning
frees slots without copying anything. Rows of several requests go through the linear layers together and attend each to
their own cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from flowspec.core.slots import cache_size

ATTENTION_NAME = "flowspec_tree"


class TreeCache:
    """Keys and values of one request at one stage: `[layers, kv_heads, slots, head_dim]`, grown in blocks."""

    def __init__(self, *, layers: int, kv_heads: int, head_dim: int, slots_max: int, dtype: torch.dtype, device: torch.device) -> None:
        self.slots_max = slots_max
        self.keys = torch.zeros((layers, kv_heads, 0, head_dim), dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)

    @property
    def bytes(self) -> int:
        """Of keys and values as they are now."""
        return self.keys.nbytes + self.values.nbytes

    def growth_bytes(self, slots: int) -> int:
        """What `reserve` would add."""
        layers, heads, have, width = self.keys.shape
        return 2 * layers * heads * max(0, cache_size(slots, self.slots_max) - have) * width * self.keys.element_size()

    def reserve(self, slots: int) -> None:
        """Makes room for slots `0..slots-1`; new ones are zero, for a masked slot with NaN would poison attention."""
        have = self.keys.shape[2]
        if slots <= have:
            return
        assert slots <= self.slots_max, f"{slots} slots asked for, {self.slots_max} reserved"
        size = cache_size(slots, self.slots_max)
        self.keys = F.pad(self.keys, (0, 0, 0, size - have))
        self.values = F.pad(self.values, (0, 0, 0, size - have))

    @torch.inference_mode()
    def clear(self, slots: tuple[int, ...]) -> None:
        """Zeroes slots that were freed."""
        index = torch.tensor([slot for slot in slots if slot < self.keys.shape[2]], device=self.keys.device)
        if len(index):
            self.keys.index_fill_(2, index, 0)
            self.values.index_fill_(2, index, 0)


@dataclass(slots=True)
class TreeRows:
    """Rows `[first, first + len(slots))` of the batch: one request's."""

    cache: TreeCache
    first: int
    slots: torch.Tensor  # [rows] int64
    positions: torch.Tensor  # [rows] int64
    key_positions: torch.Tensor  # [high] int32
    visible: torch.Tensor  # [rows, high] bool
    masks: dict[int | None, torch.Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """Additive mask `[rows, high]` for a sliding window (None: no window); None when every row sees all."""
        if window not in self.masks:
            seen = self.visible
            if window is not None:
                seen = seen & (self.key_positions[None, :] > self.positions[:, None] - window)
            if bool(seen.all()):
                self.masks[window] = None
            else:
                self.masks[window] = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
        return self.masks[window]

    def select(self, kept: torch.Tensor, first: int) -> TreeRows:
        """The same request's rows with only `kept` (indices into these rows)."""
        return TreeRows(self.cache, first, self.slots[kept], self.positions[kept], self.key_positions, self.visible[kept])


@dataclass(slots=True)
class TreeBatch:
    """What the attention needs to know of a job; handed to every layer as the keyword `tree`."""

    requests: list[TreeRows]
    first_layer: int


def tree_attention(
    module: Any,
    query: torch.Tensor,  # [1, heads, rows, head_dim]
    key: torch.Tensor,  # [1, kv_heads, rows, head_dim]
    value: torch.Tensor,  # [1, kv_heads, rows, head_dim]
    attention_mask: torch.Tensor | None,
    *,
    tree: TreeBatch,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_unused: Any,
) -> tuple[torch.Tensor, None]:
    """Writes the rows' keys and values to their slots, then attends by the mask; returns `[1, rows, heads, head_dim]`."""
    layer = module.layer_idx - tree.first_layer
    outputs = []
    for rows in tree.requests:
        span = slice(rows.first, rows.first + len(rows.slots))
        high = len(rows.key_positions)
        keys, values = rows.cache.keys[layer], rows.cache.values[layer]  # [kv_heads, slots, head_dim]
        keys.index_copy_(1, rows.slots, key[0, :, span])
        values.index_copy_(1, rows.slots, value[0, :, span])
        own, mask = query[:, :, span], rows.mask(sliding_window, query.dtype)
        if softcap is None:
            seen = keys[None, :, :high], values[None, :, :high]
            gqa = query.shape[1] != key.shape[1]
            outputs.append(F.scaled_dot_product_attention(own, *seen, attn_mask=mask, scale=scaling, enable_gqa=gqa))
        else:
            outputs.append(_softcapped(own, keys[:, :high], values[:, :high], mask, scaling, softcap))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)  # [1, heads, rows, head_dim]
    return output.transpose(1, 2), None


def _softcapped(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scaling: float, cap: float
) -> torch.Tensor:
    """Attention whose scores are capped before the mask, in the steps of transformers' eager code: SDPA has no cap.

    `query` `[1, heads, rows, head_dim]`, `keys` and `values` `[kv_heads, high, head_dim]`; returns the shape of `query`.
    """
    kv_heads, rows = keys.shape[0], query.shape[2]
    grouped = query.reshape(kv_heads, -1, query.shape[3])  # [kv_heads, group * rows, head_dim]
    scores = torch.tanh(torch.matmul(grouped, keys.transpose(1, 2)) * scaling / cap) * cap
    if mask is not None:
        scores = (scores.view(kv_heads, -1, rows, keys.shape[1]) + mask).view_as(scores)
    shares = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(shares, values).view_as(query)


AttentionInterface.register(ATTENTION_NAME, tree_attention)
