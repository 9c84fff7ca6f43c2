"""What alone can follow is a node without anybody being asked, and nobody is asked about what is above it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from flowspec.core.head.certain import CHANCE
from flowspec.core.head.drafter_jobs import draft_part, expandable, most_valuable
from flowspec.core.head.events import Draft, Finished
from flowspec.core.head.fusion import Fusion
from flowspec.core.head.head import HeadCore
from flowspec.core.head.request import Request
from flowspec.core.head.tree_growth import grow, learn, observe
from flowspec.core.methods import WITHOUT_GUESSES, make_method
from flowspec.core.protocol.messages import Grammar, Proposal, Sampling
from flowspec.errors import InputError
from flowspec.plan.timing import Curve
from flowspec.sim.device import DeviceSpec
from flowspec.sim.drafter import FakeDrafter
from flowspec.sim.experiment import Experiment
from flowspec.sim.language import HashLanguage
from flowspec.sim.record import HEAD
from flowspec.sim.world import Handled
from tests.core.asked import PLAIN, asked, move
from tests.pipeline import ask, validate_at_rest

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


def test_what_alone_can_follow_is_there_as_soon_as_its_root_is() -> None:
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


def test_so_it_is_below_a_guess_that_is_worth_a_look() -> None:
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


def test_a_guess_that_proves_certain_is_worth_more() -> None:
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


def test_nothing_is_made_behind_the_end_of_an_answer_and_a_lost_pipeline_s_is_forgotten() -> None:
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
        experiment = Experiment(
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
        world = experiment.build(language, drafters, look)
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
