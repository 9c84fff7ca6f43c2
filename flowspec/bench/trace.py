"""What happened when, as the head of any world sees it: trips of segments through the stages (`watch.trips`),
drafts, commits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flowspec.bench.oracle import SeenToken, Station, earliest_s
from flowspec.bench.token_log import TokenLog
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
    log: TokenLog = field(default_factory=TokenLog)

    def watch(self, event: HeadEvent, commands: Sequence[HeadCommand], now_s: float) -> None:
        self.log.watch(event, commands, now_s)
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


def slots_of(trace: Trace) -> Slots | None:
    """Means over the segments that were alive all the way; None without any."""
    full = _alive(trace.trips)
    if not full:
        return None
    count = len(full)
    stages = [
        sum(trip.hops[at].compute_s + trip.hops[at].own_s for trip in full) / count
        for at in range(len(full[0].hops))
    ]
    link_s = sum(trip.link_s for trip in full) / count
    return Slots(tau_s=max(stages), trip_s=sum(stages) + link_s)


def oracle_s(
    trace: Trace, stations: Sequence[Station] | None = None, tokens: Sequence[SeenToken] | None = None
) -> float | None:
    """How long after its first token an oracle would have known the last one of a recorded answer, at least
    (`bench.oracle`).

    `stations` are what its pipeline costs, None where that is only known from the trips; `tokens` are other
    ones than those of the answer. None for an answer of fewer than two tokens, and for one that cannot be
    followed.
    """
    tokens = trace.log.tokens() if tokens is None else tokens
    prompt = next((trip for trip in trace.trips if trip.segment == trace.log.prompt_segment), None)
    stations = _measured(trace.trips) if stations is None else stations
    if len(tokens) < 2 or prompt is None or not stations:
        return None
    known_s = earliest_s(tokens, stations, _free_s(stations, prompt))
    return known_s[-1] - known_s[0]


def _free_s(stations: Sequence[Station], prompt: Trip) -> list[float]:
    """When each is through with the prompt's last segment, at the earliest: by what it spent at stages, and
    takes elsewhere."""
    at_s, found = prompt.sent_s, []
    for station in stations:
        spent_s = station.busy_s(prompt.rows) if station.stage is None else prompt.hops[station.stage].spent_s
        found.append(at_s + spent_s)
        at_s += spent_s + station.delay_s
    return found


def _measured(trips: Sequence[Trip]) -> list[Station]:
    """Of n rows, at each stage the least that n or more took which were alive all the way, or the most if
    there were never as many; and for all links together the least that they took for any. Clocks of stages
    differ, so what a single link took is not known."""
    full = _alive(trips)
    link_s = min((trip.link_s for trip in full), default=0.0)
    last = len(full[0].hops) - 1 if full else -1
    stations = []
    for stage in range(last + 1):
        took = sorted(
            (hop.rows - hop.dead_between_layers - hop.dead_late, hop.compute_s + hop.own_s)
            for hop in (trip.hops[stage] for trip in full)
        )
        stations.append(
            Station(busy_s=_least_of(took), delay_s=link_s if stage == last else 0.0, stage=stage)
        )
    return stations


def _least_of(took: Sequence[tuple[int, float]]) -> Callable[[int], float]:
    most = took[-1][0]
    return lambda rows: min(seconds for alive, seconds in took if alive >= min(rows, most))


def _alive(trips: Sequence[Trip]) -> list[Trip]:
    """Those of which rows ran at every stage."""
    return [trip for trip in trips if trip.hops and all(hop.rows for hop in trip.hops)]
