"""Curves that grow, and what a slot, a trip, a window and the rate follow from: made-up reports of stages in,
seconds out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from flowspec.core.head.costs import MISSES_AT_FIRST, RATE_MEMORY_S, Costs, LearntCurve, Wire
from flowspec.core.protocol.messages import Hop


def curve(*points: tuple[int, float]) -> LearntCurve:
    made = LearntCurve()
    for rows, seconds in points:
        made.learn(rows, seconds)
    return made


def hop(rows: int, compute_s: float, *, own_s: float = 0.0, queued_s: float = 0.0, between: int = 0) -> Hop:
    return Hop(
        received_s=0.0,
        queued_s=queued_s,
        compute_s=compute_s,
        own_s=own_s,
        rows=rows,
        dead_between_layers=between,
    )


def learn(
    costs: Costs,
    hops: Sequence[Hop],
    rows: int,
    links_s: Sequence[float] | float = 0.0,
    *,
    sent_s: float = 0.0,
) -> None:
    """A segment that was sent at `sent_s` is back; `links_s` is what each link took, the last one's back to
    the head, or each of them."""
    each_s = [links_s] * (len(hops) + 1) if isinstance(links_s, float) else links_s
    now_s, stamped = sent_s, []
    for number, (report, link_s) in enumerate(zip(hops, each_s, strict=False)):
        now_s += link_s
        stamped.append(structs.replace(report, received_s=now_s + 1000 * number))  # stages' clocks differ
        now_s += report.queued_s + report.compute_s + report.own_s
    costs.learn(stamped, rows, sent_s, now_s + each_s[-1])


def test_between_points_memory_is_the_bound_until_computing_is() -> None:
    made = curve((1, 0.010), (4, 0.016), (16, 0.064))
    found = [made.at(rows) for rows in (1, 2, 3, 4, 5, 10, 16, 32)]
    assert found == pytest.approx([0.010, 0.010, 0.012, 0.016, 0.020, 0.040, 0.064, 0.128])


@given(
    st.lists(st.tuples(st.integers(1, 512), st.floats(0, 10)), min_size=1, max_size=40),
    st.lists(st.integers(1, 600), max_size=20),
)
def test_every_curve_grows_and_stays_between_what_was_measured(
    points: list[tuple[int, float]], rows: list[int]
) -> None:
    made = curve(*points)
    asked = sorted({1, 512, *rows})
    found = [made.at(count) for count in asked]
    assert found == pytest.approx(sorted(found))
    seconds = [each for _, each in points]
    assert min(seconds) - 1e-9 <= found[0]
    assert made.at(min(count for count, _ in points)) <= max(seconds) + 1e-9
    assert made.at(513) * 512 <= made.at(512) * 513 + 1e-9, "at most in proportion to the rows"


def test_a_slot_is_as_long_as_the_slowest_stage_or_link() -> None:
    costs = Costs(2)
    assert not costs.is_known
    assert costs.slot_s(4) == costs.trip_s(4) == costs.rate == 0
    learn(costs, [hop(1, 0.010, own_s=0.001), hop(1, 0.030)], 1, 0.002)
    assert costs.is_known
    assert costs.slot_s(1) == pytest.approx(0.030)
    assert costs.trip_s(1) == pytest.approx(0.011 + 0.030 + 0.006)
    # At 16 rows the first stage is the slow one, its own work included, and the link between the two takes 60
    # ms more.
    for number in range(1, 30):
        learn(
            costs,
            [hop(16, 0.070, own_s=0.010), hop(16, 0.060)],
            16,
            [0.002, 0.062, 0.002],
            sent_s=float(number),
        )
    assert costs.slot_s(16) == pytest.approx(0.080)
    assert costs.trip_s(16) == pytest.approx(0.080 + 0.060 + 0.066, rel=0.05)
    # At 100 rows that link is slower than either stage.
    learn(costs, [hop(100, 0.1), hop(100, 0.1)], 100, [0.002, 0.377, 0.002], sent_s=30.0)
    assert costs.slot_s(100) == pytest.approx(0.375, rel=0.02)


def test_a_link_is_timed_whatever_the_clocks_say_and_waiting_is_not_counted() -> None:
    """A row takes 2 ms, a message 5 ms more; every second segment leaves while the one before it is still on
    its way."""
    wire, free_s = Wire(), 0.0
    chance = random.Random(1)
    for number in range(200):
        rows, sent_s = chance.choice((0, 1, 1, 4, 16)), 0.100 * (number // 2)
        waits_s = max(0.0, free_s - sent_s)
        free_s = sent_s + waits_s + 0.002 * rows
        assert (
            wire.learn(rows, sent_s, free_s + 0.005 - 7.0) == pytest.approx(waits_s, abs=1e-3) or number < 5
        )
    assert wire.at(16) == pytest.approx(0.032, rel=0.05)


def test_segments_that_lost_rows_or_have_many_alone_teach_nothing() -> None:
    costs = Costs(1)
    learn(costs, [hop(8, 0.080)], 8)
    learn(costs, [hop(8, 0.010, between=4)], 8, sent_s=1.0)
    assert costs.slot_s(8) == pytest.approx(0.080)
    learn(costs, [hop(0, 0.0)], 8, sent_s=2.0)
    assert costs.slot_s(8) == pytest.approx(0.080), "nor does one that lost all of them in the queue"
    costs = Costs(1)
    learn(costs, [hop(128, 0.5)], 128)
    assert not costs.is_known
    learn(costs, [hop(4, 0.02)], 4, sent_s=1.0)
    assert costs.is_known


@pytest.mark.parametrize(
    ("computing", "links_s", "slack", "window"),
    [
        ((0.01, 0.01, 0.01, 0.01), 0.0, 0.5, 4),  # equal stages: one segment each
        ((0.01, 0.01, 0.01, 0.01), 0.0, 1.0, 5),
        ((0.01, 0.01, 0.01, 0.01), 0.02, 0.5, 6),  # and two on the links
        ((0.10, 0.01, 0.01, 0.01), 0.0, 0.5, 1),  # one slow stage is fed by hardly more than one segment
        ((0.10, 0.01, 0.01, 0.01), 0.0, 0.7, 2),
        ((0.01, 0.01, 0.01, 0.01), 0.9, 0.5, 10),  # never more than two per stage and two
        ((0.01, 0.0, 0.0, 0.0), 0.0, 0.0, 1),
    ],
)
def test_the_window_is_a_trips_worth_of_slots(
    computing: tuple[float, ...], links_s: float, slack: float, window: int
) -> None:
    costs = Costs(len(computing))
    assert costs.window(1, slack) == len(computing), "one for each stage while nothing is known"
    learn(costs, [hop(1, seconds) for seconds in computing], 1, links_s / (len(computing) + 1))
    assert costs.window(1, slack) == window


def test_a_node_more_costs_a_longer_slot_and_where_a_miss_follows_a_longer_trip() -> None:
    costs = Costs(2)
    learn(costs, [hop(1, 0.010), hop(1, 0.004)], 1)
    learn(costs, [hop(2, 0.020), hop(2, 0.008)], 2, sent_s=1.0)
    slot_s, trip_s = 0.010, 0.014
    assert costs.marginal_s(1) == pytest.approx(MISSES_AT_FIRST * trip_s + (1 - MISSES_AT_FIRST) * slot_s)
    for is_missed, expected in ((True, trip_s), (False, slot_s)):
        for _ in range(300):
            costs.emitted(1, 0.0, is_busy=True, is_missed=is_missed)
        assert costs.marginal_s(1) == pytest.approx(expected, rel=1e-3)


def test_the_rate_follows_a_change_of_speed_of_the_answer_under_way() -> None:
    costs = Costs(1)
    learn(costs, [hop(1, 0.1)], 1)
    now_s = 0.0
    for tokens, count in ((4, 100), (1, 300)):
        for _ in range(count):
            costs.emitted(tokens, now_s, is_busy=True, is_missed=False)
            now_s += 0.1
        assert costs.rate == pytest.approx(10 * tokens, rel=0.05)
    costs.emitted(1, now_s + 2 * RATE_MEMORY_S * 0.1, is_busy=True, is_missed=False)
    assert costs.rate == pytest.approx(1 / (2 * RATE_MEMORY_S * 0.1 + 0.1), rel=0.01), (
        "after a long silence nothing old counts"
    )
    costs = Costs(1)
    learn(costs, [hop(1, 0.1)], 1)
    emitted = partial(costs.emitted, is_missed=False)
    emitted(1, 5.0, is_busy=False)
    assert costs.rate == 0, "an answer's first token took the prompt's time"
    emitted(2, 5.5, is_busy=True)
    assert costs.rate == pytest.approx(4)
    emitted(1, 60.0, is_busy=False)
    assert costs.rate == pytest.approx(4), "the time between answers does not count"
    emitted(2, 60.5, is_busy=True)
    assert costs.rate == pytest.approx(4)


@pytest.mark.parametrize(("row_s", "found"), [(0.1, (1, 0.1)), (0.001, None)])
def test_a_link_is_named_if_a_row_takes_longer_on_it_than_at_every_stage(
    row_s: float, found: tuple[int, float] | None
) -> None:
    costs = Costs(2)
    assert costs.slow_link() is None, "nothing is known"
    for at in range(8):
        rows, sent_s = (40 if at % 2 else 1), 10.0 * at
        arrived_s = sent_s + 0.02 + row_s * rows
        hops = [
            Hop(received_s=came_s, queued_s=0.0, compute_s=0.02, own_s=0.0, rows=rows)
            for came_s in (sent_s, arrived_s)
        ]
        costs.learn(hops, rows, sent_s, arrived_s + 0.02)
    assert costs.slow_link() == (None if found is None else (1, pytest.approx(row_s, rel=0.05)))


def test_stages_are_timed_by_rows_that_ran_and_a_trip_by_the_quickest_of_late() -> None:
    costs = Costs(1)
    learn(costs, [hop(1, 0.010, queued_s=5.0)], 1)
    learn(costs, [hop(4, 0.040)], 16, sent_s=9.0)
    assert costs.slot_s(1) == pytest.approx(0.010)
    assert costs.slot_s(4) == pytest.approx(0.040)
    assert costs.trip_s(1) == pytest.approx(0.010)
    # Every fourth trip the stage has its cores to itself; the others take three times as long.
    costs = Costs(1)
    for number in range(40):
        seconds = 0.010 if number % 4 == 0 else 0.030
        learn(costs, [hop(1, seconds, queued_s=5.0)], 1, sent_s=9.0 * number)
    assert costs.trip_s(1) > 0.020
    assert costs.quickest_trip_s(1) == pytest.approx(0.010, rel=0.2)
    for number in range(200):
        learn(costs, [hop(1, 0.030)], 1, sent_s=400.0 + number)
    assert costs.quickest_trip_s(1) == pytest.approx(0.030, rel=0.01), "what was quick is forgotten"
