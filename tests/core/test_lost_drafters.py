"""A drafter that is lost is asked no more, and one that is back gets the texts that it has memory for."""

from __future__ import annotations

from flowspec.core.cluster.membership import (
    Disband,
    MembersChosen,
    Membership,
    Note,
    PipelineBroken,
    PipelineFormed,
    SessionStarted,
)
from flowspec.core.head.admission import Admission
from flowspec.core.head.drafter_traits import DrafterTraits
from flowspec.core.head.drafters import PAUSE_S
from flowspec.core.head.events import (
    Cancel,
    Draft,
    Drafted,
    DrafterLost,
    DrafterRecovered,
    HeadCommand,
    PipelineLost,
    PipelineReformed,
    Submit,
)
from flowspec.core.head.head import HeadCore
from flowspec.core.methods import make_method
from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Sampling
from flowspec.core.stage.slots import CacheRoom
from tests.core.membership_timeouts import MEMBERSHIP_TIMEOUTS

CONTEXT = 1000
TRAITS = DrafterTraits(context=CONTEXT)
ONE = CONTEXT + limits.DRAFT_NODES_MAX
"""Slots of an answer that may fill the context, at a drafter."""


def submit(request: int, tokens: int = CONTEXT) -> Submit:
    return Submit(
        request=request,
        prompt=(5, 6, 7),
        new_tokens_max=tokens - 3,
        sampling=Sampling(),
        stop_ids=frozenset(),
    )


def drafted_for(commands: list[HeadCommand]) -> dict[int, list[int]]:
    """Which drafters were asked, and about whom."""
    return {
        each.drafter: [part.commit.request for part in each.segment.parts]
        for each in commands
        if isinstance(each, Draft)
    }


def head_with(drafters: int, cache_slots: int = limits.ID_MAX) -> HeadCore:
    traits = DrafterTraits(context=CONTEXT, cache_slots=cache_slots)
    return HeadCore(
        context=CONTEXT, stage_count=2, method=make_method("continuous"), drafters=[traits] * drafters
    )


def test_one_that_is_lost_before_it_was_there_is_asked_when_it_comes() -> None:
    head = head_with(2)
    head.handle(DrafterLost(drafter=1), 0.0)
    assert set(drafted_for(head.handle(submit(1), 1.0))) == {0}
    assert drafted_for(head.handle(DrafterRecovered(drafter=1, cache_slots=ONE), 2.0)) == {1: [1]}


def test_how_fast_one_was_before_it_was_lost_says_nothing_of_it_now() -> None:
    head = head_with(2)
    head.drafters.turnaround_s[:] = [0.5, 0.5]
    head.handle(DrafterLost(drafter=1), 0.0)
    head.handle(DrafterRecovered(drafter=1, cache_slots=ONE), 2.0)
    assert head.drafters.turnaround_s == [0.5, 0.0]


def test_a_job_that_lasts_for_much_longer_than_usual_is_overdue() -> None:
    head = head_with(2)
    head.drafters.turnaround_s[:] = [0.5, 0.0]
    assert set(drafted_for(head.handle(submit(1), 10.0))) == {0, 1}
    assert head.drafters.overdue_s(10.9) == [0.0, 0.0]
    assert head.drafters.overdue_s(11.5) == [1.5, 0.0], "nothing is known of how long the other one takes"


def test_after_a_pause_how_fast_one_is_is_learnt_anew() -> None:
    head = head_with(1)

    def ask(request: int, at_s: float, takes_s: float) -> None:
        """An answer whose first job is all that there is of it."""
        (draft,) = (each for each in head.handle(submit(request), at_s) if isinstance(each, Draft))
        assert head.drafters.paused(at_s + 100.0) == [False], "it is at a job"
        done = Drafted(drafter=0, job=draft.job, proposals=(), started_s=at_s, ended_s=at_s + takes_s)
        assert not drafted_for(head.handle(done, at_s + takes_s))
        head.handle(Cancel(request=request), at_s + takes_s)

    assert head.drafters.paused(1000.0) == [False], (
        "it had no job yet, and what is known may be of another run"
    )
    ask(1, 10.0, 1.0)
    ask(2, 12.0, 2.0)
    assert head.drafters.turnaround_s == [1.1]
    assert head.drafters.paused(14.0 + PAUSE_S - 1) == [False]
    assert head.drafters.paused(14.0 + PAUSE_S + 1) == [True]
    ask(3, 14.0 + PAUSE_S + 1, 4.0)
    assert head.drafters.turnaround_s == [4.0]
    ask(4, 14.0 + PAUSE_S + 6, 2.0)
    assert head.drafters.turnaround_s == [3.0]


def test_one_that_comes_back_with_less_memory_is_given_to_those_who_came_first() -> None:
    head = head_with(1)
    head.handle(submit(1), 0.0)
    head.handle(submit(2), 0.0)
    assert head.handle(DrafterLost(drafter=0), 1.0) == []
    assert drafted_for(head.handle(DrafterRecovered(drafter=0, cache_slots=ONE + 5), 2.0)) == {0: [1]}
    assert head.admission.held.drafters == (ONE,)


def test_conversations_whose_caches_were_given_up_are_no_concern_of_it() -> None:
    head = head_with(1, cache_slots=ONE)
    for number in (1, 2):
        head.handle(submit(number), 0.0)
    head.handle(PipelineLost(), 1.0)
    head.handle(Cancel(request=1), 1.0)
    assert not head.handle(DrafterLost(drafter=0), 2.0)
    head.handle(PipelineReformed(stage_count=2, rooms=(CacheRoom(slots=limits.ID_MAX),)), 3.0)
    assert [request.number for request in head.requests() if not request.drafter_states] == [1], (
        "its caches went to the other"
    )
    assert drafted_for(head.handle(DrafterRecovered(drafter=0), 4.0)) == {0: [2]}
    head.handle(DrafterLost(drafter=0), 5.0)


def test_who_waits_needs_nothing_of_a_drafter_that_cannot_hold_it() -> None:
    admission = Admission(CONTEXT, [TRAITS])
    admission.move_to([CacheRoom(slots=CONTEXT + limits.TREE_NODES_MAX)])
    for number in (1, 2):
        admission.ask(submit(number))
    assert admission.admit([]) == (1, [])
    admission.drafter_back(0, ONE - 1)
    assert [admission.may_draft(number, 0) for number in (1, 2)] == [False, False]
    assert admission.held.drafters == (0,)
    admission.end(1)
    admission.release(1)
    assert admission.admit([]) == (2, []), "it does not wait for room that there never is"


def test_a_drafters_device_is_told_of_as_a_drafter() -> None:
    core = Membership(["pi-3"], MEMBERSHIP_TIMEOUTS, "draft-math")
    core.handle(SessionStarted(), 0.0)
    core.handle(MembersChosen(devices=("pi-3",)), 0.0)
    core.handle(PipelineFormed(), 1.0)
    assert core.handle(PipelineBroken(device="pi-3", text="its connection closed"), 2.0) == [
        Note(text="drafter draft-math on pi-3 is lost (its connection closed)"),
        Note(text="answers go on without it"),
        Disband(),
    ]
