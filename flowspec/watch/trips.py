"""Where a segment was when: its trip from the head through the stages and back, as the head of any world sees
it.

A stage reports durations, not instants (clocks of devices differ), so what a trip's links took together is
spread over its hops evenly. In virtual time that is exact for equal links; elsewhere it is the best that can
be known without equal clocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from flowspec.core.head.events import SegmentTimed
from flowspec.core.protocol.messages import Hop


@dataclass(frozen=True, slots=True, kw_only=True)
class StageVisit:
    """A segment's stay at a stage. `alive` rows went on from there; `dead` ones ran and were dropped, in or
    after the layers.

    `dropped` rows left in the queue, before they ran.
    """

    stage: int
    arrived_s: float
    started_s: float
    ended_s: float
    left_s: float
    alive: int
    dead: int
    dropped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trip:
    """A segment of `rows` nodes, from the head and back."""

    segment: int
    rows: int
    sent_s: float
    back_s: float
    hops: tuple[Hop, ...]

    @property
    def spent_s(self) -> float:
        """At stages: waiting, computing, and their own work."""
        return sum(hop.spent_s for hop in self.hops)

    @property
    def link_s(self) -> float:
        return max(0.0, self.back_s - self.sent_s - self.spent_s)

    def visits(self) -> list[StageVisit]:
        found = []
        at_s, link_s = self.sent_s, self.link_s / (len(self.hops) + 1)
        for stage, hop in enumerate(self.hops):
            arrived_s = at_s + link_s
            started_s = arrived_s + hop.queued_s
            ended_s = started_s + hop.compute_s
            at_s = ended_s + hop.own_s
            dead = hop.dead_between_layers + hop.dead_late
            found.append(
                StageVisit(
                    stage=stage,
                    arrived_s=arrived_s,
                    started_s=started_s,
                    ended_s=ended_s,
                    left_s=at_s,
                    alive=hop.rows - dead,
                    dead=dead,
                    dropped=hop.dead_in_queue,
                )
            )
        return found


def trip_of(timed: SegmentTimed, back_s: float) -> Trip:
    return Trip(segment=timed.segment, rows=timed.rows, sent_s=timed.sent_s, back_s=back_s, hops=timed.hops)
