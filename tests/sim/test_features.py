"""Features that come late, in any order and from any stages: answers are exact, and drafters read those of
the nodes that they are told (`FakeDrafter` compares)."""

from __future__ import annotations

import pytest

from flowspec.plan.timing import Curve, LinkSpec
from flowspec.sim.device import DeviceSpec
from flowspec.sim.drafter import FakeDrafter
from flowspec.sim.experiment import Experiment
from flowspec.sim.language import HashLanguage
from flowspec.sim.world import Links, World
from flowspec.wire.codec import Tensor
from tests.pipeline import ask, validate_at_rest
from tests.plain import plain_answer

LANGUAGE = HashLanguage(50, seed=8)
CONTEXT = 300
FAST, SLOW = LinkSpec(delay_s=0.0005, jitter_s=0.0005), LinkSpec(delay_s=0.05, jitter_s=0.05)
STAGES = 4


def build(method: str, captured: tuple[int, ...], links: Links, quality: float = 0.9) -> World:
    experiment = Experiment(
        devices=(DeviceSpec(curve=Curve(base_s=0.01, row_s=0.001)),) * STAGES,
        links=links,
        method=method,
        context=CONTEXT,
        captured=captured,
        drafting=Curve(base_s=0.004),
        prefix_block=16,
    )
    drafter = FakeDrafter(LANGUAGE, quality, seed=1, context=CONTEXT, captures=(1,))
    return experiment.build(LANGUAGE, [drafter])


def links(control: LinkSpec, data: LinkSpec) -> Links:
    return Links(control=(control,) * STAGES, data=(data,) * (STAGES + 1))


@pytest.mark.parametrize(
    ("method", "captured", "ways"),
    [
        ("continuous", (1, 0, 2, 1), links(SLOW, FAST)),
        ("flowspec-paper", (2, 1, 0, 0), links(FAST, SLOW)),
        ("pipedec", (0, 0, 0, 3), links(FAST, FAST)),
    ],
)
def test_answers_are_exact_and_drafted_whenever_features_come(
    method: str, captured: tuple[int, ...], ways: Links
) -> None:
    """Two conversations with one beginning, and a second turn of one."""
    world = build(method, captured, ways)
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
            LANGUAGE, prompt, answer.submit.sampling, new_tokens_max=count, context=CONTEXT
        )
        assert answer.tokens == expected
        assert answer.end is not None
        assert answer.end.statistics.nodes_drafted > 10
    assert set(world.features) == {stage for stage in range(STAGES - 1) if captured[stage]}


def test_features_of_other_nodes_would_be_noticed() -> None:
    world = build("continuous", (1, 0, 0, 1), links(FAST, FAST))
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
    world = build("continuous", captured, links(FAST, FAST))
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
    world = build("continuous", (1, 0, 0, 1), links(SLOW, FAST))
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
