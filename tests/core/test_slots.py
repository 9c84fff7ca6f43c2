"""A slot map hands out the lowest free slot and shows each row what it may attend to; a request may begin
with a copy of another's slots."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.protocol.messages import Open, Release
from flowspec.core.stage.slots import SlotMap
from flowspec.core.stage.stage import StageCore
from flowspec.errors import PeerError
from tests.core.stages import arrive, commit, finish, opened, opening, run_of, segment, tell


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


def copying(*, epoch: int = 0, keep: int = 2, length: int = 4, root: int = 3) -> Open:
    """Request 2 begins with what request 1 begins with."""
    return opening(request=2, epoch=epoch, keep=keep, length=length, root=root, source=1)


def guessed() -> StageCore:
    """One that has run a prompt of three nodes, a guess that became part of the output, and one that did
    not."""
    core = opened()
    finish(core, run_of(arrive(core, segment(1, [(3, 2, 3), (4, 2, 3)]))))
    arrive(core, segment(2, [], newest=commit(4)))
    return core


def test_an_open_that_a_release_has_overtaken_copies_nothing() -> None:
    core = guessed()
    tell(core, Release(request=2))
    tell(core, Release(request=1))
    assert tell(core, copying()) == [], "its source is gone, too"


def test_what_no_correct_head_copies_is_refused() -> None:
    core = guessed()
    unknown = opening(request=2, keep=2, length=4, root=3, source=7)
    with pytest.raises(PeerError, match="keeps 2 tokens of request 7, but nothing of that is held here"):
        tell(core, unknown)
    with pytest.raises(PeerError, match="keeps 5 tokens of 1, of which 4 have run"):
        tell(core, copying(keep=5, length=6, root=5))
    large = opening(request=2, keep=2, length=4, root=3, source=1, slots=65)
    with pytest.raises(PeerError, match="at most 64 slots"):
        tell(core, large)


def test_a_path_with_gaps_is_not_copied() -> None:
    core = StageCore(is_last=False, slots_max=64)
    rows = [(node, node - 1, node) for node in (0, 1, 3)]
    finish(core, run_of(arrive(core, segment(0, rows, prompt=True, opens=opening(length=5, root=4)))))
    with pytest.raises(PeerError, match="each of the first 4 positions; 3 are here"):
        tell(core, copying(keep=4, length=6, root=5))
