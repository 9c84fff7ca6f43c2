"""Heaps of nodes by value: an entry that died, or is worth something else by now, is skipped when it comes
up.

Far down it may never come up, so a heap is swept once such entries are most of what it holds.
"""

from __future__ import annotations

from collections.abc import Sized

SWEEP_AT = 256


def is_mostly_stale(heap: Sized, alive_count: int) -> bool:
    """Whether a heap is to be swept, of a tree with so many living nodes."""
    return len(heap) > SWEEP_AT + 4 * alive_count
