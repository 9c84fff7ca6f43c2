"""Answers wait until there is memory for their caches: never over budget, in order of arrival, and every one
gets its turn."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.head.admission import Admission
from flowspec.core.head.drafter_traits import DrafterTraits
from flowspec.core.head.events import Cancel, Forget, PipelineLost, PipelineReformed, Submit
from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Release
from flowspec.core.protocol.model_spec import SlidingWindow
from flowspec.core.stage.slots import CacheRoom
from flowspec.errors import InputError
from tests.core.scripted_head import Said, ScriptedHead, emits, ends, kinds, opens, sends
from tests.pipeline import ask

CONTEXT = 1000
ONE = CONTEXT + limits.TREE_NODES_MAX
"""Slots of an answer that may fill the context."""

WINDOW = SlidingWindow(tokens=8, back=100, step=10)
"""Layers with it hold 886 slots of a request."""


def rooms(answers: int) -> list[CacheRoom]:
    """Of stages with memory for so many answers of full length: one where a slot takes a byte, and one where
    it takes six, five of them in layers with a window."""
    need = CacheRoom(slots=0, slot_bytes=6, windowed_bytes=5).need(ONE, WINDOW.slots)
    of_six = CacheRoom(slots=-(-answers * need // 6), slot_bytes=6, windowed_bytes=5)
    return [CacheRoom(slots=answers * ONE), of_six]


def submit(request: int, tokens: int = CONTEXT, prompt: int = 3) -> Submit:
    """An answer that grows to so many tokens."""
    return ask(request, (5,) * prompt, tokens - prompt)


def head_for(answers: int, *, drafter: DrafterTraits | None = None) -> ScriptedHead:
    """A head whose stages have memory for so many answers of full length."""
    head = ScriptedHead("ar", stages=2, context=CONTEXT, drafter=drafter)
    head.core.admission.move_to([CacheRoom(slots=answers * ONE)])
    return head


def step(head: ScriptedHead) -> list[Said]:
    """The oldest segment comes back, token 9 after its last node."""
    return head.back_all({part.commit.request: {part.ids[-1]: 9} for part in head.segments[0].parts})


def test_what_an_answer_needs_is_its_tokens_and_guesses_in_whole_blocks() -> None:
    admission = Admission(CONTEXT, [DrafterTraits(context=2000)])
    small = admission.need_of(submit(1, tokens=20))
    assert (small.stages, small.drafters) == (
        (2 * limits.CACHE_BLOCK_SLOTS,),
        (5 * limits.CACHE_BLOCK_SLOTS,),
    )
    whole = admission.need_of(submit(1, tokens=5000))
    assert (whole.stages, whole.drafters) == ((ONE,), (8 * limits.CACHE_BLOCK_SLOTS,)), (
        "no more than a context"
    )
    assert Admission(CONTEXT, []).need_of(submit(1)).drafters == ()


def test_layers_with_a_window_take_no_more_than_they_hold() -> None:
    admission = Admission(CONTEXT, [], WINDOW)
    admission.move_to([CacheRoom(slots=ONE), CacheRoom(slots=1, slot_bytes=6, windowed_bytes=5)])
    assert admission.need_of(submit(1, tokens=20)).stages == (512, 6 * 512)
    assert admission.need_of(submit(1)).stages == (ONE, ONE + 5 * WINDOW.slots)
    with pytest.raises(InputError, match=f"take {-(-(ONE + 5 * WINDOW.slots) // 6)} cache slots .* for 1; "):
        admission.ask(submit(1))
    admission.move_to(rooms(2))
    admission.ask(submit(1))
    assert admission.admit([]) == (1, [])
    for answers, is_admitted in ((1, False), (2, True)):
        admission.move_to(rooms(answers))
        admission.ask(submit(1 + answers))
        assert admission.admit([]) == (1, [])
        assert (admission.admit([]) is not None) == is_admitted


def test_one_that_never_fits_is_refused_and_changes_nothing() -> None:
    head = head_for(1)
    head.core.admission.move_to([CacheRoom(slots=ONE - 1)])
    with pytest.raises(
        InputError,
        match=r"^3 tokens of prompt and 997 of answer take 1256 cache slots .* have memory for 1255; ask for",
    ):
        head.give(submit(1))
    assert not head.core.admission.is_awaited
    assert head.core.requests() == []
    assert kinds(head.give(submit(1, tokens=100))) == ["open", "send"]


def test_who_comes_too_many_waits_and_begins_when_another_is_forgotten() -> None:
    head = head_for(1)
    assert head.give(submit(1)) == [opens(), sends(0, 1, 2)]
    assert head.give(submit(2)) == []
    assert head.core.admission.waiting == [2]
    assert head.give(Forget(request=1)) == [ends("cancelled")], "a segment of it is in flight"
    assert step(head) == [("release", 1), opens(2), sends(0, 1, 2, request=2)]
    assert head.sent[-1].releases == (Release(request=1),), (
        "no stage runs it before it has let go of the other"
    )


def test_a_release_rides_until_a_segment_that_did_is_back() -> None:
    head = head_for(3)
    for number in (1, 2):
        head.give(submit(number))
    head.give(Forget(request=1))
    assert [segment.releases for segment in head.sent] == [(), ()]
    step(head)  # the last of 1, so it is released now
    step(head)  # left before
    step(head)
    assert [segment.releases for segment in head.sent[2:]] == [(Release(request=1),), ()]


def test_the_cache_of_a_conversation_that_rests_is_given_up_the_oldest_first() -> None:
    head = head_for(1)
    head.core.admission.move_to([CacheRoom(slots=ONE + 512)])
    for number in (1, 2):
        head.give(submit(number, tokens=4))
        step(head)
    head.ask(1, (5, 5, 5, 9), 1)  # the younger one now
    step(head)
    said = head.give(submit(3, tokens=CONTEXT))
    assert said == [("release", 2), opens(3), sends(0, 1, 2, request=3)]
    assert head.sent[-1].releases == (Release(request=2, epoch=0),)
    said = head.ask(2, (5, 5, 5, 9), 1)
    assert said[0] == ("release", 1), "it comes back in place of the other, and begins with a prefill"
    assert said[1] == opens(2, epoch=1, keep=0)
    assert len(said[2][1][2]) == 4


def test_after_a_loss_those_who_fit_no_longer_wait_their_turn_and_go_on_where_they_stood() -> None:
    head = head_for(3)
    for number in (1, 2):
        head.give(submit(number))
    for _ in range(2):
        step(head)
    head.give(PipelineLost())
    head.give(submit(3))
    head.segments.clear()
    assert head.give(PipelineReformed(stage_count=1, rooms=(CacheRoom(slots=ONE),))) == [
        opens(1, epoch=1),
        sends(0, 1, 2, 3),
    ]
    assert head.core.admission.waiting == [2, 3], "who came first goes first"
    assert head.core.admission.held.stages == (ONE,)
    head.give(Cancel(request=1))
    said = step(head)
    assert said == [("release", 1), opens(2, epoch=1), sends(0, 1, 2, 3, request=2)], (
        "with what was known of it"
    )
    assert head.tokens[2] == [9]


def growing_head() -> ScriptedHead:
    """Two answers of 254 tokens of prompt, each about to outgrow its 512 slots; there is room for 256
    more."""
    head = head_for(1)
    head.core.admission.move_to([CacheRoom(slots=5 * limits.CACHE_BLOCK_SLOTS)])
    head.core.admission.reserved_tokens = 1
    for number in (1, 2):
        head.give(submit(number, prompt=254))
    assert head.core.admission.held.stages == (4 * limits.CACHE_BLOCK_SLOTS,)
    while len(head.tokens) < 2:
        step(head)
    return head


def test_who_waits_for_room_goes_on_where_it_stood_or_gives_its_own_up() -> None:
    head = growing_head()
    assert kinds(step(head)) == ["emit", "send"], "of the first one, which grows"
    assert step(head) == [emits(9, request=2)]
    assert head.core.admission.waiting == [2]
    head.give(Cancel(request=1))
    assert step(head) == [("release", 1), sends(255, request=2)], "its own caches are there"
    assert kinds(step(head)) == ["emit", "send"]
    assert head.tokens[2] == [9, 9, 9]
    head = growing_head()
    while "release" not in kinds(said := step(head)):
        assert head.tree(1).committed_length < 600
    assert ("release", 2) in said
    assert head.core.admission.held.stages == (4 * limits.CACHE_BLOCK_SLOTS,)
    head.give(Forget(request=1))
    said = step(head)
    assert said[:2] == [("release", 1), opens(2, epoch=1)]
    assert head.request(2).opening.length == 256, "with what was known of it"


def test_room_is_held_for_what_an_answer_has_and_some_more() -> None:
    admission = Admission(4000, [DrafterTraits(context=4000)])
    admission.ask(submit(1, tokens=4000, prompt=100))
    assert admission.admit([]) == (1, [])
    held = admission.holding(1)
    assert held.stages == (6 * limits.CACHE_BLOCK_SLOTS,), "100, 1024 and 256"
    assert admission.holds(1, 1124)
    assert not admission.holds(1, 1125)
    assert admission.grow(1, 1125, []) == []
    assert admission.holding(1).stages == (10 * limits.CACHE_BLOCK_SLOTS,)
    assert admission.holding(1).drafters > held.drafters
    assert admission.grow(1, 3900, []) == []
    assert admission.holding(1) == admission.need_of(submit(1, tokens=4000, prompt=100)), "no more than all"


@given(
    room=st.integers(1, 6), tokens=st.lists(st.integers(4, CONTEXT), min_size=1, max_size=12), data=st.data()
)
def test_never_over_budget_in_order_and_nobody_starves(
    room: int, tokens: list[int], data: st.DataObject
) -> None:
    """Conversations ask, grow, end, are forgotten and lose their stages in any order."""
    drafter = DrafterTraits(
        context=CONTEXT, cache_slots=data.draw(st.integers(0, 4)) * (CONTEXT + limits.DRAFT_NODES_MAX)
    )
    admission = Admission(CONTEXT, [drafter], WINDOW)
    admission.reserved_tokens = data.draw(st.sampled_from([1, 200, CONTEXT]))
    admission.move_to(rooms(room))
    unborn, active, resting = deque(range(len(tokens))), [], []  # type: ignore[var-annotated]
    began: list[int] = []

    def idle() -> list[int]:
        return [*resting, *(each for each in reversed(active) if each not in running)]

    def give_up(given_up: list[int]) -> None:
        assert set(given_up) <= set(idle())
        for each in given_up:
            if each in resting:
                resting.remove(each)

    def admit() -> None:
        while (found := admission.admit(idle())) is not None:
            number, given_up = found
            began.append(number)
            assert number == next(each for each in active if each not in running), (
                "the oldest of those who wait"
            )
            give_up(given_up)
            running.append(number)
        assert admission.room.has(admission.held)

    running: list[int] = []
    for _ in range(data.draw(st.integers(0, 40))):
        step = data.draw(st.sampled_from(["ask", "again", "grow", "end", "forget", "lost"]))
        if step == "ask" and unborn:
            number = unborn.popleft()
            admission.ask(submit(number, tokens[number]))
            active.append(number)
        elif step == "again" and resting:
            number = resting.pop(0)
            admission.ask(submit(number, tokens[number]))
            active.append(number)
        elif step == "grow" and running:
            number = data.draw(st.sampled_from(running))
            given = admission.grow(number, data.draw(st.integers(4, tokens[number])), idle())
            if given is None:
                running.remove(number)
            else:
                give_up(given)
        elif step == "end" and running:
            number = running.pop(data.draw(st.integers(0, len(running) - 1)))
            active.remove(number)
            admission.end(number)
            resting.append(number)
        elif step == "forget" and resting:
            admission.release(resting.pop())
        elif step == "lost":
            admission.move_to(rooms(data.draw(st.integers(1, 6))))
            running.clear()
        admit()
    while active:
        assert running, "somebody waits although nobody runs"
        number = running.pop(0)
        active.remove(number)
        admission.end(number)
        resting.append(number)
        admit()
    assert not admission.is_awaited
