"""Lanes of a timeline: without overlaps, losing no time."""

from __future__ import annotations

import pytest

from flowspec.bench.lanes import Bar, Lanes, LinkSpan, lanes_of
from flowspec.bench.timeline import _typical_start_s
from flowspec.bench.trace import Pass, Trace
from flowspec.core.protocol.messages import Hop
from flowspec.watch.trips import Trip


def hop(queued_s: float, compute_s: float, rows: int, dead: int = 0, dead_in_queue: int = 0) -> Hop:
    return Hop(
        received_s=0.0,
        queued_s=queued_s,
        compute_s=compute_s,
        own_s=0.0,
        rows=rows,
        dead_late=dead,
        dead_in_queue=dead_in_queue,
    )


def by_hand() -> Trace:
    """Two segments through two stages, at instants that begin anywhere; the second dies at the last stage."""
    first = Trip(
        segment=0, rows=3, sent_s=100.0, back_s=105.0, hops=(hop(0.0, 1.0, 3), hop(0.0, 1.0, 3, dead=2))
    )
    second = Trip(
        segment=1,
        rows=2,
        sent_s=100.5,
        back_s=105.5,
        hops=(hop(0.0, 2.0, 2), hop(0.0, 0.0, 0, dead_in_queue=2)),
    )
    return Trace(
        trips=[first, second], passes=[Pass(started_s=99.0, ended_s=99.5)], commits=[(99.5, 1), (105.0, 2)]
    )


def test_lanes_begin_with_the_first_token_and_follow_each_trip() -> None:
    lanes = lanes_of(by_hand(), 2)
    assert lanes.commits == [(0.0, 1), (5.5, 2)]
    assert (lanes.drafter[0].start_s, lanes.drafter[0].end_s) == (-0.5, 0.0)
    assert (lanes.start_s, lanes.end_s) == (-0.5, 5.5)
    assert lanes.stages[0][0] == Bar(segment=0, arrived_s=1.5, start_s=1.5, end_s=2.5, alive=3, dead=0)
    assert lanes.stages[1] == [Bar(segment=0, arrived_s=3.5, start_s=3.5, end_s=4.5, alive=1, dead=2)]
    assert lanes.links[2] == [LinkSpan(segment=0, start_s=4.5, end_s=5.5, rows=1)]


def test_a_pass_moves_behind_the_one_before_it_and_keeps_its_length() -> None:
    early = Trip(
        segment=1, rows=2, sent_s=100.5, back_s=104.0, hops=(hop(0.0, 2.0, 2),)
    )  # as if it had begun at 101.25
    before = Trip(segment=0, rows=1, sent_s=100.0, back_s=103.0, hops=(hop(0.0, 1.0, 1),))  # from 101 to 102
    lanes = lanes_of(Trace(trips=[early, before], commits=[(100.0, 1)]), 1)
    assert [(bar.segment, bar.start_s, bar.end_s) for bar in lanes.stages[0]] == [
        (0, 1.0, 2.0),
        (1, 2.0, 4.0),
    ]
    assert lanes.stages[0][1].arrived_s == 1.25


def test_the_window_is_where_an_answer_is_as_fast_as_on_the_whole() -> None:
    def laid(*commits: tuple[float, int]) -> Lanes:
        return Lanes(stages=[], links=[], drops=[], commits=[(0.0, 1), *commits])

    stalled = laid(*((at / 10, 1) for at in range(1, 41)), *((7 + at / 10, 1) for at in range(41)))
    even = laid(*((at / 2, 1) for at in range(1, 23)))
    assert stalled.rate(0.0, 11.0) == pytest.approx(81 / 11)
    for both in ([stalled], [stalled, even]):
        start_s = _typical_start_s(both, 2.0, 11.0)
        assert stalled.rate(start_s, start_s + 2) == pytest.approx(81 / 11, rel=0.2), "nothing at 5 seconds"
    assert _typical_start_s([even], 2.0, 11.0) == pytest.approx(4.5), "the middle is as good as any"
    assert _typical_start_s([laid()], 2.0, 0.0) == 0
