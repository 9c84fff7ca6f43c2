"""How many rows a segment may have, by what links were seen to take."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flowspec.core.head.flights import Bounds
from flowspec.core.head.link_pacer import WAITING_MAX, LinkPacer
from flowspec.core.protocol.messages import Hop

CLOCKS_S = (1000.0, 5.0, 70.0)
"""What the clocks of three stages show when the head's shows 0."""


def land(portions: LinkPacer, rows: int, travels_s: list[float], compute_s: float = 0.1) -> None:
    """A segment that left at 10 s is back after these travels; the last of them is the way back."""
    now_s, hops = 10.0, []
    for clock_s, travel_s in zip(CLOCKS_S, travels_s, strict=False):
        now_s += travel_s
        hops.append(Hop(received_s=clock_s + now_s, queued_s=0.0, compute_s=compute_s, own_s=0.0, rows=rows))
        now_s += compute_s
    portions.learn(hops, rows, 10.0, now_s + travels_s[-1])


def link(row_s: float, delay_s: float = 0.0) -> Callable[[int], list[float]]:
    """Travels where the second of three links takes so long for a row, and each one delays."""
    return lambda rows: [delay_s, delay_s + row_s * rows, delay_s, delay_s]


def test_a_quick_first_portion_frees_the_rest_at_once() -> None:
    portions = LinkPacer(8, 128)
    assert (portions.rows, portions.may_follow(0), portions.may_follow(8)) == (8, True, False)
    land(portions, 8, link(row_s=0.0, delay_s=0.001)(8))
    assert (portions.rows, portions.may_follow(10_000)) == (128, True)


def test_after_a_slow_first_portion_another_size_tells_the_rate() -> None:
    portions, slow = LinkPacer(8, 128), link(row_s=0.08)
    land(portions, 8, slow(8))
    assert (portions.rows, portions.may_follow(0), portions.may_follow(1)) == (4, True, False)
    land(portions, 4, slow(4))
    assert portions.rows == 6, "half a second's worth"
    assert (portions.may_follow(WAITING_MAX * 6 - 1), portions.may_follow(WAITING_MAX * 6)) == (True, False)


@pytest.mark.parametrize("first", [1, 8])
def test_a_link_that_is_far_and_fast_is_not_taken_for_slow(first: int) -> None:
    portions, far = LinkPacer(first, 128), link(row_s=0.0001, delay_s=0.6)
    for _ in range(6):
        land(portions, portions.rows, far(portions.rows))
    assert portions.rows == 128


def test_a_link_that_becomes_slow_makes_portions_small_and_one_that_is_quick_again_large() -> None:
    portions = LinkPacer(8, 128)
    for rows in (8, 128, 1):
        land(portions, rows, link(row_s=0.0001)(rows))
    assert portions.rows == 128
    land(portions, 20, link(row_s=0.08)(20))
    assert portions.rows == 5
    for rows, expected in ((1, 16), (16, 128)):
        land(portions, rows, link(row_s=0.0001)(rows))
        assert portions.rows == expected


def test_delays_as_any_network_has_them_bound_nothing() -> None:
    portions = LinkPacer(8, 128)
    for rows, late_s in ((8, 0.0), (1, 0.0), (2, 0.2), (3, 0.4), (1, 0.3)):
        land(portions, rows, [0.001, 0.001 + late_s, 0.001, 0.001])
    assert portions.rows == 128


def test_segments_that_waited_for_others_on_a_slow_link_do_not_hide_it() -> None:
    portions, slow = LinkPacer(8, 128), link(row_s=0.08)
    for rows in (8, 4, 6, 6, 1):
        land(portions, rows, slow(rows))
    for _ in range(10):
        land(portions, 1, link(row_s=0.08, delay_s=0.3)(1))
        land(portions, 6, slow(6))
    assert portions.rows_s[1] == pytest.approx(0.08, rel=0.5)
    assert portions.rows < 16


def test_segments_that_lost_rows_on_their_way_prove_no_rate() -> None:
    portions = LinkPacer(8, 128)
    hop = Hop(received_s=1.0, queued_s=0.0, compute_s=0.0, own_s=0.0, rows=3)
    portions.learn([hop], 8, 0.0, 0.001)
    assert portions.rows == 8


def test_without_a_first_portion_only_prompts_are_bounded() -> None:
    portions = LinkPacer(None, 128)
    assert (portions.rows, portions.are_bound, portions.may_follow(10_000)) == (128, False, True)


def test_a_prompt_in_short_chunks_makes_no_slow_link_quick() -> None:
    portions, slow = Bounds(prefill_chunk=1, prefill_first=1).portions(), link(row_s=0.4)
    for _ in range(4):
        land(portions, 1, slow(1))
    assert portions.rows <= 2, "what is guessed is bounded"
    portions = Bounds(prefill_chunk=1, prefill_first=1).portions()
    for _ in range(3):
        land(portions, portions.rows, link(row_s=0.0001)(portions.rows))
    assert not portions.are_bound
