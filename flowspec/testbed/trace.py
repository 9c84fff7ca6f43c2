"""What happened when, as the head of any world sees it: trips of segments through the stages, drafts, commits.

A stage reports durations, not instants (clocks of devices differ), so what a trip's links took together is spread over its
hops evenly. In virtual time that is exact for equal links; elsewhere it is the best that can be known without equal clocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flowspec.core.events import Drafted, Emit, HeadCommand, HeadEvent, Timed
from flowspec.core.messages import Hop


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """A segment's stay at a stage. `alive` rows went on from there; `dead` ones ran and were dropped, in or after the layers."""

    segment: int
    stage: int
    arrived_s: float
    started_s: float
    ended_s: float
    left_s: float
    alive: int
    dead: int


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
        return sum(hop.queued_s + hop.compute_s + hop.own_s for hop in self.hops)

    @property
    def link_s(self) -> float:
        return max(0.0, self.back_s - self.sent_s - self.spent_s)

    def stays(self) -> list[Stay]:
        found = []
        at_s, link_s = self.sent_s, self.link_s / (len(self.hops) + 1)
        for stage, hop in enumerate(self.hops):
            arrived_s = at_s + link_s
            started_s = arrived_s + hop.queued_s
            ended_s = started_s + hop.compute_s
            at_s = ended_s + hop.own_s
            dead = hop.dead_between_layers + hop.dead_late
            found.append(
                Stay(
                    segment=self.segment,
                    stage=stage,
                    arrived_s=arrived_s,
                    started_s=started_s,
                    ended_s=ended_s,
                    left_s=at_s,
                    alive=hop.rows - dead,
                    dead=dead,
                )
            )
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """The drafter at work."""

    started_s: float
    ended_s: float


@dataclass(slots=True)
class Trace:
    """A recording of one answer; `watch` is given every event of the head with the commands it led to."""

    trips: list[Trip] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    commits: list[tuple[float, int]] = field(default_factory=list)

    def watch(self, event: HeadEvent, commands: Sequence[HeadCommand], now_s: float) -> None:
        if isinstance(event, Drafted):
            self.passes.append(Pass(started_s=event.started_s, ended_s=event.ended_s))
        for command in commands:
            if isinstance(command, Timed):
                trip = Trip(segment=command.segment, rows=command.rows, sent_s=command.sent_s, back_s=now_s, hops=command.hops)
                self.trips.append(trip)
            elif isinstance(command, Emit):
                self.commits.append((now_s, len(command.tokens)))

    def since(self, start_s: float, end_s: float) -> Trace:
        """What of it was sent or begun between two instants."""
        return Trace(
            trips=[trip for trip in self.trips if start_s <= trip.sent_s <= end_s],
            passes=[each for each in self.passes if start_s <= each.started_s <= end_s],
            commits=[commit for commit in self.commits if start_s <= commit[0] <= end_s],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """What a slot cost in an answer: `tau_s` of the slowest stage or link, `trip_s` of a trip through empty stages."""

    tau_s: float
    trip_s: float

    def bound_s(self, tokens_per_commit: float, share_in_flight: float) -> float:
        """The least time per token: `(1 - rho) L + max(0, 1/S - (1 - rho)) tau` (`docs/methods.md`)."""
        missed = 1 - share_in_flight
        return missed * self.trip_s + max(0.0, 1 / max(tokens_per_commit, 1e-9) - missed) * self.tau_s


def slots_of(trace: Trace) -> Slots | None:
    """Means over the segments that were alive all the way; None without any."""
    full = [trip for trip in trace.trips if trip.hops and all(hop.rows for hop in trip.hops)]
    if not full:
        return None
    count = len(full)
    stages = [sum(trip.hops[at].compute_s + trip.hops[at].own_s for trip in full) / count for at in range(len(full[0].hops))]
    link_s = sum(trip.link_s for trip in full) / count
    return Slots(tau_s=max(stages), trip_s=sum(stages) + link_s)
