"""Answers that end, go on on other stages, or were begun by another head: what is told, dropped, kept and
sent again."""

from __future__ import annotations

import pytest
from msgspec import structs

from flowspec.core.head.events import Cancel, Forget, PipelineLost, PipelineReformed, VerifiedArrived
from flowspec.core.protocol.messages import Commit, Verified
from flowspec.core.stage.events import ClearSlots, SendSegment, SendVerified, Trim
from flowspec.core.stage.stage import StageCore
from flowspec.errors import PeerError
from tests.core.scripted_head import (
    TRAITS,
    ScriptedHead,
    commits,
    drafts,
    emits,
    ends,
    falling,
    guessing,
    hops,
    opens,
    over,
    sends,
)
from tests.core.stages import arrive, commit, finish, opened, opening, run_of, segment, tell
from tests.pipeline import StopAfter

# ------------------------------------------------------------------------------------------------ the head


def test_the_stages_are_told_of_every_kind_of_end_unless_there_is_nothing_to_tell() -> None:
    assert guessing().give(Cancel(request=1)) == [over(base=3), ends("cancelled")]
    assert guessing(stop_ids=frozenset({99})).back({2: 99}) == [over(base=3), ends("stop")]
    assert guessing(stop_rule=StopAfter(1)).back({2: 10}) == [emits(10), over(3, base=3), ends("stop")], (
        "no Commit beside it"
    )
    head = guessing(stop_rule=StopAfter(2))
    assert head.back({2: 11}) == [emits(11), commits(4, base=3)]
    assert head.back({4: 12}) == [emits(12), ends("stop")], "its last segment is back"
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
    head = guessing()
    head.give(Cancel(request=1))
    assert head.ask(prompt=(5, 6, 8))[0] == opens(epoch=1)
    assert head.give(Cancel(request=1)) == [ends("cancelled")]


def test_a_late_cancel_or_segment_of_an_answer_that_is_over_changes_nothing() -> None:
    """The answer ended while its user said so; the next question of the conversation is on its way
    already."""
    head = ScriptedHead("ar", drafter=None)
    head.ask(count=1, answer=7)
    assert head.back({2: 10}) == [emits(10), ends("length")]
    head.ask(prompt=(5, 6, 7, 10, 8), count=1, answer=8)
    assert head.give(Cancel(request=1, answer=7)) == []
    assert head.give(Cancel(request=1, answer=8)) == [ends("cancelled")]
    # The stages had guessed nodes in them, of which one had just become the root: nobody waits for it any
    # more.
    head = guessing()
    head.back({2: 10})
    assert head.give(Cancel(request=1)) == [over(3, base=3), ends("cancelled")]
    assert head.back() == []
    assert head.request().computed == 3, "a root that did not run does not count for the next turn"
    assert head.ask(prompt=(5, 6, 7, 10, 8))[0] == opens(epoch=1, keep=3)


# ----------------------------------------------------------------------------------------------- the stages


def told_over(*path: int, epoch: int = 0) -> Commit:
    return structs.replace(commit(*path, epoch=epoch), is_over=True)


def test_the_end_of_an_answer_takes_its_guesses_out_of_the_job_that_runs() -> None:
    """It says nothing new of the path, and counts all the same; the node that it commits stays."""
    core = opened()
    job = run_of(arrive(core, segment(1, [(3, 2, 3), (4, 3, 4), (5, 2, 3)])))
    assert tell(core, told_over()) == [
        ClearSlots(request=1, slots=(3, 4, 5)),
        Trim(job=job.job, rows=(0, 1, 2)),
    ]
    (sent,) = finish(core, job)
    assert isinstance(sent, SendSegment)
    assert sent.segment.row_count == 0
    core = opened()
    job = run_of(arrive(core, segment(1, [(3, 2, 3), (4, 3, 4), (5, 2, 3)])))
    assert tell(core, told_over(3)) == [
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
    tell(core, told_over())
    sent = [command for command in finish(core, job) if isinstance(command, SendSegment)]
    assert [(each.segment.segment, each.segment.row_count) for each in sent] == [(1, 0), (2, 0)]
    (late,) = arrive(core, segment(3, [(5, 2, 3)]))
    assert isinstance(late, SendSegment), "its parent is the root, and yet it is dead"
    assert late.segment.row_count == 0


def test_committed_rows_run_after_the_end_for_the_next_turn() -> None:
    core = StageCore(is_last=True, slots_max=64)
    job = run_of(arrive(core, segment(0, [(0, -1, 0), (1, 0, 1), (2, 1, 2)], prompt=True, opens=opening())))
    assert tell(core, told_over()) == [], "rows of the prompt stay in the job"
    (sent,) = finish(core, job)
    assert isinstance(sent, SendVerified)
    assert sent.verified.parts[0].ids == (2,), "the root is drawn"
    core = opened()
    tell(core, told_over(3, 4))
    job = run_of(arrive(core, segment(1, [(3, 2, 3), (4, 3, 4), (5, 3, 4), (6, 4, 5)])))
    assert job.parts[0].tokens.tolist() == [30, 40], (
        "the end came first: only the path is left of the guesses"
    )


def test_the_end_stays_the_end_until_the_next_epoch_begins_anew() -> None:
    core = opened()
    finish(core, run_of(arrive(core, segment(1, [(3, 2, 3), (4, 3, 4)]))))
    assert tell(core, told_over(3)) == [ClearSlots(request=1, slots=(4,))]
    for late in (told_over(3), commit(3), commit(), told_over()):
        assert tell(core, late) == []
    (sent,) = arrive(core, segment(2, [(5, 3, 4)], newest=commit(3)))
    assert isinstance(sent, SendSegment)
    assert sent.segment.row_count == 0
    core = opened()
    tell(core, told_over())
    tell(core, opening(epoch=1, keep=2, length=3, root=9))
    assert tell(core, told_over()) == [], "late, and of the older epoch"
    finish(core, run_of(arrive(core, segment(1, [(9, 1, 2)], newest=commit(epoch=1), prompt=True))))
    job = run_of(arrive(core, segment(2, [(10, 9, 3)], newest=commit(epoch=1))))
    assert job.parts[0].tokens.tolist() == [100]


LOST = PipelineLost(silent_s=2.0)


def test_what_is_known_of_an_answer_becomes_a_prompt_in_a_new_epoch() -> None:
    head = ScriptedHead("ar", drafter=None)
    assert head.ask(prompt=(5, 6, 7)) == [opens(), sends(0, 1, 2)]
    assert head.back({2: 30}) == [emits(30), sends(3)]
    assert head.give(LOST) == []
    assert head.give(PipelineReformed(stage_count=2)) == [opens(epoch=1), sends(0, 1, 2, 3)]
    again = head.sent[-1].parts[0]
    assert (again.tokens, again.committed, again.commit.base, again.commit.path) == (
        (5, 6, 7, 30),
        (True,) * 4,
        4,
        (),
    )
    assert again.opening is not None
    assert (again.opening.keep, again.opening.length, again.opening.root) == (0, 4, 3)
    assert again.opening.answer_start == 3, "what is known of the answer is not the prompt's"
    head.segments = [head.sent[-1]]
    assert head.back({3: 31}) == [emits(31), sends(4)]
    assert head.tokens[1] == [30, 31]


def test_nothing_of_the_lost_pipeline_counts_any_more() -> None:
    head = ScriptedHead("ar", drafter=None)
    head.ask()
    old = head.segments[0].segment
    head.give(LOST)
    head.give(PipelineReformed(stage_count=4))
    with pytest.raises(PeerError, match="not in flight"):
        head.give(VerifiedArrived(verified=Verified(segment=old, parts=(), hops=())))


def test_between_loss_and_new_stages_nothing_is_sent_but_everything_is_heard() -> None:
    head = ScriptedHead("ar", drafter=None)
    head.ask(request=1)
    head.ask(request=2)
    head.ask(request=3)
    head.give(LOST)
    assert head.ask(request=4, prompt=(8, 9)) == []
    assert head.give(Cancel(request=1)) == [ends("cancelled", 1)]
    assert head.give(Forget(request=2)) == [ends("cancelled", 2)]
    assert head.give(Forget(request=1)) == []
    said = head.give(PipelineReformed(stage_count=1))
    assert [each for each in said if each[0] == "open"] == [opens(3, epoch=1), opens(4)]
    assert {part.commit.request for segment in head.sent[3:] for part in segment.parts} == {3, 4}


def test_a_draft_that_runs_when_the_stages_are_lost_is_not_taken_and_the_drafter_is_asked_again() -> None:
    head = ScriptedHead("continuous")
    head.ask(prompt=(5, 6, 7))
    assert head.job is not None
    head.give(LOST)
    said = head.propose(falling(2))
    assert len(head.tree()) == 3, "nothing grew of it"
    assert drafts(2) in said, "the root is asked about again, below what the drafter holds"
    assert head.job is not None
    part = head.job.segment.parts[0]
    assert (part.commit.epoch, part.opening and part.opening.keep) == (1, 2)
    head.propose(falling(2))
    assert head.tree().alive_count >= 2
    said = head.give(PipelineReformed(stage_count=2))
    assert said[0] == opens(epoch=1)
    assert sends(0, 1, 2) in said


def test_statistics_count_recoveries_and_their_seconds() -> None:
    head = ScriptedHead("ar", drafter=None)
    head.ask(prompt=(5, 6, 7), count=2)
    head.now_s = 1.0
    head.back({2: 30}, hops=hops(4, 3, 0.1))
    head.now_s = 3.0
    head.give(LOST)
    head.now_s = 4.5
    head.give(PipelineReformed(stage_count=6))
    head.segments = head.segments[-1:]
    head.now_s = 5.0
    head.back({3: 31}, hops=hops(6, 4, 0.1))
    report = head.ends[0].statistics.report()
    assert report["recoveries"] == 1
    assert (report["recovery_detect_s"], report["recovery_load_s"], report["recovery_prefill_s"]) == (
        2.0,
        1.5,
        0.5,
    )
    assert len(report["stage_busy"]) == 6
    assert report["compute_s"] == pytest.approx(1.0)


def test_what_is_known_of_the_answer_is_computed_with_the_prompt_and_not_emitted_again() -> None:
    head = ScriptedHead("ar", drafter=None)
    assert head.ask(prompt=(5, 6, 7), answered=(30, 31), count=4) == [opens(), sends(0, 1, 2, 3, 4)]
    part = head.sent[-1].parts[0]
    assert (part.tokens, part.committed) == ((5, 6, 7, 30, 31), (True,) * 5)
    assert part.opening is not None
    assert (part.opening.length, part.opening.root, part.opening.answer_start) == (5, 4, 3)
    assert head.back({4: 32}) == [emits(32), sends(5)]
    assert head.back({5: 33}) == [emits(33), ends("length")]


def test_an_answer_that_was_complete_ends_at_once_and_none_has_more() -> None:
    head = ScriptedHead("continuous", drafter=TRAITS)
    assert head.ask(prompt=(5, 6, 7), answered=(30, 31), count=2) == [ends("length")]
    assert head.ask(prompt=(5, 6, 7, 30, 31, 8))[0] == opens(epoch=1)
    assert head.sent[-1].parts[0].tokens == (5, 6, 7, 30, 31, 8), "no stage has computed anything of it"
    with pytest.raises(AssertionError, match="more is answered"):
        ScriptedHead("ar", drafter=None).ask(answered=(30, 31), count=1)


def test_a_conversation_reuses_what_it_shares_with_an_answer_that_is_taken_over() -> None:
    head = ScriptedHead("ar", drafter=None)
    head.ask(prompt=(5, 6, 7), count=2)
    head.back({2: 30})
    head.back({3: 31})
    assert head.ask(prompt=(5, 6, 7), answered=(30, 31), count=4)[0] == opens(epoch=1, keep=4)
    assert head.sent[-1].parts[0].tokens == (31,)
    head.back({5: 32})
    head.back({6: 33})
    assert head.ends[-1].reused == 3, "of the prompt"
