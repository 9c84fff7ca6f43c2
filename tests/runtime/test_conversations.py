"""Which conversation answers a prompt."""

from __future__ import annotations

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.head.sharing import BLOCK
from flowspec.core.protocol.model_spec import SlidingWindow
from flowspec.runtime.conversations import Conversations


class Pool:
    """A pool, and what the head was told to forget."""

    def __init__(self, bound: int, window: SlidingWindow | None = None, *, room: int = 0) -> None:
        """With a `room` so many tokens fit beside all others, and prompts begin with copies."""
        self.forgotten: list[int] = []
        numbers = count(1)
        self.pool = Conversations(
            bound, lambda: next(numbers), self.forgotten.append, window, lambda tokens: tokens <= room
        )

    def turn(self, prompt: list[int], answer: list[int]) -> int:
        number = self.pool.take(prompt, 1)
        self.pool.give_back(number, [*prompt, *answer])
        return number


def test_the_next_turn_takes_its_conversation() -> None:
    made = Pool(4)
    first = made.turn([1, 2, 3], [4, 5])
    other = made.turn([9, 8, 7], [6])
    assert first != other
    assert made.turn([1, 2, 3, 4, 5, 6, 7], [8]) == first
    assert made.turn([9, 8, 7, 6, 5], [4]) == other
    assert made.forgotten == []


def test_a_dialogue_with_the_same_system_text_is_left_alone() -> None:
    """It would lose its own turns for the few tokens that both begin with."""
    made = Pool(4)
    first = made.turn([1, 2, 3, 4], [5, 6, 7])
    assert made.turn([1, 2, 9, 9, 9], [9]) != first
    assert made.turn([1, 2, 3, 4, 5, 6, 7, 8], []) == first


def test_a_dialogue_goes_on_without_the_thoughts_of_its_answer() -> None:
    """Templates leave them out, and the end of a prompt that calls for them."""
    made = Pool(4, SlidingWindow(tokens=2, back=2, step=2, snapshot=4))
    first = made.turn([1, 2, 3, 4, 5, 6, 7, 8, 100], list(range(101, 150)))
    assert made.turn([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 100], [101]) == first
    assert made.turn([1, 2, 3, 4, 12], []) != first


def test_one_that_the_prompt_goes_back_too_far_in_is_left_alone() -> None:
    """Its layers with a window have given back what the prompt would need; where it stands others go on."""
    made = Pool(4, SlidingWindow(tokens=3, back=2, step=1))
    first = made.turn([1, 2, 3, 4, 5, 6, 7], [8])
    assert made.turn([1, 2, 3, 4, 9], []) != first, "its fifth token sees the third, which is held no more"
    assert made.turn([1, 2, 3, 4, 5, 9], []) == first, "its sixth sees the fourth, which is held"


SYSTEM = list(range(100, 100 + 2 * BLOCK))


def test_what_branches_off_leaves_a_dialogue_to_whoever_goes_on_with_it() -> None:
    made = Pool(8, room=1000)
    long = list(range(200, 300))
    first = made.turn([*SYSTEM, 1], long)
    other = made.turn([*SYSTEM, 2, 3], long[::-1])
    again = made.turn([*SYSTEM, 1], [5])
    assert len({first, other, again}) == 3, "another question, and the same once more"
    assert made.turn([*SYSTEM, 1, *long, 6], [7]) == first
    assert made.turn([*SYSTEM, 2, 3, *long[::-1], 8], [7]) == other
    assert made.forgotten == []


def test_what_is_copied_is_not_forgotten_for_the_copy() -> None:
    made = Pool(2, room=1000)
    first, second = made.turn([*SYSTEM, 1], list(range(200, 300))), made.turn([9, 8, 7], [])
    third = made.turn([*SYSTEM, 2, 3], [])
    assert made.forgotten == [second]
    assert made.pool.idle == [first, third]


def test_where_there_is_no_room_for_two_the_gain_decides() -> None:
    for room, is_taken in ((len(SYSTEM) + 2, True), (len(SYSTEM) + 3, False)):
        made = Pool(8, room=room)
        first = made.turn([*SYSTEM, 1], list(range(40)))
        assert (made.turn([*SYSTEM, 2, 3], [4]) == first) is is_taken


def test_what_is_too_short_to_be_copied_is_taken_over() -> None:
    made = Pool(8, room=1000)
    first = made.turn([1, 2, 3], list(range(50)))
    assert made.turn([1, 2, 3], [9]) == first


def test_the_least_recently_used_is_forgotten() -> None:
    made = Pool(2)
    first, second = made.turn([1], []), made.turn([2], [])
    assert made.turn([1, 1], []) == first
    third = made.turn([3], [])
    assert made.forgotten == [second]
    assert made.pool.idle == [first, third]
    failed = made.pool.take([4], 1)
    made.pool.drop(failed)
    assert made.forgotten == [second, first, failed]


@given(
    st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 2), min_size=1, max_size=6)), max_size=40),
    st.integers(1, 4),
)
def test_there_are_never_more_than_the_bound_unless_all_are_used(
    steps: list[tuple[bool, list[int]]], bound: int
) -> None:
    made, used = Pool(bound), dict[int, list[int]]()
    for ends, prompt in steps:
        if ends and used:
            number, asked = used.popitem()
            made.pool.give_back(number, asked)
        else:
            number = made.pool.take(prompt, 1)
            assert number not in used
            assert number not in made.forgotten
            used[number] = prompt
        assert len(used) + len(made.pool.idle) <= max(bound, len(used))
