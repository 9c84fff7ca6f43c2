"""The head takes over an answer that another one began: what is known of it goes out as prompt, and counts as
answer."""

from __future__ import annotations

import pytest

from flowspec.core.head.events import PipelineLost, PipelineReformed
from tests.core.scripted_head import TRAITS, ScriptedHead, emits, ends, opens, sends


def test_what_is_known_of_the_answer_is_computed_with_the_prompt_and_not_emitted_again() -> None:
    head = ScriptedHead("ar", drafter=None)
    assert head.ask(prompt=(5, 6, 7), answered=(30, 31), count=4) == [opens(), sends(0, 1, 2, 3, 4)]
    part = head.sent[-1].parts[0]
    assert (part.tokens, part.committed) == ((5, 6, 7, 30, 31), (True,) * 5)
    assert part.opening is not None
    assert (part.opening.length, part.opening.root, part.opening.answer_start) == (5, 4, 3)
    assert head.back({4: 32}) == [emits(32), sends(5)]
    assert head.back({5: 33}) == [emits(33), ends("length")]


def test_an_answer_that_was_complete_ends_at_once() -> None:
    head = ScriptedHead("continuous", drafter=TRAITS)
    assert head.ask(prompt=(5, 6, 7), answered=(30, 31), count=2) == [ends("length")]
    assert head.ask(prompt=(5, 6, 7, 30, 31, 8))[0] == opens(epoch=1)
    assert head.sent[-1].parts[0].tokens == (5, 6, 7, 30, 31, 8), "no stage has computed anything of it"


def test_stages_may_be_lost_in_an_answer_that_was_taken_over() -> None:
    head = ScriptedHead("ar", drafter=None)
    head.ask(prompt=(5, 6, 7), answered=(30,), count=3)
    head.back({3: 31})
    head.give(PipelineLost())
    assert head.give(PipelineReformed(stage_count=2)) == [opens(epoch=1), sends(0, 1, 2, 3, 4)]
    head.segments = head.segments[-1:]
    assert head.back({4: 32}) == [emits(32), ends("length")]


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


def test_more_than_an_answer_holds_cannot_be_taken_over() -> None:
    with pytest.raises(AssertionError, match="more is answered"):
        ScriptedHead("ar", drafter=None).ask(answered=(30, 31), count=1)
