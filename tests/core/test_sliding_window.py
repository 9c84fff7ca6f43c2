"""Layers with a sliding window give back what no row to come can see, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.protocol import limits
from flowspec.core.protocol.model_spec import SlidingWindow, window_for
from flowspec.core.stage.events import ClearSlots, OpenCache
from flowspec.core.stage.slots import SlotMap, WindowSlots
from flowspec.core.stage.stage import StageCore
from flowspec.errors import PeerError
from tests.core.stages import arrive, commit, finish, opening, run_of, segment, tell

WINDOWS = st.builds(
    SlidingWindow,
    tokens=st.integers(1, 9),
    back=st.integers(0, 9),
    step=st.integers(1, 5),
    snapshot=st.integers(0, 9),
)


@given(WINDOWS, st.lists(st.tuples(st.integers(1, 12), st.integers(0, 30), st.integers(0, 40)), max_size=12))
def test_whoever_goes_back_finds_all_that_is_seen(
    window: SlidingWindow, turns: list[tuple[int, int, int]]
) -> None:
    """Turns of a prompt and an answer of so many tokens, each behind a place that is gone back to."""
    held, there = window.nothing_run(0), set[int]()
    length = farthest = 0
    for more, answer, place in turns:
        keep = held.keepable(min(place, length))
        assert keep in (0, min(place, length), min(place, held.prompt_end))
        prompt = keep + more
        held = held.keep(keep, prompt)
        there = {position for position in there if position < keep}
        for position in range(keep, prompt + answer):
            there.add(position)
            seen = set(range(max(0, position + 1 - window.tokens), position + 1))
            assert seen <= there
            held = held.run(position + 1)
            there = {each for each in there if each >= held.given_back or each in held.prompt}
            assert len(there) <= window.slots - limits.TREE_NODES_MAX - limits.NODES_PER_SEGMENT_MAX
        length = prompt + answer
        farthest = max(length, farthest if keep else 0)
        back = max(0, farthest - window.back)
        assert back > length or held.keepable(back) == back, "so far back at least"
        if keep == 0 and window.snapshot >= window.tokens:
            end = max(0, prompt - 1 - window.snapshot + window.tokens)
            assert held.keepable(end) == end, "the next prompt may leave the answer out"


@given(WINDOWS, st.lists(st.tuples(st.integers(1, 12), st.integers(0, 9), st.integers(0, 40)), max_size=12))
def test_whoever_has_run_more_never_holds_more(
    window: SlidingWindow, turns: list[tuple[int, int, int]]
) -> None:
    """So the head, which reckons with the most that any stage can have run, keeps what every stage holds."""
    head = stage = window.nothing_run(0)
    length = 0
    for more, behind, place in turns:
        keep = head.keepable(min(place, length))
        assert stage.keepable(keep) == keep
        length = keep + more
        head, stage = head.keep(keep, length), stage.keep(keep, length)
        head, stage = head.run(length + behind), stage.run(length)
        assert (stage.given_back, stage.snapshot) <= (head.given_back, head.snapshot)
        length += behind


@given(st.data())
def test_a_window_has_slots_of_its_own_for_what_it_holds(data: st.DataObject) -> None:
    whole, window = SlotMap(40), WindowSlots(12)
    held: dict[int, int] = {}
    for position in range(data.draw(st.integers(1, 40))):
        slot = whole.allocate(position, committed=True)
        if len(held) == 12:
            with pytest.raises(PeerError, match="at most 12 nodes"):
                window.give([slot])
            held |= {slot: -1}
            break
        (held[slot],) = window.give([slot])
        if data.draw(st.booleans()):
            below = data.draw(st.integers(0, position))
            old = [each for each in held if whole.position[each] < below]
            assert sorted(window.free_below(below, whole.position)) == sorted(held.pop(each) for each in old)
        if held and data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(sorted(held)))
            assert window.free_of([gone]) == [held.pop(gone)]
            assert window.free_of([gone]) == []
            whole.free([gone])
        expected = {place: slot for slot, place in held.items()}
        assert window.held[: window.high].tolist() == [expected.get(at, -1) for at in range(window.high)]
        window.validate()


def test_what_saves_nothing_is_left_out() -> None:
    window = window_for([0, 512], 32768)
    assert window == SlidingWindow(tokens=512)
    assert window.slots == 512 + 1024 + 256 + 256 + 512
    assert window_for([512], window.slots - limits.TREE_NODES_MAX) is None
    assert window_for([0], 32768) is None
    assert window_for([], 32768) is None
    assert window_for([4, 0], 32768, has_states=True) == SlidingWindow(
        tokens=4, back=64, step=64, snapshot=32
    )


def _stage() -> StageCore:
    """One that has run eight positions of a prompt, whose layers with a window of 2 hold those from 5 on."""
    core = StageCore(is_last=True, slots_max=64, sliding_window=SlidingWindow(tokens=2, back=1, step=1))
    for first in range(0, 8, 2):
        rows = [(node, node - 1, node) for node in (first, first + 1)]
        opens = opening(length=8, root=7)
        commands = arrive(core, segment(first, rows, prompt=True, opens=opens))
        finish(core, run_of(commands))
    arrive(core, segment(8, [(8, 7, 8)]))
    core.validate()
    return core


def test_a_stage_gives_back_before_a_segment_runs() -> None:
    core = StageCore(is_last=True, slots_max=64, sliding_window=SlidingWindow(tokens=2, back=1, step=1))
    rows = [(node, node - 1, node) for node in range(5)]
    commands = arrive(core, segment(0, rows, prompt=True, opens=opening(length=6, root=5)))
    assert commands[0] == OpenCache(request=1, slots=64, window_slots=64)
    finish(core, run_of(commands))
    commands = arrive(core, segment(1, [(5, 4, 5)], prompt=True))
    assert commands[0] == ClearSlots(request=1, slots=(), window_slots=(0, 1), passed=(0, 1, 2))
    (part,) = run_of(commands).parts
    assert part.window is not None
    assert part.slots.tolist() == [5]
    assert part.committed == 6, "the row, too, is of the output's path"
    assert part.window.slots.tolist() == [0], "a slot that was given back"
    assert part.window.held.tolist() == [5, -1, 2, 3, 4]
    assert np.flatnonzero(part.visible[0]).tolist() == [0, 1, 2, 3, 4, 5]


def test_a_stage_refuses_to_use_what_it_gave_back() -> None:
    core = _stage()
    with pytest.raises(
        PeerError, match="keeps 5 tokens, but layers with a window of 2 hold nothing before 5"
    ):
        tell(core, opening(epoch=1, keep=5, length=9, root=9))
    with pytest.raises(PeerError, match="keeps 4 tokens, but layers with a window of 2 hold nothing before"):
        tell(core, opening(request=2, keep=4, length=9, root=8, source=1))


def test_a_stage_keeps_the_end_of_a_prompt_from_a_snapshot_on() -> None:
    window = SlidingWindow(tokens=2, back=1, step=1, snapshot=2)
    core = StageCore(is_last=True, slots_max=64, sliding_window=window)
    states = []
    for first in range(0, 12, 2):  # six positions of a prompt, and six of its answer
        rows = [(node, node - 1, node) for node in (first, first + 1)]
        newest = commit(*range(6, first + 2), base=6) if first >= 6 else commit(5, base=5)
        sent = segment(first, rows, newest=newest, prompt=first < 6, opens=opening(length=6, root=5))
        commands = arrive(core, sent)
        cleared = [each for each in commands if isinstance(each, ClearSlots)]
        states += [(each.snapshot, len(each.passed), len(each.window_slots)) for each in cleared]
        finish(core, run_of(commands))
        core.validate()
    assert states == [("", 2, 1), ("", 3, 2), ("", 2, 1), ("take", 2, 0), ("", 3, 1)]
    kept = tell(core, opening(epoch=1, keep=6, length=9, root=9))
    assert [each.snapshot for each in kept if isinstance(each, ClearSlots)] == ["", "restore"]
    core.validate()
    with pytest.raises(PeerError, match="keeps 4 tokens"):
        tell(core, opening(epoch=2, keep=4, length=9, root=9))
