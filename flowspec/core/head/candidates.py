"""What models propose below the nodes of one request, and how much of it the tree has grown."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from flowspec.core.head.fusion import Offers, Ranked
from flowspec.core.head.lazy_heap import is_mostly_stale


@dataclass(slots=True)
class Candidates:
    """What was proposed below the living nodes of one request, and how much of it are nodes by now.

    `offers` is what each model proposed below a node, `ranked` what that comes to, of which the first `grown`
    are nodes. `heap` has the nodes with proposals that are not nodes yet, by the value of the
    next one; `next_value` tells which of its entries count.
    """

    offers: dict[int, dict[int, Offers]] = field(default_factory=dict)
    ranked: dict[int, Ranked] = field(default_factory=dict)
    grown: dict[int, int] = field(default_factory=dict)
    heap: list[tuple[float, int]] = field(default_factory=list)
    next_value: dict[int, float] = field(default_factory=dict)

    def clear(self) -> None:
        for part in (self.offers, self.ranked, self.grown, self.heap, self.next_value):
            part.clear()

    def forget(self, dead: Sequence[int]) -> None:
        for node in dead:
            self.offers.pop(node, None)
            self.ranked.pop(node, None)
            self.grown.pop(node, None)
            self.next_value.pop(node, None)

    def push(self, node: int, log_value: float) -> None:
        """The next proposal below a node is worth so much."""
        self.next_value[node] = log_value
        heapq.heappush(self.heap, (-log_value, node))

    def sweep(self, alive_count: int) -> None:
        """Forgets what does not count far down in the heap, once that is most of what it holds."""
        if is_mostly_stale(self.heap, alive_count):
            self.heap = [(-value, node) for node, value in self.next_value.items()]
            heapq.heapify(self.heap)
