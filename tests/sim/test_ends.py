"""Answers that end beside others: whoever goes on waits for nothing of theirs, and what a next turn may keep
is there; answers that another head takes over; and features that come late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from flowspec.core.head.events import Cancel, Submit
from flowspec.core.protocol.messages import Sampling
from flowspec.plan.timing import Curve, LinkSpec
from flowspec.sim.device import DeviceSpec
from flowspec.sim.drafter import FakeDrafter
from flowspec.sim.language import HashLanguage
from flowspec.sim.record import SimulatedAnswer
from flowspec.sim.world import Cluster, World
from flowspec.wire.codec import Tensor
from tests.broken_builds import drops_the_path_at_the_end, tells_no_end
from tests.pipeline import ask, validate_at_rest
from tests.plain import plain_answer
from tests.sim.swarm import Play, draw, plain

LANGUAGE = HashLanguage(40, seed=5)
CANCELLED_S = [0.6, 1.0, 1.1, 1.5]
SEEDS_TO_CATCH = 20


def four_boards(method: str, quality: float = 0.5) -> World:
    """Rows are dear, and half of the guesses are wrong."""
    cluster = Cluster(
        devices=(DeviceSpec(curve=Curve(base_s=0.02, row_s=0.002), layers=5),) * 4,
        control=LinkSpec(delay_s=0.001),
        data=LinkSpec(delay_s=0.002),
        method=method,
        context=300,
        drafting=Curve(base_s=0.005),
    )
    return World(cluster, LANGUAGE, [FakeDrafter(LANGUAGE, quality, seed=2)])


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


# -------------------------------------------------------------------------------- answers that are taken over

ROOM = 28
PROMPT = (3, 1, 4, 1, 5)
TAKEN = HashLanguage(24, seed=9)
SAMPLED = Sampling(temperature=1.0, seed=11)


@dataclass
class StopAt:
    """Ends the answer after these tokens in a row; like the runtime's rule for strings it looks at each token
    once."""

    wanted: tuple[int, ...]
    seen: list[int] = field(default_factory=list)

    def stops_at(self, tokens: Sequence[int]) -> bool:
        self.seen += tokens[len(self.seen) :]
        return any(
            tuple(self.seen[at : at + len(self.wanted)]) == self.wanted for at in range(len(self.seen))
        )


def rest_of(method: str, submit: Submit) -> tuple[list[int], str]:
    """What a cluster answers that knows nothing but this, and why it ends."""
    cluster = Cluster(
        devices=(DeviceSpec(curve=Curve(base_s=0.01), layers=2),) * 3, method=method, context=ROOM
    )
    world = World(cluster, TAKEN, [FakeDrafter(TAKEN, 0.8, 1, context=ROOM)])
    world.at(0.0, submit)
    world.run()
    (answer,) = world.answers[submit.request]
    assert answer.end is not None
    return answer.tokens, answer.end.reason


WHOLE, _ = plain(TAKEN, ask(1, PROMPT, 20, sampling=SAMPLED), ROOM)
STOP = next(at for at, token in enumerate(WHOLE) if at > 5 and token not in WHOLE[:at])


@pytest.mark.parametrize(
    ("submit", "stop", "length", "reason"),
    [
        (ask(1, PROMPT, 12, sampling=SAMPLED), (), 12, "length"),
        (ask(1, PROMPT, 12, sampling=SAMPLED, stop_ids=frozenset([WHOLE[STOP]])), (), STOP, "stop"),
        (ask(1, PROMPT, 20, sampling=SAMPLED), tuple(WHOLE[6:10]), 10, "stop"),
        (ask(1, PROMPT, 200), (), ROOM - len(PROMPT), "length"),
    ],
    ids=["length", "a stop token", "a stop that began before the cut", "the context is full"],
)
def test_an_answer_goes_on_from_every_cut_and_ends_in_the_same_way(
    submit: Submit, stop: tuple[int, ...], length: int, reason: str
) -> None:
    def fresh(answered: Sequence[int] = ()) -> Submit:
        return replace(submit, answered=tuple(answered), stop_rule=StopAt(stop) if stop else None)

    whole, why = plain(TAKEN, fresh(), ROOM)
    assert (len(whole), why) == (length, reason)
    for cut in range(length + 1):
        method = ("continuous", "flowspec-paper", "tree-sd")[cut % 3]
        assert rest_of(method, fresh(whole[:cut])) == (whole[cut:], reason), f"cut after {cut} tokens"


# --------------------------------------------------------------------------------------------------- features

SPOKEN = HashLanguage(50, seed=8)
CONTEXT = 300
FAST, SLOW = LinkSpec(delay_s=0.0005, jitter_s=0.0005), LinkSpec(delay_s=0.05, jitter_s=0.05)
STAGES = 4


def build(
    method: str, captured: tuple[int, ...], control: LinkSpec, data: LinkSpec, quality: float = 0.9
) -> World:
    cluster = Cluster(
        devices=(DeviceSpec(curve=Curve(base_s=0.01, row_s=0.001)),) * STAGES,
        control=control,
        data=data,
        method=method,
        context=CONTEXT,
        captured=captured,
        drafting=Curve(base_s=0.004),
        prefix_block=16,
    )
    drafter = FakeDrafter(SPOKEN, quality, seed=1, context=CONTEXT, captures=(1,))
    return World(cluster, SPOKEN, [drafter])


@pytest.mark.parametrize(
    ("method", "captured", "control", "data"),
    [
        ("continuous", (1, 0, 2, 1), SLOW, FAST),
        ("flowspec-paper", (2, 1, 0, 0), FAST, SLOW),
        ("pipedec", (0, 0, 0, 3), FAST, FAST),
    ],
)
def test_answers_are_exact_and_drafted_whenever_features_come(
    method: str, captured: tuple[int, ...], control: LinkSpec, data: LinkSpec
) -> None:
    """Two conversations with one beginning, and a second turn of one."""
    world = build(method, captured, control, data)
    prompts = {1: tuple(range(40)), 2: (*range(36), 7, 9)}
    for request, prompt in prompts.items():
        world.at(0.3 * request, ask(request, prompt, 20))
    world.run()
    (first,) = world.answers[1]
    again = (*prompts[1], *first.tokens, 3)
    world.at(0.0, ask(1, again, 15))
    world.run()
    validate_at_rest(world)
    for prompt, answer in (
        (prompts[1], first),
        (prompts[2], world.answers[2][0]),
        (again, world.answers[1][1]),
    ):
        count = answer.submit.new_tokens_max
        expected, _ = plain_answer(
            SPOKEN, prompt, answer.submit.sampling, new_tokens_max=count, context=CONTEXT
        )
        assert answer.tokens == expected
        assert answer.end is not None
        assert answer.end.statistics.nodes_drafted > 10
    assert set(world.features) == {stage for stage in range(STAGES - 1) if captured[stage]}


def test_features_of_other_nodes_would_be_noticed() -> None:
    world = build("continuous", (1, 0, 0, 1), FAST, FAST)
    take = world.drafters[0].take_features

    def swapped(request: int, epoch: int, ids: tuple[int, ...], features: Tensor) -> None:
        take(request, epoch, tuple(reversed(ids)), features)  # type: ignore[arg-type]

    world.drafters[0].take_features = swapped  # type: ignore[method-assign, assignment]
    world.at(0.0, ask(1, range(40), 5))
    with pytest.raises(AssertionError, match=r"the features of node .* are of tokens"):
        world.run()


def test_rows_carry_no_features_and_a_node_is_sent_once_by_each_stage() -> None:
    """What travels is as much as the prompt and the path have, whatever was guessed."""
    captured = (1, 0, 2, 0)
    world = build("continuous", captured, FAST, FAST)
    rows: dict[int, list[int]] = {stage: [] for stage in world.features}
    for stage, link in world.features.items():
        receive = link._receive

        def noted(envelope, frames, stage=stage, receive=receive):  # type: ignore[no-untyped-def]
            assert envelope.tensor.width == captured[stage]
            rows[stage] += envelope.message.ids
            receive(envelope, frames)

        link._receive = noted  # type: ignore[method-assign]
    world.at(0.0, ask(1, range(40), 30))
    world.run()
    (request,) = world.head.requests()
    for nodes in rows.values():
        assert len(nodes) == len(set(nodes))
        assert set(nodes) <= set(request.tree.path)
        assert len(nodes) >= 40 + 30 - 2


def test_no_more_is_copied_than_drafters_have_features_of() -> None:
    """The second prompt begins as the first, which all stages have run; its features are on their way."""
    world = build("continuous", (1, 0, 0, 1), SLOW, FAST)
    prompts = {1: tuple(range(48)), 2: (*range(40), 7, 9)}
    world.at(0.0, ask(1, prompts[1], 20))
    while world.head.requests() == [] or world.head.requests()[0].computed < 47:
        assert world.clock.step()
    assert world.head.requests()[0].featured < 32
    world.at(world.clock.now_s, ask(2, prompts[2], 10))
    world.run()
    validate_at_rest(world)
    (answer,) = world.answers[2]
    assert answer.end is not None
    assert answer.end.reused == 32, "it waits for what it copies, features and all"
