"""What models propose below the nodes of one request, and how much of it the tree has grown."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from flowspec.core.head.fusion import Offers, Ranked
from flowspec.core.head.lazy_heap import is_mostly_stale


@dataclass(slots=True)
class Growth:
    """What was proposed below the living nodes of one request, and how much of it are nodes by now.

    `found` is what each model proposed below a node, `ranked` what that comes to, of which the first `grown`
    are nodes. `ripening` is a heap of the nodes with proposals that are not nodes yet, by the value of the
    next one; `due` tells which of its entries count.
    """

    found: dict[int, dict[int, Offers]] = field(default_factory=dict)
    ranked: dict[int, Ranked] = field(default_factory=dict)
    grown: dict[int, int] = field(default_factory=dict)
    ripening: list[tuple[float, int]] = field(default_factory=list)
    due: dict[int, float] = field(default_factory=dict)

    def clear(self) -> None:
        """A new answer begins."""
        for part in (self.found, self.ranked, self.grown, self.ripening, self.due):
            part.clear()

    def forget(self, dead: Sequence[int]) -> None:
        for node in dead:
            self.found.pop(node, None)
            self.ranked.pop(node, None)
            self.grown.pop(node, None)
            self.due.pop(node, None)

    def ripen(self, node: int, log_value: float) -> None:
        """The next proposal below a node is worth so much."""
        self.due[node] = log_value
        heapq.heappush(self.ripening, (-log_value, node))

    def sweep(self, alive_count: int) -> None:
        """Forgets what does not count far down in the heap, once that is most of what it holds."""
        if is_mostly_stale(self.ripening, alive_count):
            self.ripening = [(-value, node) for node, value in self.due.items()]
            heapq.heapify(self.ripening)
