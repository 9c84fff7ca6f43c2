"""When a root waits for the drafter: the rule against schedules that are played out, and a head that is
played by hand; and how many rows a segment may have, by what links were seen to take."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from flowspec.core.head.events import DrafterLost
from flowspec.core.head.flights import Bounds
from flowspec.core.head.link_pacer import WAITING_MAX, LinkPacer
from flowspec.core.methods.continuous import Continuous
from flowspec.core.methods.patience import Hope, Slots, gain_s
from flowspec.core.protocol.messages import Hop
from tests.core.scripted_head import (
    MISS,
    NOTHING,
    ScriptedHead,
    drafts,
    emits,
    hops,
    kinds,
    sends,
    sends_all,
    wakes,
)
from tests.nightly import nightly

SLOT_S = 1 / 8
PASS_S = 1 / 64


def level(slot_s: float) -> Slots:
    return Slots(alone_s=slot_s, usual_s=slot_s, longer_s=0.0)


def hope(pass_s: float, chance: float, reach: float = 1.0) -> Hope:
    return Hope(first_s=pass_s, pass_s=pass_s, reach=reach, chance=chance)


def played(wait_s: float, pass_s: float, right: int) -> float:
    """When the segment with the last right guess departs; a slot takes a second."""
    departs_s, sent = wait_s, int(wait_s / pass_s + 1e-9)
    while sent < right:
        departs_s += 1
        sent = int(departs_s / pass_s + 1e-9)
    return departs_s


@pytest.mark.parametrize("pass_s", nightly([0.04, 0.3], [0.04, 0.11, 0.3, 0.7]))
@pytest.mark.parametrize("chance", nightly([0.5, 0.86], [0.5, 0.72, 0.86]))
def test_what_waiting_saves_is_what_comes_of_it(pass_s: float, chance: float) -> None:
    draw = random.Random(1)
    runs = []
    for _ in range(20_000):
        right = 0
        while draw.random() < chance and right < 60:
            right += 1
        runs.append(right)
    at_once_s = sum(played(0.0, pass_s, right) for right in runs)
    waits = [passes * pass_s for passes in range(1, 13) if passes * pass_s < 1]
    saved = [
        (at_once_s - sum(played(wait_s, pass_s, right) for right in runs)) / len(runs) for wait_s in waits
    ]
    found = gain_s([hope(pass_s, chance)], 0, level(1.0))
    clear = [saved_s for saved_s, wait_s in zip(saved, waits, strict=True) if saved_s > 0.1 * wait_s]
    assert found == pytest.approx(max(clear, default=0.0), abs=0.02)


def test_a_longer_trip_and_answers_that_wait_outweigh_what_is_saved() -> None:
    """Where a row takes long, guesses make the correction late at every stage."""
    assert gain_s([hope(0.1, 0.6)], 0, Slots(alone_s=1.0, usual_s=1.2, longer_s=0.2)) > 0
    assert gain_s([hope(0.1, 0.6)], 0, Slots(alone_s=1.0, usual_s=1.2, longer_s=8 * 0.2)) == 0
    assert gain_s([hope(0.1, 0.7)] * 2, 0, level(1.0)) == pytest.approx(
        2 * gain_s([hope(0.1, 0.7)], 0, level(1))
    )
    assert 0 < gain_s([hope(0.1, 0.7)], 1, level(1.0)) < gain_s([hope(0.1, 0.7)], 0, level(1.0))
    assert gain_s([hope(0.1, 0.7)], 9, level(1.0)) == 0


def played_head(pass_s: float = PASS_S, requests: int = 1, *, patience: bool = True) -> ScriptedHead:
    """One stage; the drafter takes so long for a pass, is idle now, and has had nothing to say."""
    head = ScriptedHead(Continuous(patience=patience), stages=1)
    for rows in (1, 64):
        head.core.costs.learn(hops(1, rows, SLOT_S), rows, -SLOT_S, 0.0)
    for request in range(1, requests + 1):
        head.ask(request, (5,))
    while head.job is not None:
        head.now_s += pass_s
        head.propose({})
    return head


def missed(head: ScriptedHead) -> list[tuple[object, ...]]:
    return head.back({0: MISS})


def test_a_root_that_was_missed_waits_for_a_quick_drafter_but_no_longer_than_a_slot() -> None:
    head = played_head()
    at_s = head.now_s
    assert missed(head) == [emits(MISS), drafts(1), wakes(at_s + 1.5 * PASS_S)]
    head.now_s += PASS_S
    said = head.propose({1: [(20, 0.6), (21, 0.3)]})
    assert said[0] == drafts(2, 3), "a second pass pays, too"
    head.now_s += PASS_S
    said = head.propose({2: [(30, 0.1)], 3: [(31, 0.1)]})
    assert said[0] == sends(1, 2, 3, 4, 5), "what a third could say is not likely to be needed"
    head = played_head()
    at_s = head.now_s
    said = missed(head)
    passes = 0
    while "send" not in kinds(said):
        passes += 1
        assert passes * PASS_S <= SLOT_S
        head.now_s = at_s + passes * PASS_S
        said = head.propose(lambda node: [(40, 0.99)])
    assert passes > 2


def test_a_root_does_not_wait_for_a_slow_or_resting_drafter_or_a_prompt() -> None:
    head = played_head(pass_s=1.2 * SLOT_S)
    assert missed(head)[:2] == [emits(MISS), sends(1)]
    head = played_head()
    assert isinstance(head.core.method, Continuous)
    head.core.method._governor._stance.is_resting = True
    assert missed(head) == [emits(MISS), sends(1)]
    head = played_head()
    head.ask(2, range(5, 9))
    assert sends(1) in missed(head)


def test_a_root_goes_when_the_drafter_is_late_or_lost() -> None:
    head = played_head()
    at_s = head.now_s
    missed(head)
    assert head.wake(at_s + 1.4 * PASS_S) == [wakes(at_s + 1.5 * PASS_S)], "too early: once more"
    assert head.wake(at_s + 1.5 * PASS_S) == [sends(1)]
    assert head.job is not None, "which still is at it"
    head = played_head()
    missed(head)
    assert head.give(NOTHING) == [], "it waits"
    assert head.give(DrafterLost(drafter=0)) == [sends(1)]
    head.job = None
    assert head.back({1: MISS}) == [emits(MISS), sends(2)]


def test_roots_of_several_answers_wait_together() -> None:
    head = played_head(requests=2)
    assert kinds(head.back({0: MISS})).count("send") == 2, "a root, and the other's prompt"
    head.now_s += PASS_S
    head.propose({})
    head.core.method.take((0.7, 64))
    at_s = head.now_s
    assert head.back({1: MISS}) == [emits(MISS), drafts(2), wakes(at_s + 1.5 * PASS_S)]
    assert head.back_all({2: {0: MISS}}) == [emits(MISS, request=2)], "nothing is in flight, and both wait"
    assert head.wake(at_s + 1.5 * PASS_S) == [sends_all({1: (2,), 2: (1,)})]


def test_a_root_goes_along_where_another_answer_fills_the_slot_anyway() -> None:
    """The root that waits saves less than the other one's guesses would lose."""
    head = played_head(requests=2)
    head.back({0: MISS})
    head.now_s += PASS_S
    head.propose({})
    head.core.method.take((0.7, 64))
    other = head.request(2)
    other.root_sent = True
    other.tree.add(other.tree.root, 30, 0.9)
    said = head.back({1: MISS})
    assert dict(said[1][1]).keys() == {1, 2}


# ------------------------------------------------------------------------------------------------------ links

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


def test_a_first_portion_frees_the_rest_or_another_size_tells_the_rate() -> None:
    portions = LinkPacer(8, 128)
    assert (portions.rows, portions.may_follow(0), portions.may_follow(8)) == (8, True, False)
    land(portions, 8, link(row_s=0.0, delay_s=0.001)(8))
    assert (portions.rows, portions.may_follow(10_000)) == (128, True)
    portions, slow = LinkPacer(8, 128), link(row_s=0.08)
    land(portions, 8, slow(8))
    assert (portions.rows, portions.may_follow(0), portions.may_follow(1)) == (4, True, False)
    land(portions, 4, slow(4))
    assert portions.rows == 6, "half a second's worth"
    assert (portions.may_follow(WAITING_MAX * 6 - 1), portions.may_follow(WAITING_MAX * 6)) == (True, False)
    portions = LinkPacer(None, 128)
    assert (portions.rows, portions.are_bound, portions.may_follow(10_000)) == (128, False, True)


@pytest.mark.parametrize("first", [1, 8])
def test_a_link_that_is_far_and_fast_is_not_taken_for_slow(first: int) -> None:
    portions, far = LinkPacer(first, 128), link(row_s=0.0001, delay_s=0.6)
    for _ in range(6):
        land(portions, portions.rows, far(portions.rows))
    assert portions.rows == 128


def test_a_slow_link_makes_portions_small_whatever_waited_on_it() -> None:
    portions = LinkPacer(8, 128)
    for rows in (8, 128, 1):
        land(portions, rows, link(row_s=0.0001)(rows))
    assert portions.rows == 128
    land(portions, 20, link(row_s=0.08)(20))
    assert portions.rows == 5
    for rows, expected in ((1, 16), (16, 128)):
        land(portions, rows, link(row_s=0.0001)(rows))
        assert portions.rows == expected
    portions, slow = LinkPacer(8, 128), link(row_s=0.08)
    for rows in (8, 4, 6, 6, 1):
        land(portions, rows, slow(rows))
    for _ in range(10):
        land(portions, 1, link(row_s=0.08, delay_s=0.3)(1))
        land(portions, 6, slow(6))
    assert portions.rows_s[1] == pytest.approx(0.08, rel=0.5)
    assert portions.rows < 16
    portions, slow = Bounds(prefill_chunk=1, prefill_first=1).portions(), link(row_s=0.4)
    for _ in range(4):
        land(portions, 1, slow(1))
    assert portions.rows <= 2, "what is guessed is bounded"
    portions = Bounds(prefill_chunk=1, prefill_first=1).portions()
    for _ in range(3):
        land(portions, portions.rows, link(row_s=0.0001)(portions.rows))
    assert not portions.are_bound


def test_delays_and_segments_that_lost_rows_bound_nothing() -> None:
    portions = LinkPacer(8, 128)
    for rows, late_s in ((8, 0.0), (1, 0.0), (2, 0.2), (3, 0.4), (1, 0.3)):
        land(portions, rows, [0.001, 0.001 + late_s, 0.001, 0.001])
    assert portions.rows == 128
    portions = LinkPacer(8, 128)
    hop = Hop(received_s=1.0, queued_s=0.0, compute_s=0.0, own_s=0.0, rows=3)
    portions.learn([hop], 8, 0.0, 0.001)
    assert portions.rows == 8
