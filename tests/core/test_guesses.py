"""The head while it guesses ahead: stages and drafter played by hand, exact commands out; and what alone can
follow is a node without anybody being asked."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

import pytest

from flowspec.core.head.certain import CHANCE
from flowspec.core.head.drafter_jobs import draft_part, expandable, most_valuable
from flowspec.core.head.events import (
    Cancel,
    Draft,
    Emit,
    Finished,
    Forget,
    PipelineLost,
    PipelineReformed,
    VerifiedArrived,
)
from flowspec.core.head.fusion import Fusion
from flowspec.core.head.head import HeadCore
from flowspec.core.head.request import Request
from flowspec.core.head.statistics import Statistics
from flowspec.core.head.tree_growth import grow, learn, observe
from flowspec.core.methods import WITHOUT_GUESSES, make_method
from flowspec.core.methods.continuous import Continuous
from flowspec.core.protocol.messages import Grammar, Hop, Logprobs, Proposal, Sampling, Verified, VerifiedPart
from flowspec.errors import InputError, PeerError
from flowspec.plan.timing import Curve
from flowspec.sim.device import DeviceSpec
from flowspec.sim.drafter import FakeDrafter
from flowspec.sim.language import HashLanguage
from flowspec.sim.record import HEAD
from flowspec.sim.world import Cluster, Handled, World
from tests.core.asked import PLAIN, asked, move
from tests.core.scripted_head import (
    ScriptedHead,
    commits,
    drafts,
    emits,
    ends,
    guessing,
    opens,
    over,
    sends,
    sends_all,
)
from tests.pipeline import ask, validate_at_rest


def say_commit(head: ScriptedHead) -> tuple[int, tuple[int, ...]]:
    """Base and path of the Commit in the newest segment."""
    commit = head.sent[-1].parts[0].commit
    return commit.base, commit.path


def test_a_guess_that_holds_is_emitted_the_moment_it_is_known() -> None:
    head = guessing()
    assert head.back({2: 10}) == [emits(10), commits(3, base=3)]
    assert head.back({3: 12}) == [emits(12), sends(5)]
    assert say_commit(head) == (3, (3, 5)), "from the length on that every stage was told"
    assert head.back({5: 13}) == [emits(13), sends(6)]
    assert say_commit(head) == (5, (6,))
    head = guessing()
    head.propose({3: [(12, 0.9)], 4: []})
    assert head.segments[-1].parts[0].ids == (5,)
    assert head.back({2: 10}) == [emits(10), commits(3, base=3)]
    assert head.back({3: 12}) == [emits(12), commits(3, 5, base=3)]
    assert head.back({5: 13})[0] == emits(13)


def test_a_root_that_was_guessed_may_not_come_back_dropped_but_dead_guesses_may() -> None:
    head = guessing()
    head.back({2: 10})
    with pytest.raises(PeerError, match="segment 1 came back without the root of request 1"):
        head.back({4: 1})
    head = guessing()
    head.back({2: 99})
    assert head.back() == []
    with pytest.raises(PeerError, match="segment 2 came back without the root"):
        head.back()


def test_a_segment_of_several_requests_tells_each_its_own() -> None:
    head = ScriptedHead("ar", stages=1)
    for request in (1, 2, 3):
        head.ask(request, (5,))
    assert head.back({0: 8}, request=1) == [emits(8, request=1), sends(1, request=1)]
    assert head.back({0: 8}, request=2) == [emits(8, request=2), sends(0, request=3)]
    assert head.back({1: 9}, request=1) == [emits(9, request=1), sends_all({2: (1,), 1: (2,)})]
    assert [(part.commit.base, part.commit.path) for part in head.sent[-1].parts] == [(1, (1,)), (2, (2,))]
    assert head.back({0: 8}, request=3) == [emits(8, request=3), sends(1, request=3)]
    head.give(Cancel(request=1))
    assert head.back_all({1: {2: 31}, 2: {1: 32}}) == [emits(32, request=2), sends(2, request=2)], (
        "the other's end is no end"
    )


def test_what_the_drafter_says_after_the_end_or_when_it_forgets_changes_nothing() -> None:
    head = guessing()
    assert head.give(Cancel(request=1)) == [over(base=3), ends("cancelled")]
    nodes = len(head.tree())
    assert head.propose({3: [(12, 0.9)], 4: [(13, 0.9)]}) == []
    assert len(head.tree()) == nodes
    head = guessing()
    assert head.give(Forget(request=1)) == [over(base=3), ends("cancelled"), ("drafter forgets", 1)]
    assert head.propose({3: [(12, 0.9)], 4: []}) == []
    assert head.back({2: 10}) == []
    assert head.back({3: 12}) == [("release", 1)]
    assert head.ask(2, (7,)) == [opens(2), sends(0, request=2), drafts(0, request=2)]


def test_what_the_drafter_says_of_an_older_epoch_changes_nothing() -> None:
    head = guessing()
    head.give(Cancel(request=1))
    assert head.ask(prompt=(5, 6, 8, 9)) == [opens(epoch=1), sends(5, 6, 7, 8)], (
        "nothing is known to be computed yet"
    )
    assert head.propose({3: [(12, 0.9)], 4: [(13, 0.9)]}) == [drafts(5, 6, 7, 8)]
    assert head.job is not None
    part = head.job.segment.parts[0]
    assert part.opening is not None
    assert (part.commit.epoch, part.opening.keep) == (1, 0)
    assert head.tree().alive_count == 0
    assert [head.back({2: 10}), head.back({3: 12})] == [[], []], "nor what the stages say of it"
    assert head.back({8: 14})[0] == emits(14)


def test_the_end_of_an_answer_says_what_happened() -> None:
    """Three guesses of which two hold. Every stage computes 10 ms for each segment, drafting takes no
    time."""
    head = guessing(count=3)
    assert head.propose({3: [(12, 0.9)], 4: []}) == [sends(5)], "and no draft: the answer ends there"
    hops = (Hop(received_s=0, queued_s=0.002, compute_s=0.010, own_s=0.001, rows=2, dead_in_queue=1),) * 4
    head.now_s = 0.060
    assert head.back({2: 10}, hops=hops) == [emits(10), commits(3, base=3)]
    head.now_s = 0.080
    assert head.back({3: 12}, hops=hops) == [emits(12), commits(3, 5, base=3)]
    head.now_s = 0.140
    assert head.back({5: 13}, hops=hops) == [emits(13), ends("length")]
    found = head.ends[0].statistics.report()
    expected = {
        "segments": 2,
        "committing_segments": 2,
        "nodes_drafted": 3,
        "nodes_sent": 3,
        "tokens_per_commit": 1.0,
        "acceptance_length": 1.0,
        "share_in_flight": 1.0,
        "dropped_alive": 0,
        "rows_computed": 24,
        "dead_in_queue": 12,
        "draft_passes": 2,
        "draft_rows": 5,
        "prefill_s": 0.060,
        "decode_s": 0.080,
        "compute_s": 0.120,
        "queued_s": 0.024,
        "stage_own_s": 0.012,
        "link_s": round(0.060 + 0.080 + 0.140 - 3 * 4 * 0.013, 6),
        "stage_busy": [round(0.030 / 0.140, 4)] * 4,
        "window": 9.0,
    }
    assert {name: value for name, value in expected.items() if found[name] != value} == {}


def test_a_commit_goes_out_on_control_only_while_something_is_in_flight_that_it_could_prune() -> None:
    alone = ScriptedHead(Continuous(), drafter=None)
    alone.ask()
    assert alone.back({2: 10}) == [emits(10), sends(3)]
    assert guessing().back({2: 10}) == [emits(10), commits(3, base=3)]
    others = ScriptedHead(Continuous(), drafter=None)
    others.ask(1, (5,))
    others.ask(2, (5,))
    assert others.back({0: 10}, request=1) == [emits(10, request=1), sends(1, request=1)], (
        "what others have in flight is no reason"
    )


def test_the_tokens_of_a_prompt_come_from_no_segment_after_it() -> None:
    """`/stats` told of 14 segments, of which 15 gave tokens; a lost pipeline's prompt is sent once more."""
    found = Statistics(stage_count=2)
    assert found.report() == json.loads(json.dumps(found.report(), allow_nan=False)), "of nothing"
    for number in range(4):
        found.emitted(1, float(number))
        found.sent(1, 1)
        if number == 2:
            found.lost(0.5, 2.5)
            found.admitted(2.7)
    report = found.report()
    told = [report[name] for name in ("segments", "committing_segments", "tokens_per_commit")]
    assert told == [4, 2, 1.0]


# -------------------------------------------------------------------------------------------- what is certain

FUSION = Fusion([0], is_calibrated=False)


def in_threes(answer: Sequence[int]) -> list[int]:
    """Behind every third token the next two are certain: each one more than the one before."""
    return [answer[-1] + at for at in range(1, 4 - len(answer) % 3)] if len(answer) % 3 else []


def bound(prompt: int = 5) -> Request:
    request = asked(prompt)
    request.certain = in_threes
    return request


def below(request: Request, node: int) -> list[int]:
    """The tokens of the only line below a node."""
    found = []
    while children := request.tree.children(node):
        (node,) = children
        found.append(request.tree.token(node))
    return found


def say(request: Request, token: int) -> None:
    observe(request, request.tree.root, token, FUSION)
    request.new_tokens.append(token)
    move(request, token)
    grow(request, 0.01, FUSION)


def test_what_alone_can_follow_a_root_or_a_likely_guess_is_there() -> None:
    request = bound()
    grow(request, 0.01, FUSION)
    assert len(request.tree.children(request.tree.root)) == 0
    say(request, 40)
    assert below(request, request.tree.root) == [41, 42]
    leaf = max(request.tree.living())
    assert request.tree.value(leaf) == pytest.approx(CHANCE**2 * request.tree.value(request.tree.root))
    say(request, 41)
    assert below(request, request.tree.root) == [42]
    say(request, 42)
    assert below(request, request.tree.root) == []
    request = bound()
    learn(
        request,
        0,
        Proposal(request=1, epoch=0, node=request.tree.root, tokens=(50, 60), confidences=(0.5, 0.05)),
        FUSION,
    )
    grow(request, 0.01, FUSION)
    likely, unlikely = (request.tree.child(request.tree.root, token) for token in (50, 60))
    assert likely is not None
    assert unlikely is not None
    assert below(request, likely) == [51, 52]
    assert below(request, unlikely) == []


def test_a_model_is_not_asked_above_it_and_gets_it_along_with_what_is_below() -> None:
    request = bound()
    say(request, 40)
    first, second = sorted(request.tree.living())
    assert not expandable(request, 0, PLAIN, request.tree.root)
    assert not expandable(request, 0, PLAIN, first)
    assert most_valuable(request, 0, PLAIN, 9) == [second]
    part = draft_part(request, 0, PLAIN, [second], 200)
    assert part is not None
    assert part.ids[-3:] == (request.tree.root, first, second)
    assert not any(part.committed[-2:])
    doubt = Proposal(request=1, epoch=0, node=request.tree.root, tokens=(99, 41), confidences=(0.9, 0.1))
    learn(request, 0, doubt, FUSION)
    grow(request, 0.01, FUSION)
    assert below(request, request.tree.root) == [41, 42], "it is certain, whatever a model says"
    assert request.tree.value(first) == pytest.approx(CHANCE * request.tree.value(request.tree.root))


def test_what_is_certain_makes_guesses_worth_more_and_ends_with_the_answer() -> None:
    request = asked(5)
    request.new_tokens.append(40)
    proposal = Proposal(request=1, epoch=0, node=request.tree.root, tokens=(41,), confidences=(0.02,))
    learn(request, 0, proposal, FUSION)
    grow(request, 0.01, FUSION)
    (child,) = request.tree.living()
    assert request.tree.value(child) < 0.1
    request.certain = in_threes
    grow(request, 0.01, FUSION)
    assert request.tree.value(child) == pytest.approx(CHANCE)
    assert below(request, request.tree.root) == [41, 42]
    request = asked(5, stop_ids=frozenset({9}))
    request.certain = lambda answer: [7, 9, 8]
    grow(request, 0.01, FUSION)
    assert below(request, request.tree.root) == [7], "the stop token itself is known from its parent"
    short = asked(5, new_tokens_max=3)
    short.certain = lambda answer: [1, 2, 3, 4]
    grow(short, 0.01, FUSION)
    assert below(short, short.tree.root) == [1, 2]
    short.reopen()
    assert short.settled == {}
    grow(short, 0.01, FUSION)
    assert below(short, short.tree.root) == [1, 2]


GRAMMAR = Grammar(kind="regex", text="(abcdef|f[abc]edab)+", ends=(0,))


@pytest.mark.parametrize(
    ("method", "quality"), [("ar", None), ("continuous", None), ("continuous", 0.3), ("tree-sd", 0.3)]
)
def test_with_any_method_answers_are_the_same_and_come_sooner(method: str, quality: float | None) -> None:
    pytest.importorskip("llguidance")
    from flowspec.core.protocol.token_bytes import TokenBytes
    from flowspec.draft.guide import certain_of
    from flowspec.model.grammar import GrammarVocabulary

    tokens = TokenBytes((b"", *(bytes([letter]) for letter in b"abcdef")))
    language = HashLanguage(7, 5)
    language.grammars = GrammarVocabulary(tokens)
    found = []
    for certain in (None, certain_of(tokens)):
        cluster = Cluster(
            devices=(DeviceSpec(curve=Curve(base_s=0.02)),) * 3,
            method=method,
            context=200,
            certain_of=certain,
        )
        jobs = 0

        def look(handled: Handled) -> None:
            nonlocal jobs
            if handled.place == HEAD:
                jobs += sum(isinstance(command, Draft) for command in handled.commands)

        drafters = [] if quality is None else [FakeDrafter(language, quality, 3)]
        world = World(cluster, language, drafters, look)
        sampling = Sampling(temperature=1.0, seed=4, grammar=GRAMMAR)
        world.at(0.0, ask(0, [1, 2, 3], 60, sampling=sampling, stop_ids=frozenset({0})))
        world.run()
        validate_at_rest(world)
        (answer,) = world.answers[0]
        assert isinstance(answer.end, Finished)
        found.append((tuple(answer.tokens), world.clock.now_s, jobs))
    (free, free_s, free_jobs), (guided, guided_s, guided_jobs) = found
    assert free == guided
    assert len(free) > 20
    if method == WITHOUT_GUESSES:
        assert (guided_s, guided_jobs) == (free_s, free_jobs)
    else:
        assert guided_s < (0.6 if quality is None else 1.05) * free_s
        assert guided_jobs <= 0.7 * free_jobs


def test_a_grammar_that_is_refused_leaves_nothing_behind() -> None:
    """A journal may hold what was never checked here."""

    def refuse(grammar: Grammar) -> Callable[[Sequence[int]], Sequence[int]]:
        raise InputError("regex: llguidance refuses it")

    head = HeadCore(context=50, stage_count=1, method=make_method("continuous"), certain_of=refuse)
    with pytest.raises(InputError, match="refuses it"):
        head.handle(ask(1, [1, 2], 5, sampling=Sampling(grammar=GRAMMAR)), 0.0)
    head.handle(ask(1, [1, 2], 5), 0.0)
    head.validate()
    assert [request.number for request in head.requests()] == [1]


# ------------------------------------------------------------------------------------------ log-probabilities


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


def with_logprobs(top: int = 1) -> ScriptedHead:
    """Prompt nodes 0 to 2 are segment 0; below the root the guesses 3 (token 0) and 4 (token 1), segment 1;
    below 3 the guess 5."""
    head = ScriptedHead(Continuous(window=9))
    head.ask(top_logprobs=top)
    head.propose({2: [(0, 0.5), (1, 0.3)]})
    head.propose({3: [(2, 0.9)], 4: []})
    assert [each.parts[0].ids for each in head.sent] == [(0, 1, 2), (3, 4), (5,)]
    return head


def test_they_wait_for_their_token_and_go_with_dead_nodes() -> None:
    head = with_logprobs().core
    assert back(head, 1, {3: 2, 4: 9}) == [], "the token after the root is not known yet"
    assert head.requests()[0].logprobs == {3: said(3), 4: said(4)}
    assert back(head, 0, {2: 0}) == [Emit(request=1, tokens=(0, 2), logprobs=(said(2), said(3)))]
    assert head.requests()[0].logprobs == {}


def test_after_a_loss_the_tokens_that_follow_have_theirs_and_none_comes_twice() -> None:
    head = with_logprobs()
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
