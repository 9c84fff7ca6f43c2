"""Answers that end while something of them is in flight: what the head tells the stages, what they drop, and
what they keep."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flowspec.core.head.events import Cancel, PipelineLost
from flowspec.core.methods import METHODS
from flowspec.core.methods.continuous import Continuous
from flowspec.core.protocol.messages import Commit
from flowspec.core.stage.events import (
    ClearSlots,
    ControlArrived,
    SendSegment,
    SendVerified,
    Trim,
)
from flowspec.core.stage.stage import StageCore
from tests.core.scripted_head import (
    TRAITS,
    ScriptedHead,
    commits,
    drafts,
    emits,
    ends,
    falling,
    kinds,
    opens,
    over,
    sends,
)
from tests.core.stages import arrive, commit, finish, opened, opening, run_of, segment
from tests.pipeline import StopAfter, ask

# ------------------------------------------------------------------------------------------------ the head


def guessing(**extra: Any) -> ScriptedHead:
    """A prompt of three and two guesses below it in flight: nodes 3 (token 10) and 4 (token 11)."""
    head = ScriptedHead(Continuous(window=9))
    assert head.ask(**extra) == [opens(), sends(0, 1, 2), drafts(0, 1, 2)]
    assert head.propose({2: [(10, 0.5), (11, 0.3)]}) == [sends(3, 4), drafts(3, 4)]
    return head


def test_the_stages_are_told_of_every_kind_of_end_in_one_message() -> None:
    assert guessing().give(Cancel(request=1)) == [over(base=3), ends("cancelled")]
    assert guessing(stop_ids=frozenset({99})).back({2: 99}) == [over(base=3), ends("stop")]
    assert guessing(stop_rule=StopAfter(1)).back({2: 10}) == [emits(10), over(3, base=3), ends("stop")], (
        "no Commit beside it"
    )
    head = guessing(stop_rule=StopAfter(2))
    assert head.back({2: 11}) == [emits(11), commits(4, base=3)]
    assert head.back({4: 12}) == [emits(12), ends("stop")], "its last segment is back"


def test_where_no_guess_is_in_flight_there_is_nothing_to_tell() -> None:
    for count in (1, 100):
        head = ScriptedHead("ar", drafter=None)
        head.ask(count=count)
        if count > 1:
            assert head.give(Cancel(request=1)) == [ends("cancelled")], (
                "a prompt that is on its way is for the next turn"
            )
        else:
            assert head.back({2: 10}) == [emits(10), ends("length")]
    head = guessing()
    head.give(PipelineLost())
    assert head.give(Cancel(request=1)) == [ends("cancelled")], "no stage is there to be told"


def test_what_an_older_answer_has_in_flight_is_no_reason() -> None:
    head = guessing()
    head.give(Cancel(request=1))
    assert head.ask(prompt=(5, 6, 8))[0] == opens(epoch=1)
    assert head.give(Cancel(request=1)) == [ends("cancelled")]


def test_a_late_cancel_does_not_end_the_next_answer() -> None:
    """The answer ended while its user said so; the next question of the conversation is on its way
    already."""
    head = ScriptedHead("ar", drafter=None)
    head.ask(count=1, answer=7)
    assert head.back({2: 10}) == [emits(10), ends("length")]
    head.ask(prompt=(5, 6, 7, 10, 8), count=1, answer=8)
    assert head.give(Cancel(request=1, answer=7)) == []
    assert head.give(Cancel(request=1, answer=8)) == [ends("cancelled")]


def test_what_is_no_event_is_not_taken_for_a_timer() -> None:
    with pytest.raises(AssertionError, match="no event of a head"):
        guessing().give("something")  # type: ignore[arg-type]


def test_segments_of_an_answer_that_is_over_come_back_without_its_root() -> None:
    """The stages had guessed nodes in them, of which one had just become the root: nobody waits for it any
    more."""
    head = guessing()
    head.back({2: 10})
    assert head.give(Cancel(request=1)) == [over(3, base=3), ends("cancelled")]
    assert head.back() == []
    assert head.request().computed == 3, "a root that did not run does not count for the next turn"
    assert head.ask(prompt=(5, 6, 7, 10, 8))[0] == opens(epoch=1, keep=3)


@pytest.mark.parametrize("method", [name for name in METHODS if name != "ar"])
def test_every_method_drops_what_it_has_in_flight(method: str) -> None:
    head = ScriptedHead(method, drafter=TRAITS)
    head.give(ask(1, (5, 6, 7), 100))
    head.back({2: 30})
    while head.job is not None and not head.core.flights.have_guesses(head.request()):
        head.propose(falling(2))
    assert head.core.flights.have_guesses(head.request())
    assert kinds(head.give(Cancel(request=1)))[:2] == ["over", "end"]


# ----------------------------------------------------------------------------------------------- the stages


def told_over(*path: int, epoch: int = 0) -> Commit:
    return replace(commit(*path, epoch=epoch), is_over=True)


def test_the_end_of_an_answer_takes_its_guesses_out_of_the_job_that_runs() -> None:
    """It says nothing new of the path, and counts all the same; the node that it commits stays."""
    core = opened()
    job = run_of(arrive(core, segment(1, [(3, 2, 3), (4, 3, 4), (5, 2, 3)])))
    assert core.handle(ControlArrived(message=told_over()), 0.0) == [
        ClearSlots(request=1, slots=(3, 4, 5)),
        Trim(job=job.job, rows=(0, 1, 2)),
    ]
    (sent,) = finish(core, job)
    assert isinstance(sent, SendSegment)
    assert sent.segment.row_count == 0
    core = opened()
    job = run_of(arrive(core, segment(1, [(3, 2, 3), (4, 3, 4), (5, 2, 3)])))
    assert core.handle(ControlArrived(message=told_over(3)), 0.0) == [
        ClearSlots(request=1, slots=(5,)),
        Trim(job=job.job, rows=(2,)),
        ClearSlots(request=1, slots=(4,)),
        Trim(job=job.job, rows=(1,)),
    ]
    (sent,) = finish(core, job, rows=(0,))
    assert isinstance(sent, SendSegment)
    assert sent.segment.parts[0].ids == (3,)


def test_what_waits_when_an_answer_ends_or_comes_later_never_runs() -> None:
    core = opened()
    job = run_of(arrive(core, segment(1, [(3, 2, 3)])))
    arrive(core, segment(2, [(4, 3, 4)]))
    core.handle(ControlArrived(message=told_over()), 0.0)
    sent = [command for command in finish(core, job) if isinstance(command, SendSegment)]
    assert [(each.segment.segment, each.segment.row_count) for each in sent] == [(1, 0), (2, 0)]
    (late,) = arrive(core, segment(3, [(5, 2, 3)]))
    assert isinstance(late, SendSegment), "its parent is the root, and yet it is dead"
    assert late.segment.row_count == 0


def test_committed_rows_run_after_the_end_for_the_next_turn() -> None:
    core = StageCore(is_last=True, slots_max=64)
    job = run_of(arrive(core, segment(0, [(0, -1, 0), (1, 0, 1), (2, 1, 2)], prompt=True, opens=opening())))
    assert core.handle(ControlArrived(message=told_over()), 0.0) == [], "rows of the prompt stay in the job"
    (sent,) = finish(core, job)
    assert isinstance(sent, SendVerified)
    assert sent.verified.parts[0].ids == (2,), "the root is drawn"
    core = opened()
    core.handle(ControlArrived(message=told_over(3, 4)), 0.0)
    job = run_of(arrive(core, segment(1, [(3, 2, 3), (4, 3, 4), (5, 3, 4), (6, 4, 5)])))
    assert job.parts[0].tokens.tolist() == [30, 40], (
        "the end came first: only the path is left of the guesses"
    )


def test_the_end_is_told_twice_or_before_an_older_commit_and_stays_the_end() -> None:
    core = opened()
    finish(core, run_of(arrive(core, segment(1, [(3, 2, 3), (4, 3, 4)]))))
    assert core.handle(ControlArrived(message=told_over(3)), 0.0) == [ClearSlots(request=1, slots=(4,))]
    for late in (told_over(3), commit(3), commit(), told_over()):
        assert core.handle(ControlArrived(message=late), 0.0) == []
    (sent,) = arrive(core, segment(2, [(5, 3, 4)], newest=commit(3)))
    assert isinstance(sent, SendSegment)
    assert sent.segment.row_count == 0


def test_the_next_epoch_begins_anew_and_hears_nothing_of_the_end_before_it() -> None:
    core = opened()
    core.handle(ControlArrived(message=told_over()), 0.0)
    core.handle(ControlArrived(message=opening(epoch=1, keep=2, length=3, root=9)), 0.0)
    assert core.handle(ControlArrived(message=told_over()), 0.0) == [], "late, and of the older epoch"
    finish(core, run_of(arrive(core, segment(1, [(9, 1, 2)], newest=commit(epoch=1), prompt=True))))
    job = run_of(arrive(core, segment(2, [(10, 9, 3)], newest=commit(epoch=1))))
    assert job.parts[0].tokens.tolist() == [100]
