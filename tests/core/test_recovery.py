"""The head when its stages are lost: what is known is kept and sent again, and nothing else counts."""

from __future__ import annotations

import pytest

from flowspec.core.head.events import (
    Cancel,
    Forget,
    PipelineLost,
    PipelineReformed,
    SendToFirstStage,
    VerifiedArrived,
)
from flowspec.core.protocol.messages import Verified
from flowspec.errors import PeerError
from tests.core.scripted_head import (
    TRAITS,
    ScriptedHead,
    drafts,
    emits,
    ends,
    falling,
    hops,
    kinds,
    opens,
    sends,
)

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


def test_a_conversation_at_rest_is_prefilled_whole_in_its_next_turn() -> None:
    head = ScriptedHead("ar", drafter=None)
    head.ask(prompt=(5, 6, 7), count=1)
    head.back({2: 30})
    head.give(LOST)
    assert head.give(PipelineReformed(stage_count=3)) == []
    assert head.ask(prompt=(5, 6, 7, 30, 8))[0] == opens(epoch=1, keep=0)
    assert head.sent[-1].parts[0].tokens == (5, 6, 7, 30, 8)


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


def test_an_answer_ends_where_it_would_have_ended() -> None:
    """The length is counted from the prompt as it was asked, not from what was known when the stages were
    lost."""
    head = ScriptedHead("continuous", drafter=TRAITS)
    head.ask(prompt=(5, 6, 7), count=3)
    head.back({2: 30})
    head.give(LOST)
    head.give(PipelineReformed(stage_count=2))
    head.segments = head.segments[-1:]
    head.back({3: 31})
    head.segments = head.segments[-1:]
    assert head.back({4: 32})[0] == emits(32)
    assert head.ends[0].reason == "length"
    assert head.tokens[1] == [30, 31, 32]


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


def test_a_second_loss_before_a_token_is_one_recovery_that_takes_longer() -> None:
    head = ScriptedHead("ar", drafter=None)
    head.ask(count=1)
    head.give(LOST)
    head.give(PipelineReformed(stage_count=2))
    head.now_s = 1.0
    head.give(PipelineLost())
    head.give(PipelineReformed(stage_count=1))
    head.segments = head.segments[-1:]
    assert "end" in kinds(head.back({2: 30}))
    report = head.ends[0].statistics.report()
    assert (report["recoveries"], report["recovery_prefill_s"]) == (1, 1.0)


def test_held_tokens_of_a_lost_pipeline_are_verified_again() -> None:
    head = ScriptedHead("chunk-pp")
    head.ask(prompt=(5, 6, 7))
    head.give(LOST)
    assert not head.request().held
    commands = head.core.handle(PipelineReformed(stage_count=4), 0.0)
    assert any(isinstance(command, SendToFirstStage) for command in commands)
