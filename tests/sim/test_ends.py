"""Answers that end beside others: whoever goes on waits for nothing of theirs, and what a next turn may keep
is there."""

from __future__ import annotations

import pytest

from flowspec.core.head.events import Cancel
from flowspec.core.protocol.messages import Sampling
from flowspec.plan.timing import Curve, LinkSpec
from flowspec.sim.device import DeviceSpec
from flowspec.sim.drafter import FakeDrafter
from flowspec.sim.experiment import Experiment
from flowspec.sim.language import HashLanguage
from flowspec.sim.record import SimulatedAnswer
from flowspec.sim.world import World
from tests.broken_builds import drops_the_path_at_the_end, tells_no_end
from tests.pipeline import ask, validate_at_rest
from tests.plain import plain_answer
from tests.sim.swarm import Play, draw

LANGUAGE = HashLanguage(40, seed=5)
CANCELLED_S = [0.6, 1.0, 1.1, 1.5]
SEEDS_TO_CATCH = 20


def four_boards(method: str, quality: float = 0.5) -> World:
    """Rows are dear, and half of the guesses are wrong."""
    return Experiment(
        devices=(DeviceSpec(curve=Curve(base_s=0.02, row_s=0.002), layers=5),) * 4,
        control=LinkSpec(delay_s=0.001),
        data=LinkSpec(delay_s=0.002),
        method=method,
        context=300,
        drafting=Curve(base_s=0.005),
    ).build(LANGUAGE, [FakeDrafter(LANGUAGE, quality, seed=2)])


def is_plain(answer: SimulatedAnswer, count: int) -> bool:
    """Whether its tokens are the first `count` ones of the plain answer."""
    return (
        answer.tokens
        == plain_answer(LANGUAGE, answer.submit.prompt, Sampling(), new_tokens_max=count, context=300)[0]
    )


def waits() -> list[float]:
    """How long an answer waits for its next token when a long one beside it is cancelled, at several
    instants."""
    found = []
    for cancelled_s in CANCELLED_S:
        world = four_boards("flowspec-paper")
        world.checks = False  # they catch the broken build below by themselves
        world.at(0.0, ask(1, (3, 1, 4), 200))
        world.at(0.0, ask(2, (1, 5, 9), 60))
        world.at(cancelled_s, Cancel(request=1))
        world.run(until_s=cancelled_s + 1.0)
        (cancelled,), (other,) = world.answers[1], world.answers[2]
        assert cancelled.end is not None
        assert cancelled.end.reason == "cancelled"
        assert is_plain(other, len(other.tokens))
        found.append(min(time_s for time_s in other.times_s if time_s > cancelled_s) - cancelled_s)
    return found


def test_the_next_token_beside_a_cancelled_answer_comes_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    told = waits()
    tells_no_end(monkeypatch)
    untold = waits()
    assert all(sooner <= later + 1e-9 for sooner, later in zip(told, untold, strict=True))
    assert sum(told) < 0.8 * sum(untold)


def go_on_after_each_cancel() -> None:
    """A conversation that is cancelled at any instant, and goes on with what was said by then."""
    for cancelled_s in CANCELLED_S:
        world = four_boards("continuous")
        world.at(0.0, ask(1, (3, 1, 4), 200))
        world.at(cancelled_s, Cancel(request=1))
        world.run()
        (first,) = world.answers[1]
        world.at(cancelled_s + 1.0, ask(1, (*first.submit.prompt, *first.tokens, 7), 5))
        world.run()
        validate_at_rest(world)
        assert is_plain(world.answers[1][1], 5)


def test_a_cancelled_conversation_goes_on_with_all_that_was_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on_after_each_cancel()
    drops_the_path_at_the_end(monkeypatch)
    with pytest.raises(AssertionError, match="node at each position"):
        go_on_after_each_cancel()


def test_a_head_that_tells_no_end_is_caught_by_any_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    tells_no_end(monkeypatch)

    def play() -> None:
        for seed in range(SEEDS_TO_CATCH):
            Play(draw(seed), checks=True).run()

    with pytest.raises(AssertionError, match="no stage is told of the end"):
        play()
