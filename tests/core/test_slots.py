"""A slot map hands out the lowest free slot and shows each row what it may attend to; a request may begin
with a copy of another's slots."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.protocol.messages import Open, Release
from flowspec.core.protocol.sliding_window import SlidingWindow
from flowspec.core.stage.events import ClearSlots, CloseCache, ControlArrived, OpenCache, StageCommand, Trim
from flowspec.core.stage.slots import SlotMap
from flowspec.core.stage.stage import StageCore
from flowspec.errors import PeerError
from tests.core.stages import arrive, commit, finish, opened, opening, run_of, segment


def test_what_is_only_reserved_takes_no_memory() -> None:
    """256 Opens of the longest context took 180 MiB beside the budget for caches."""
    tracemalloc.start()
    maps = [SlotMap(1 << 20) for _ in range(256)]
    for slots in maps:
        slots.allocate(0, committed=True)
    taken_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert taken_bytes < 1 << 20
    assert {slots.high for slots in maps} == {1}


def test_a_map_grows_as_far_as_it_was_reserved() -> None:
    slots = SlotMap(1000)
    assert [slots.allocate(place, committed=place % 2 == 0) for place in range(1000)] == list(range(1000))
    assert slots.position.tolist() == list(range(1000))
    assert slots.committed.tolist() == [True, False] * 500
    with pytest.raises(PeerError, match="at most 1000 nodes"):
        slots.allocate(0, committed=True)


@given(
    st.integers(1, 8),
    st.lists(st.tuples(st.booleans(), st.integers(0, 20), st.booleans(), st.integers(0, 99)), max_size=60),
)
def test_any_order_of_taking_and_freeing_keeps_the_map_dense(
    capacity: int, steps: list[tuple[bool, int, bool, int]]
) -> None:
    slots, held = SlotMap(capacity), {}
    for take, position, committed, pick in steps:
        if take and len(held) == capacity:
            with pytest.raises(PeerError, match=f"at most {capacity} nodes"):
                slots.allocate(position, committed=committed)
        elif take:
            slot = slots.allocate(position, committed=committed)
            assert slot == min(set(range(capacity)) - set(held))
            held[slot] = (position, committed)
        elif held:
            slot = sorted(held)[pick % len(held)]
            slots.free([slot])
            del held[slot]
        assert slots.high == max(held, default=-1) + 1
        assert slots.position.tolist() == [held.get(s, (-1, False))[0] for s in range(len(slots.position))]
        assert slots.committed.tolist() == [held.get(s, (-1, False))[1] for s in range(len(slots.position))]
        assert slots.from_position(position) == [s for s in sorted(held) if held[s][0] >= position]


def test_a_freed_slot_cannot_be_freed_again() -> None:
    slots = SlotMap(2)
    slot = slots.allocate(0, committed=True)
    slots.free([slot])
    with pytest.raises(AssertionError, match="free already"):
        slots.free([slot])


@given(st.data())
def test_the_mask_equals_its_definition(data: st.DataObject) -> None:
    nodes = data.draw(st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=12))
    slots = SlotMap(16)
    for position, committed in nodes:
        slots.allocate(position, committed=committed)
    freed = data.draw(st.sets(st.sampled_from(range(len(nodes))), max_size=len(nodes) - 1))
    slots.free(sorted(freed))
    own = st.sampled_from(sorted(set(range(len(nodes))) - freed))
    branches = data.draw(st.lists(st.lists(own, min_size=1, max_size=3), min_size=1, max_size=5))
    positions = [nodes[branch[0]][0] for branch in branches]
    expected = [
        [
            s in branch or (s not in freed and nodes[s][1] and nodes[s][0] < position)
            for s in range(slots.high)
        ]
        for position, branch in zip(positions, branches, strict=True)
    ]
    mask = slots.visible(positions, branches)
    assert mask.dtype == np.bool_
    assert mask.tolist() == expected


def copying(*, epoch: int = 0, keep: int = 2, length: int = 4, root: int = 3) -> ControlArrived:
    """Request 2 begins with what request 1 begins with."""
    return ControlArrived(
        message=opening(request=2, epoch=epoch, keep=keep, length=length, root=root, source=1)
    )


def opening_of(commands: list[StageCommand]) -> OpenCache:
    (found,) = [each for each in commands if isinstance(each, OpenCache)]
    return found


def guessed() -> StageCore:
    """One that has run a prompt of three nodes, a guess that became part of the output, and one that did
    not."""
    core = opened()
    finish(core, run_of(arrive(core, segment(1, [(3, 2, 3), (4, 2, 3)]))))
    arrive(core, segment(2, [], newest=commit(4)))
    return core


def test_a_copy_holds_the_committed_nodes_in_order() -> None:
    core = guessed()
    command = opening_of(core.handle(copying(keep=4, length=6, root=5), 0.0))
    assert (command.request, command.slots) == (2, 64)
    assert command.copied is not None
    assert (command.copied.source, command.copied.slots.tolist()) == (1, [0, 1, 2, 4])
    core.validate()
    slots = core.slot_maps()[2]
    assert slots.position[: slots.high].tolist() == [0, 1, 2, 3]
    assert slots.tokens[: slots.high].tolist() == [0, 10, 20, 40]
    assert core.fired["copied"] == 1


def test_what_follows_a_copy_sees_it_and_the_source_goes_on() -> None:
    core = guessed()
    rows = [(12, 11, 2), (13, 12, 3)]
    opening = copying().message
    assert isinstance(opening, Open)
    part = segment(3, rows, prompt=True, newest=commit(base=4, request=2), opens=opening)
    commands = arrive(core, part)
    (job,) = run_of(commands).parts
    assert job.slots.tolist() == [2, 3]
    assert job.visible.tolist() == [[True, True, True, False], [True, True, True, True]]
    assert job.key_positions.tolist() == [0, 1, 2, 3]
    finish(core, run_of(commands))
    (own,) = run_of(arrive(core, segment(4, [(5, 4, 4)], newest=commit(4)))).parts
    assert own.visible.tolist() == [[True, True, True, True, True]], "what was not committed is gone"
    core.validate()


def test_an_open_that_comes_twice_copies_once() -> None:
    core = guessed()
    core.handle(copying(), 0.0)
    assert core.handle(copying(), 0.0) == []


def test_a_copy_outlives_its_source() -> None:
    core = guessed()
    core.handle(copying(), 0.0)
    core.handle(ControlArrived(message=Release(request=1)), 0.0)
    assert core.requests() == [2]
    core.validate()


def test_an_open_that_a_release_has_overtaken_copies_nothing() -> None:
    core = guessed()
    core.handle(ControlArrived(message=Release(request=2)), 0.0)
    core.handle(ControlArrived(message=Release(request=1)), 0.0)
    assert core.handle(copying(), 0.0) == [], "its source is gone, too"


def test_a_request_that_is_known_keeps_nothing_of_its_own() -> None:
    core = guessed()
    first = opening(request=2, length=2, root=1)
    job = run_of(
        arrive(core, segment(5, [(0, -1, 0)], prompt=True, newest=commit(base=2, request=2), opens=first))
    )
    commands = core.handle(copying(epoch=1), 0.0)
    assert [type(each) for each in commands] == [CloseCache, OpenCache]
    sent = finish(core, job)
    assert [each for each in sent if isinstance(each, Trim)] == []
    core.validate()
    assert core.slot_maps()[2].high == 2


def test_what_no_correct_head_copies_is_refused() -> None:
    core = guessed()
    unknown = opening(request=2, keep=2, length=4, root=3, source=7)
    with pytest.raises(PeerError, match="keeps 2 tokens of request 7, but nothing of that is held here"):
        core.handle(ControlArrived(message=unknown), 0.0)
    with pytest.raises(PeerError, match="keeps 5 tokens of 1, of which 4 have run"):
        core.handle(copying(keep=5, length=6, root=5), 0.0)
    large = opening(request=2, keep=2, length=4, root=3, source=1, slots=65)
    with pytest.raises(PeerError, match="at most 64 slots"):
        core.handle(ControlArrived(message=large), 0.0)


def test_a_path_with_gaps_is_not_copied() -> None:
    core = StageCore(is_last=False, slots_max=64)
    rows = [(node, node - 1, node) for node in (0, 1, 3)]
    finish(core, run_of(arrive(core, segment(0, rows, prompt=True, opens=opening(length=5, root=4)))))
    with pytest.raises(PeerError, match="each of the first 4 positions; 3 are here"):
        core.handle(copying(keep=4, length=6, root=5), 0.0)


def windowed(run: int) -> StageCore:
    """One that has run so many positions of a prompt of twelve, whose layers with a window of 2 hold those
    from 3 before the last on."""
    core = StageCore(is_last=True, slots_max=64, sliding_window=SlidingWindow(tokens=2, back=1, step=1))
    for first in range(0, run, 2):
        rows = [(node, node - 1, node) for node in (first, first + 1)]
        finish(
            core, run_of(arrive(core, segment(first, rows, prompt=True, opens=opening(length=12, root=11))))
        )
    return core


def test_layers_with_a_window_copy_what_they_hold() -> None:
    core = windowed(8)
    commands = core.handle(copying(keep=7, length=9, root=8), 0.0)
    command = opening_of(commands)
    assert command.copied is not None
    assert command.copied.slots.tolist() == list(range(7))
    assert command.window_slots == 64
    held = core._requests[1].windowed
    assert held is not None
    copy = core._requests[2].windowed
    assert copy is not None
    first = held.held.given_back
    assert sorted(copy.slots.held[: copy.slots.high].tolist()) == list(range(first, 7))
    assert len(command.copied.window_slots) == 7 - first
    assert not [each for each in commands if isinstance(each, ClearSlots)], "nothing of it goes"
    core.validate()


def test_layers_with_a_window_copy_nothing_that_they_gave_back() -> None:
    core = windowed(12)
    with pytest.raises(PeerError, match="keeps 4 tokens, but layers with a window of 2 hold nothing before"):
        core.handle(copying(keep=4, length=9, root=8), 0.0)


def test_freed_slots_come_back_lowest_first_whatever_the_order_they_were_freed_in() -> None:
    slots = SlotMap(6)
    for position in range(6):
        slots.allocate(position, committed=False)
    slots.free([3])
    slots.free([4, 1])
    assert [slots.allocate(9, committed=False) for _ in range(3)] == [1, 3, 4]


def test_a_row_sees_what_is_committed_before_it_and_its_own_branch() -> None:
    slots = SlotMap(8)
    prompt = [slots.allocate(p, committed=True) for p in range(3)]
    left, right = (slots.allocate(3, committed=False) for _ in range(2))
    leaf = slots.allocate(4, committed=False)
    mask = slots.visible([1, 3, 4], [[prompt[1]], [right], [leaf, left]])
    assert mask.tolist() == [
        [True, True, False, False, False, False],
        [True, True, True, False, True, False],
        [True, True, True, True, False, True],
    ]


def test_a_freed_slot_is_seen_by_nobody_even_when_it_was_committed() -> None:
    slots = SlotMap(4)
    taken = [slots.allocate(p, committed=True) for p in range(3)]
    slots.free([taken[1]])
    assert slots.visible([9], [[taken[2]]]).tolist() == [[True, False, True]]
    again = slots.allocate(5, committed=False)
    assert again == taken[1]
    assert slots.visible([9], [[taken[2]]]).tolist() == [[True, False, True]]
