"""How much memory a slice takes, from the model's shape alone."""

from __future__ import annotations

from dataclasses import dataclass

from flowspec.core import limits

WORK_BYTES = 64 << 20
"""Activations of one prefill chunk, queued frames and allocator slack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceMemory:
    """Bytes of a slice: its weights, the keys and values of one full context, and room to work."""

    weight_bytes: int
    cache_bytes: int
    work_bytes: int = WORK_BYTES

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes + self.work_bytes


def cache_bytes(*, layers: int, kv_heads: int, head_dim: int, context: int, element_bytes: int) -> int:
    """Keys and values of one request with a full context and a full tree."""
    return 2 * layers * kv_heads * head_dim * (context + limits.TREE_NODES_MAX) * element_bytes


def mib(size_bytes: int) -> str:
    """A size for people."""
    return f"{size_bytes / 2**20:.0f} MiB" if size_bytes < 10 * 2**30 else f"{size_bytes / 2**30:.1f} GiB"
