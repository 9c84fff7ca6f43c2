"""What a pipeline slot costs, learnt from the stages' own reports: time by number of nodes, length of a trip, the window.

`slot_s(n)` is the time of the slowest stage (or link) for n nodes, the t(n) of the marginal-value rule: a node is worth
sending while `value >= rate * (slot_s(n + 1) - slot_s(n))` (OPT-Tree, SpecExec; `docs/methods.md`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from flowspec.core.messages import Hop

SHARE_NEW = 0.2
"""Weight of the newest measurement in a moving average."""
BUCKETS = 11
"""Row counts 1, 2-3, 4-7, ... up to 512 and more."""
RATE_MEMORY_S = 64.0
"""Slots after which old answers' speed has faded to a third; times the slot time."""


class Curve:
    """Seconds by rows: a moving average for each power of two, read as a growing curve with straight lines between."""

    def __init__(self) -> None:
        self._seconds = [0.0] * BUCKETS
        self._rows = [0.0] * BUCKETS
        self._known = False
        self._points: list[tuple[float, float]] = []

    @property
    def is_known(self) -> bool:
        return self._known

    def learn(self, rows: int, seconds: float) -> None:
        index = min(BUCKETS - 1, rows.bit_length() - 1)
        if self._rows[index] == 0:
            self._rows[index], self._seconds[index] = rows, seconds
        else:
            self._rows[index] += SHARE_NEW * (rows - self._rows[index])
            self._seconds[index] += SHARE_NEW * (seconds - self._seconds[index])
        self._known = True
        self._points = []

    def at(self, rows: int) -> float:
        """Seconds for so many rows; 0 while nothing is known."""
        points = self._points or self._grow()
        if not points:
            return 0.0
        if rows <= points[0][0]:
            return points[0][1]
        for (low, low_s), (high, high_s) in itertools.pairwise(points):
            if rows <= high:
                return low_s + (high_s - low_s) * (rows - low) / (high - low)
        last, last_s = points[-1]
        if len(points) == 1:
            return last_s
        before, before_s = points[-2]
        return last_s + (last_s - before_s) * (rows - last) / (last - before)

    def _grow(self) -> list[tuple[float, float]]:
        """The known points, made to grow: noise must not make more rows look cheaper."""
        highest = 0.0
        for rows, seconds in zip(self._rows, self._seconds, strict=True):
            if rows > 0:
                highest = max(highest, seconds)
                self._points.append((rows, highest))
        return self._points


class Costs:
    """The cost of slots in one pipeline, and the speed of its answers."""

    def __init__(self, stage_count: int) -> None:
        self.stage_count = stage_count
        self._stages = [Curve() for _ in range(stage_count)]
        self._links = Curve()
        self._slots: dict[int, float] = {}
        self._tokens = 0.0
        self._seconds = 0.0
        self._told_s: float | None = None

    @property
    def is_known(self) -> bool:
        """Whether any segment has come back yet."""
        return self._links.is_known

    def learn(self, hops: Sequence[Hop], rows: int, round_trip_s: float) -> None:
        """A segment of `rows` nodes came back `round_trip_s` after it was sent."""
        self._slots = {}
        if rows and len(hops) == self.stage_count:
            for curve, hop in zip(self._stages, hops, strict=True):
                if hop.rows and not hop.dead_between_layers:
                    curve.learn(hop.rows, hop.compute_s + hop.own_s)
            spent_s = sum(hop.queued_s + hop.compute_s + hop.own_s for hop in hops)
            self._links.learn(rows, max(0.0, round_trip_s - spent_s))

    def slot_s(self, rows: int) -> float:
        """Time of the slowest stage or link for so many nodes."""
        found = self._slots.get(rows)
        if found is None:
            transfer_s = (self._links.at(rows) - self._links.at(1)) / (self.stage_count + 1)
            found = self._slots[rows] = max(transfer_s, *(curve.at(rows) for curve in self._stages))
        return found

    def trip_s(self, rows: int) -> float:
        """One full trip through empty stages and links."""
        return sum(curve.at(rows) for curve in self._stages) + self._links.at(rows)

    def window(self, rows: int, slack: float) -> int:
        """Segments in flight that keep the bottleneck fed: a trip's worth of slots, and `slack` of a slot more."""
        slot_s = self.slot_s(rows)
        if slot_s <= 0:
            return self.stage_count
        return max(1, min(2 * self.stage_count + 2, int(self.trip_s(rows) / slot_s + slack)))

    def emitted(self, tokens: int, now_s: float, *, is_busy: bool) -> None:
        """`tokens` are known now; times between answers do not count."""
        if self._told_s is not None and is_busy:
            elapsed_s = now_s - self._told_s
            memory_s = RATE_MEMORY_S * max(self.slot_s(1), 1e-6)
            keep = max(0.0, 1 - elapsed_s / memory_s)
            self._tokens = self._tokens * keep + tokens
            self._seconds = self._seconds * keep + elapsed_s
        self._told_s = now_s

    @property
    def rate(self) -> float:
        """Tokens per second of late; 0 while nothing is known."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0
