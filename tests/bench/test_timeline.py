"""Timelines: lanes without overlaps that lose no time, Chrome traces that a viewer takes, and pictures that
are not blank."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from flowspec.bench import simulated, timeline
from flowspec.bench.config import Bench, Setup, Testbed
from flowspec.bench.lanes import Bar, Lanes, LinkSpan, busy_share, lanes_of
from flowspec.bench.synthetic import Synthetic, synthetic_cases
from flowspec.bench.timeline import _typical_start_s
from flowspec.bench.trace import Pass, Trace
from flowspec.core.protocol.messages import Hop, Sampling
from flowspec.plan.profile import find_profile
from flowspec.plan.shape import find_shape
from flowspec.plan.timing import LinkSpec
from flowspec.watch.trips import Trip
from tests.bench.benches import drafters
from tests.bench.test_plots import assert_is_drawn

STAGES = 4
METHODS = ("chunk-pp", "continuous")


@pytest.fixture(scope="module")
def traces() -> dict[str, Trace]:
    """An answer of 24 tokens by two methods; links slow enough for messages of different sizes to matter."""
    board = find_profile("jetson-orin-nano")
    testbed = Testbed(
        name="boards",
        devices=(board,) * STAGES,
        head=board,
        link=LinkSpec(bandwidth_mbps=100, delay_s=0.002),
        shape=find_shape("llama-2-7b"),
        drafter_shape=find_shape("eagle-llama-2-7b"),
        precision="float16",
    )
    setups = tuple(Setup(name=name, method=name) for name in METHODS)
    bench = Bench(
        name="traced",
        world="simulated",
        testbeds=(testbed,),
        setups=setups,
        model="synthetic",
        acceptance=0.66,
    )
    (case,) = synthetic_cases(1, [Sampling(seed=1)], 24)
    make = Synthetic(0.66, bench.context).begin(case)
    return {
        setup.name: simulated.run(bench, testbed, setup, case, drafters(setup, make)).trace
        for setup in setups
    }


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


def test_what_is_not_run_is_a_drop_and_not_a_bar() -> None:
    lanes = lanes_of(by_hand(), 2)
    assert [[rows for _, rows in drops] for drops in lanes.drops] == [[], [2]]
    assert [flight.segment for flight in lanes.links[1]] == [0, 1]
    assert [flight.segment for flight in lanes.links[2]] == [0], "no rows, nothing on the link"


def test_the_busy_share_is_of_the_window() -> None:
    bars = lanes_of(by_hand(), 2).stages[0]  # from 1.5 to 2.5, and 2 seconds from there
    assert busy_share(bars, 2.0, 3.0) == 1.0
    assert busy_share(bars, 0.0, 2.0) == 0.25
    assert busy_share(bars, 8.0, 9.0) == busy_share([], 0.0, 1.0) == busy_share(bars, 1.0, 1.0) == 0.0


@pytest.mark.parametrize("method", METHODS)
def test_a_chrome_trace_is_valid_and_loses_no_time(traces: dict[str, Trace], method: str) -> None:
    found = timeline.chrome(traces)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    events = found["traceEvents"]
    processes = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert list(processes) == list(METHODS)
    mine = [event for event in events if event["pid"] == processes[method]]
    threads = {event["tid"]: event["args"]["name"] for event in mine if event["name"] == "thread_name"}
    assert {event["tid"] for event in mine} == set(threads)
    assert len(set(threads.values())) == len(threads)
    for thread in threads:
        spans = sorted(
            (event["ts"], event["ts"] + event["dur"])
            for event in mine
            if event["tid"] == thread and event["ph"] == "X"
        )
        assert all(start >= 0 and end >= start for start, end in spans)
        assert all(after[0] >= before[1] - 1e-3 for before, after in pairwise(spans)), (
            f"{threads[thread]}: one at a time"
        )
    for stage in range(STAGES):
        passes = [
            event for event in mine if event["ph"] == "X" and threads[event["tid"]] == f"stage {stage + 1}"
        ]
        assert sum(event["dur"] for event in passes) == pytest.approx(
            1e6 * sum(trip.hops[stage].compute_s for trip in traces[method].trips)
        )
        rows = sum(event["args"]["alive"] + event["args"]["dead"] for event in passes)
        assert rows == sum(trip.hops[stage].rows for trip in traces[method].trips)
    tokens = [
        event["args"]["tokens"] for event in mine if event["ph"] == "i" and threads[event["tid"]] == "output"
    ]
    assert sum(tokens) == 24
    assert {event["ph"] for event in mine} == {"M", "X", "i"}


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


def test_a_timeline_is_drawn(traces: dict[str, Trace], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    timeline.draw(traces, tmp_path / "timeline.png", name="by hand", world="simulated", stages=STAGES)
    assert_is_drawn(tmp_path / "timeline.png", 1600, 600)
    timeline.draw(
        traces, tmp_path / "short.png", name="by hand", world="simulated", stages=STAGES, window_s=0.5
    )
    assert (tmp_path / "short.png").read_bytes() != (tmp_path / "timeline.png").read_bytes()


def test_traces_with_next_to_nothing_are_drawn_too(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for trace in (Trace(), Trace(commits=[(3.0, 1)]), by_hand()):
        timeline.draw({"ar": trace}, tmp_path / "timeline.png", name="by hand", world="cluster", stages=2)
        assert (tmp_path / "timeline.png").stat().st_size > 1000
        json.dumps(timeline.chrome({"ar": trace}), allow_nan=False)
