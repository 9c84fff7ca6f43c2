"""A slot map hands out the lowest free slot, never more than its capacity, and shows each row what it may
attend to."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.stage.slots import SlotMap
from flowspec.errors import PeerError


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


def test_freed_slots_come_back_lowest_first_whatever_the_order_they_were_freed_in() -> None:
    slots = SlotMap(6)
    for position in range(6):
        slots.allocate(position, committed=False)
    slots.free([3])
    slots.free([4, 1])
    assert [slots.allocate(9, committed=False) for _ in range(3)] == [1, 3, 4]


def test_a_freed_slot_cannot_be_freed_again() -> None:
    slots = SlotMap(2)
    slot = slots.allocate(0, committed=True)
    slots.free([slot])
    with pytest.raises(AssertionError, match="free already"):
        slots.free([slot])


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
