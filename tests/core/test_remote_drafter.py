"""A drafter on a device: what it is asked, what of its answers counts, what a loss makes void, and who gets
it when it is back."""

from __future__ import annotations

from collections import Counter

import pytest

from flowspec.core.cluster.membership import (
    Disband,
    MembersChosen,
    Membership,
    Note,
    PipelineBroken,
    PipelineFormed,
    SessionStarted,
    Tick,
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
    SendToDrafter,
    Submit,
)
from flowspec.core.head.head import HeadCore
from flowspec.core.head.remote_drafter import (
    BreakPipeline,
    GivenUp,
    RemoteDrafterCommand,
    RemoteDrafterCore,
    RemoteDrafterEvent,
)
from flowspec.core.methods import make_method
from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Expand, Proposal, Proposed, Release, Segment
from flowspec.core.stage.slots import CacheRoom
from tests.core.runs import MEMBERSHIP_TIMEOUTS
from tests.pipeline import ask

VOCABULARY = 9
FORMED = PipelineReformed(stage_count=1, rooms=(CacheRoom(slots=500),))
BACK = DrafterRecovered(drafter=3, cache_slots=500)
LOST = DrafterLost(drafter=3)
RELEASE = SendToDrafter(drafter=3, message=Release(request=2))


class Bench:
    """The head's drafter 3, at an instant that the test sets."""

    def __init__(self) -> None:
        self.core = RemoteDrafterCore(3, VOCABULARY)
        self.now_s = 10.0

    def give(self, *events: RemoteDrafterEvent) -> list[RemoteDrafterCommand]:
        """What the last of these events leads to."""
        commands: list[RemoteDrafterCommand] = []
        for event in events:
            commands = self.core.handle(event, self.now_s)
            self.core.validate()
        return commands


def draft(job: int) -> Draft:
    return Draft(job=job, segment=Segment(segment=job, parts=()), width=4, drafter=3)


def expand(job: int) -> Expand:
    return Expand(segment=Segment(segment=job, parts=()), width=4)


def answer(job: int, token: int = 7, compute_s: float = 0.0) -> Proposed:
    proposal = Proposal(request=1, epoch=0, node=5, tokens=(token,), confidences=(0.5,))
    return Proposed(job=job, proposals=(proposal,), compute_s=compute_s)


@pytest.mark.parametrize(
    ("compute_s", "started_s"), [(0.5, 11.5), (1e4, 10.0)], ids=["its time", "no longer than we waited"]
)
def test_a_job_goes_out_and_what_is_proposed_comes_back_in_the_heads_time(
    compute_s: float, started_s: float
) -> None:
    bench = Bench()
    assert bench.give(FORMED) == [BACK]
    assert bench.give(BACK, draft(0)) == [expand(0)]
    assert bench.give(RELEASE) == [RELEASE.message], "in order with jobs"
    bench.now_s = 12.0
    assert bench.core.tick(bench.now_s) == Tick(flight_s=2.0, tokens=0)
    drafted = Drafted(drafter=3, job=0, proposals=answer(0).proposals, started_s=started_s, ended_s=12.0)
    assert bench.give(answer(0, compute_s=compute_s)) == [drafted]
    assert bench.core.tick(bench.now_s) == Tick(flight_s=0.0, tokens=1)


def test_what_the_head_asks_before_it_has_heard_of_a_return_is_for_one_that_is_gone() -> None:
    bench = Bench()
    assert bench.give(FORMED, BACK, draft(0), PipelineLost()) == [LOST]
    assert bench.give(draft(1)) == [], "the head has not heard yet that it is lost"
    assert bench.give(FORMED) == [BACK]
    assert bench.give(draft(1)) == []
    assert bench.give(RELEASE) == []
    assert bench.give(BACK, draft(2)) == [expand(2)]
    assert bench.core.fired == Counter({"there": 2, "gone": 1, "job lost": 1, "for one that is gone": 3})


@pytest.mark.parametrize(
    ("said", "text", "rule"),
    [
        (answer(1), "expected proposals of job 0, got those of 1", "not asked for"),
        (answer(0, VOCABULARY), "expected token ids below 9, got 9", "no token"),
    ],
)
def test_proposals_that_cannot_be_are_not_believed(said: Proposed, text: str, rule: str) -> None:
    bench = Bench()
    assert bench.give(FORMED, BACK, draft(0), said) == [BreakPipeline(text=text)]
    assert bench.give(PipelineLost()) == [LOST]
    assert bench.core.fired[rule] == bench.core.fired["job lost"] == 1


def test_one_that_is_given_up_is_lost_for_good() -> None:
    bench = Bench()
    assert bench.give(FORMED, BACK, draft(0), GivenUp()) == [LOST]
    assert bench.give(draft(1)) == []
    assert bench.give(PipelineLost()) == [], "it is known"
    assert bench.core.fired["given up"] == 1


CONTEXT = 1000
TRAITS = DrafterTraits(context=CONTEXT)
ONE = CONTEXT + limits.DRAFT_NODES_MAX
"""Slots of an answer that may fill the context, at a drafter."""


def submit(request: int, tokens: int = CONTEXT) -> Submit:
    return ask(request, (5, 6, 7), tokens - 3)


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


def test_a_job_is_overdue_by_what_was_usual_since_the_drafter_is_there() -> None:
    head = head_with(2)
    head.drafters.turnaround_s[:] = [0.5, 0.5]
    head.handle(DrafterLost(drafter=1), 0.0)
    head.handle(DrafterRecovered(drafter=1, cache_slots=ONE), 2.0)
    assert head.drafters.turnaround_s == [0.5, 0.0]
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


def test_a_drafter_with_less_memory_is_given_to_those_who_came_first() -> None:
    head = head_with(1)
    head.handle(submit(1), 0.0)
    head.handle(submit(2), 0.0)
    assert head.handle(DrafterLost(drafter=0), 1.0) == []
    assert drafted_for(head.handle(DrafterRecovered(drafter=0, cache_slots=ONE + 5), 2.0)) == {0: [1]}
    assert head.admission.held.drafters == (ONE,)
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
