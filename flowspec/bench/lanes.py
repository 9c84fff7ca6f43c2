"""A trace laid out in lanes: the drafter, each stage, each link, and the output; with the first token at 0
seconds.

A trace knows how long each trip spent where, and spreads what remains over the links evenly
(`bench.trace`), so where messages differ in size passes of one stage may seem to overlap by some
milliseconds. A stage runs one segment after the other, in order: the later pass is moved behind the earlier
one. Lengths, and so the busy shares, are as measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from flowspec.bench.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A stage computing a segment from `start_s` to `end_s`, of which it had waited in its queue since
    `arrived_s`."""

    segment: int
    arrived_s: float
    start_s: float
    end_s: float
    alive: int
    dead: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpan:
    """A segment with living rows on a link; link 0 leads from the head to the first stage, the last one back
    to the head."""

    segment: int
    start_s: float
    end_s: float
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPass:
    """A pass of the drafter."""

    start_s: float
    end_s: float


@dataclass(slots=True)
class Lanes:
    """By stage and by link, in order of segments. `drops` are instants and numbers of rows, all dead, of
    segments that a stage did not run."""

    stages: list[list[Bar]]
    links: list[list[LinkSpan]]
    drops: list[list[tuple[float, int]]]
    drafter: list[DraftPass] = field(default_factory=list)
    commits: list[tuple[float, int]] = field(default_factory=list)

    @property
    def start_s(self) -> float:
        """When the first thing happened."""
        lanes: tuple[Sequence[Bar | LinkSpan | DraftPass], ...] = (self.drafter, *self.stages, *self.links)
        return min(
            (*(each.start_s for lane in lanes for each in lane), *(at_s for at_s, _ in self.commits)),
            default=0.0,
        )

    @property
    def end_s(self) -> float:
        """When the last token was there."""
        return max((at_s for at_s, _ in self.commits), default=0.0)

    def commits_within(self, start_s: float, end_s: float) -> list[tuple[float, int]]:
        return [commit for commit in self.commits if start_s < commit[0] <= end_s]

    def rate(self, start_s: float, end_s: float) -> float:
        """Tokens per second in a span of time."""
        tokens = sum(count for _, count in self.commits_within(start_s, end_s))
        return tokens / (end_s - start_s) if end_s > start_s else 0.0


def lanes_of(trace: Trace, stages: int) -> Lanes:
    origin_s = min((at_s for at_s, _ in trace.commits), default=0.0)
    found = Lanes(
        stages=[[] for _ in range(stages)],
        links=[[] for _ in range(stages + 1)],
        drops=[[] for _ in range(stages)],
    )
    found.drafter = [
        DraftPass(start_s=each.started_s - origin_s, end_s=each.ended_s - origin_s) for each in trace.passes
    ]
    found.commits = [(at_s - origin_s, tokens) for at_s, tokens in trace.commits]
    free_s = [float("-inf")] * stages
    for trip in sorted(trace.trips, key=lambda trip: trip.segment):
        left_s, rows = trip.sent_s - origin_s, trip.rows
        for stay in trip.visits()[:stages]:
            arrived_s = max(stay.arrived_s - origin_s, left_s)
            if rows:
                found.links[stay.stage].append(
                    LinkSpan(segment=trip.segment, start_s=left_s, end_s=arrived_s, rows=rows)
                )
            left_s = arrived_s + (stay.left_s - stay.arrived_s)
            if stay.ended_s > stay.started_s:
                start_s = max(stay.started_s - origin_s, arrived_s, free_s[stay.stage])
                end_s = start_s + (stay.ended_s - stay.started_s)
                bar = Bar(
                    segment=trip.segment,
                    arrived_s=arrived_s,
                    start_s=start_s,
                    end_s=end_s,
                    alive=stay.alive,
                    dead=stay.dead,
                )
                found.stages[stay.stage].append(bar)
                free_s[stay.stage] = end_s
                left_s = end_s + (stay.left_s - stay.ended_s)
            elif rows:
                found.drops[stay.stage].append((left_s, rows))
            rows = stay.alive
        if rows:
            back_s = max(trip.back_s - origin_s, left_s)
            found.links[stages].append(
                LinkSpan(segment=trip.segment, start_s=left_s, end_s=back_s, rows=rows)
            )
    return found


def busy_share(lane: Iterable[Bar | DraftPass], start_s: float, end_s: float) -> float:
    """The share of a span of time that a lane's bars fill."""
    filled_s = sum(max(0.0, min(each.end_s, end_s) - max(each.start_s, start_s)) for each in lane)
    return filled_s / (end_s - start_s) if end_s > start_s else 0.0
