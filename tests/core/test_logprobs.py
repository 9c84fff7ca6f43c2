"""Log-probabilities on their way: asked for with the Open, drawn beside a token, and emitted with it, each
once."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from flowspec.core.head.events import Emit, PipelineLost, PipelineReformed, VerifiedArrived
from flowspec.core.head.head import HeadCore
from flowspec.core.methods.continuous import Continuous
from flowspec.core.protocol.messages import Logprobs, Verified, VerifiedPart
from flowspec.errors import PeerError
from tests.core.scripted_head import ScriptedHead
from tests.pipeline import ask


def said(number: int) -> Logprobs:
    """What comes with the token after node `number`."""
    return Logprobs(chosen=-float(number), ids=(number,), values=(-0.5,))


def back(
    head: HeadCore,
    segment: int,
    drawn: Mapping[int, int],
    *,
    epoch: int = 0,
    logprobs: tuple[Logprobs, ...] | None = None,
) -> list[Emit]:
    """A segment comes back with these tokens, and with them what `said` of their nodes."""
    found = tuple(said(node) for node in drawn) if logprobs is None else logprobs
    part = VerifiedPart(
        request=1, epoch=epoch, ids=tuple(drawn), next_tokens=tuple(drawn.values()), logprobs=found
    )
    commands = head.handle(VerifiedArrived(verified=Verified(segment=segment, parts=(part,), hops=())), 0.0)
    return [command for command in commands if isinstance(command, Emit)]


def guessing(top: int = 1) -> ScriptedHead:
    """Prompt nodes 0 to 2 are segment 0; below the root the guesses 3 (token 0) and 4 (token 1), segment 1;
    below 3 the guess 5."""
    head = ScriptedHead(Continuous(window=9))
    head.ask(top_logprobs=top)
    head.propose({2: [(0, 0.5), (1, 0.3)]})
    head.propose({3: [(2, 0.9)], 4: []})
    assert [each.parts[0].ids for each in head.sent] == [(0, 1, 2), (3, 4), (5,)]
    return head


def test_they_wait_for_their_token_and_go_with_dead_nodes() -> None:
    head = guessing().core
    assert back(head, 1, {3: 2, 4: 9}) == [], "the token after the root is not known yet"
    assert head.requests()[0].logprobs == {3: said(3), 4: said(4)}
    assert back(head, 0, {2: 0}) == [Emit(request=1, tokens=(0, 2), logprobs=(said(2), said(3)))]
    assert head.requests()[0].logprobs == {}


def test_after_a_loss_the_tokens_that_follow_have_theirs_and_none_comes_twice() -> None:
    head = guessing()
    assert len(back(head.core, 0, {2: 0})) == 1
    head.give(PipelineLost())
    assert head.core.requests()[0].logprobs == {}
    head.give(PipelineReformed(stage_count=2))
    newest = head.sent[-1]
    assert newest.parts[0].opening is not None
    assert newest.parts[0].opening.top_logprobs == 1
    (emit,) = back(head.core, newest.segment, {3: 2}, epoch=1)
    assert emit == Emit(request=1, tokens=(2,), logprobs=(said(3),))


@pytest.mark.parametrize(
    ("top", "logprobs", "match"),
    [
        (1, (), "expected log-probabilities of 1 tokens of request 1, got 0"),
        (-1, (said(2),), "expected log-probabilities of 0 tokens of request 1, got 1"),
        (0, (said(2),), "expected at most 0 likeliest tokens"),
        (1, (said(50),), "likeliest tokens below 50"),
    ],
)
def test_others_than_those_that_were_asked_for_are_the_stages_fault(
    top: int, logprobs: tuple[Logprobs, ...], match: str
) -> None:
    head = HeadCore(context=100, stage_count=1)
    head.vocabulary = 50
    head.handle(ask(1, [1, 2, 3], 5, top_logprobs=top), 0.0)
    with pytest.raises(PeerError, match=match):
        back(head, 0, {2: 7}, logprobs=logprobs)
