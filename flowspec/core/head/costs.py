"""What a pipeline slot costs, learnt from the stages' own reports: time by number of nodes, length of a trip,
the window.

`slot_s(n)` is the time of the slowest stage or link for n nodes, `trip_s(n)` that of all together. A node
more in a segment lengthens the slot, and where a miss follows, the trip that the correction waits for: with m
the share of walks that end in a miss, a node is worth sending while `value >= rate * (m trip' + (1 - m)
slot')` (`docs/methods.md` derives it).
"""

from __future__ import annotations

from collections.abc import Sequence

from flowspec.core.protocol.messages import Hop

SHARE_NEW = 0.2
"""Weight of the newest measurement in a moving average."""
SHARE_NEW_MISS = 0.1
MISSES_AT_FIRST = 0.3
FEW_ROWS = 4
BUCKETS = 11
"""Row counts 1, 2-3, 4-7, ... up to 512 and more."""
FORGOTTEN = 0.01
"""Share by which the quickest trip is taken to be slower each time that another was slower: contexts grow."""
QUICKEST_MIN = 0.1
WIRE_KEEP = 0.9
"""What the segments before count for when another has crossed a link."""
WIRE_DOUBT = 16.0
"""Segments of few rows alone say little of a row: as many squared rows as if one of four had taken no time.
"""
DRIFT = 1e-4
"""By how much two clocks may go apart, and more than crystals do: seconds by second."""
LINK_SLOW = 2.0
"""A link that takes so many times as long for a row as the slowest stage is what holds answers up."""
RATE_MEMORY_S = 64.0
"""Slots after which old answers' speed has faded to a third; times the slot time."""


class LearntCurve:
    """Seconds by rows: a moving average for each power of two, read as a growing curve with straight lines
    between."""

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
        """Seconds for so many rows; 0 while nothing is known.

        Between two measurements, and beyond the last, a device is taken to be bound by memory (the lower time
        holds) until computing (in proportion to the rows of the higher one) takes longer: a roofline.
        """
        points = self._points or self._grow()
        low_s = 0.0
        for known, known_s in points:
            if rows <= known:
                return max(low_s, known_s * rows / known) if low_s else known_s
            low_s = known_s
        return max(low_s, low_s * rows / points[-1][0]) if points else 0.0

    def _grow(self) -> list[tuple[float, float]]:
        """The known points, made to grow: noise must not make more rows look cheaper."""
        highest = 0.0
        for rows, seconds in zip(self._rows, self._seconds, strict=True):
            if rows > 0:
                highest = max(highest, seconds)
                self._points.append((rows, highest))
        return self._points


class Wire:
    """Seconds that a row keeps a link busy, by when segments left its one end and reached the other, each by
    that end's own clock.

    The quickest travel is that of next to nothing; how much longer a segment takes, its rows do. Clocks that
    differ add the same to all. Messages arrive in order, so one that left while another was still arriving
    had to wait for it, and that is not its own time.
    """

    def __init__(self) -> None:
        self._quickest_s = self._least_s = 0.0
        self._arrived_s = float("inf")
        self._rows = 0.0
        self._squares = 0.0
        self._seconds = 0.0

    def learn(self, rows: int, sent_s: float, received_s: float) -> float:
        """Takes note of a segment; returns how long it waited for those before it."""
        travel_s, elapsed_s = received_s - sent_s, received_s - self._arrived_s
        if elapsed_s < 0:  # the first one, or the first by other clocks: nothing to compare it with
            self._quickest_s = self._least_s = travel_s
            self._rows, self._arrived_s = 0.0, received_s
            return 0.0
        self._quickest_s = min(travel_s, self._quickest_s + DRIFT * elapsed_s)
        if travel_s < self._least_s:
            self._seconds += (
                self._least_s - travel_s
            ) * self._rows  # those before took so much longer than was thought
            self._least_s = travel_s
        ready_s = sent_s + self._quickest_s
        began_s = max(ready_s, self._arrived_s)
        self._rows = WIRE_KEEP * self._rows + rows
        self._squares = WIRE_KEEP * self._squares + rows * rows
        self._seconds = WIRE_KEEP * self._seconds + rows * (received_s - began_s)
        self._arrived_s = received_s
        return began_s - ready_s

    @property
    def row_s(self) -> float:
        """Seconds for a row, as `at`, but 0 while segments of few rows are all that is known."""
        return self._seconds / self._squares if self._squares > WIRE_DOUBT else 0.0

    def at(self, rows: int) -> float:
        """Seconds for so many rows, by least squares through none; 0 while nothing is known."""
        return rows * self._seconds / (self._squares + WIRE_DOUBT)


class Costs:
    """The cost of slots in one pipeline, and the speed of its answers."""

    def __init__(self, stage_count: int) -> None:
        self.stage_count = stage_count
        self._stages = [LearntCurve() for _ in range(stage_count)]
        self._wires = [Wire() for _ in range(stage_count)]
        self._delays_s: float | None = None
        self._slots: dict[int, float] = {}
        self._trips: dict[int, float] = {}
        self._tokens = 0.0
        self._seconds = 0.0
        self._misses = MISSES_AT_FIRST
        self._quickest = 1.0
        self._is_known = False
        self._told_s: float | None = None

    @property
    def is_known(self) -> bool:
        """Whether a segment of few rows has come back yet; a prompt's chunks alone say too little."""
        return self._is_known

    def learn(self, hops: Sequence[Hop], rows: int, sent_s: float, now_s: float) -> None:
        """A segment of `rows` nodes that was sent at `sent_s` came back; the links to the stages are timed,
        the way back carries little."""
        self._slots, self._trips = {}, {}
        if rows and len(hops) == self.stage_count:
            wires_s, left_s = 0.0, sent_s
            for wire, hop in zip(self._wires, hops, strict=True):
                crossing = hop.rows + hop.dead_in_queue
                wires_s += wire.learn(crossing, left_s, hop.received_s) + wire.at(crossing)
                left_s = hop.left_s
            for curve, hop in zip(self._stages, hops, strict=True):
                if hop.rows and not hop.dead_between_layers:
                    curve.learn(hop.rows, hop.compute_s + hop.own_s)
            spent_s = sum(hop.spent_s for hop in hops)
            delays_s = max(0.0, now_s - sent_s - spent_s - wires_s)
            self._delays_s = (
                delays_s
                if self._delays_s is None
                else self._delays_s + SHARE_NEW * (delays_s - self._delays_s)
            )
            if rows <= FEW_ROWS:
                self._is_known = True
                if all(hop.rows == rows for hop in hops):
                    busy_s = sum(hop.compute_s + hop.own_s for hop in hops) + self._links_s(rows)
                    share = busy_s / max(self.trip_s(rows), 1e-9)
                    self._quickest = max(QUICKEST_MIN, min(1.0, self._quickest * (1 + FORGOTTEN), share))

    def slot_s(self, rows: int) -> float:
        """Time of the slowest stage or link for so many nodes."""
        found = self._slots.get(rows)
        if found is None:
            found = self._slots[rows] = max(
                *(curve.at(rows) for curve in self._stages), *(wire.at(rows) for wire in self._wires)
            )
        return found

    def trip_s(self, rows: int) -> float:
        """One full trip through empty stages and links."""
        found = self._trips.get(rows)
        if found is None:
            found = self._trips[rows] = sum(curve.at(rows) for curve in self._stages) + self._links_s(rows)
        return found

    def slow_link(self, seen_s: Sequence[float] = ()) -> tuple[int, float] | None:
        """The slowest link between two stages, by the stage it leads to, and its seconds for a row; None
        where stages are slower. `seen_s` is what somebody else knows of links, in their order."""
        found_s = [wire.row_s for wire in self._wires]
        if seen_s:
            found_s = [max(pair) for pair in zip(found_s, seen_s, strict=False)]
        row_s, stage = max(((each, at) for at, each in enumerate(found_s) if at), default=(0.0, 0))
        return (stage, row_s) if row_s > LINK_SLOW * max(curve.at(1) for curve in self._stages) > 0 else None

    def _wires_s(self, rows: int) -> float:
        return sum(wire.at(rows) for wire in self._wires)

    def _links_s(self, rows: int) -> float:
        """What all links of a trip take for so many nodes."""
        return (self._delays_s or 0.0) + self._wires_s(rows)

    def quickest_trip_s(self, rows: int) -> float:
        """A trip as the quickest of late suggest it: what it takes where nothing else runs on the stages'
        processors."""
        return self._quickest * self.trip_s(rows)

    def marginal_s(self, rows: int) -> float:
        """What one node more than `rows` costs, in seconds of the answer."""
        slot_s = self.slot_s(rows + 1) - self.slot_s(rows)
        return self._misses * (self.trip_s(rows + 1) - self.trip_s(rows)) + (1 - self._misses) * slot_s

    def window(self, rows: int, slack: float) -> int:
        """Segments in flight that keep the bottleneck fed: a trip's worth of slots, and `slack` of a slot
        more."""
        slot_s = self.slot_s(rows)
        if slot_s <= 0:
            return self.stage_count
        return max(1, min(2 * self.stage_count + 2, int(self.trip_s(rows) / slot_s + slack)))

    def emitted(self, tokens: int, now_s: float, *, is_busy: bool, is_missed: bool) -> None:
        """`tokens` are known now, and what comes next is on its way or missed; times between answers do not
        count."""
        self._misses += SHARE_NEW_MISS * (is_missed - self._misses)
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
