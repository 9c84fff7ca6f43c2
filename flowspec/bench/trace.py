"""What happened when, as the head of any world sees it: trips of segments through the stages (`watch.trips`),
drafts, commits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flowspec.core.head.events import (
    Drafted,
    Emit,
    HeadCommand,
    HeadEvent,
    SegmentTimed,
)
from flowspec.watch.trips import Trip


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
            if isinstance(command, SegmentTimed):
                trip = Trip(
                    segment=command.segment,
                    rows=command.rows,
                    sent_s=command.sent_s,
                    back_s=now_s,
                    hops=command.hops,
                )
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
    """What a slot cost in an answer: `tau_s` of the slowest stage or link, `trip_s` of a trip through empty
    stages."""

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
    stages = [
        sum(trip.hops[at].compute_s + trip.hops[at].own_s for trip in full) / count
        for at in range(len(full[0].hops))
    ]
    link_s = sum(trip.link_s for trip in full) / count
    return Slots(tau_s=max(stages), trip_s=sum(stages) + link_s)
