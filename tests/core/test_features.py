"""The target's features at the head: matched by node, whatever the ways that they take, and given along the
path."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec import structs

from flowspec.core.head.events import FeaturesArrived, SendToStages, TakeFeatures
from flowspec.core.head.features import LATE_S, FeatureDesk
from flowspec.core.head.head import HeadCore
from flowspec.core.head.request import Request
from flowspec.core.methods import make_method
from flowspec.core.protocol.messages import Commit, Features
from flowspec.errors import PeerError
from flowspec.plan.timing import Curve, LinkSpec
from flowspec.sim.device import DeviceSpec
from flowspec.sim.drafter import FakeDrafter
from flowspec.sim.language import HashLanguage
from flowspec.sim.world import Cluster, Handled, World
from tests.core.asked import WANTS_FEATURES, asked
from tests.pipeline import ask

STAGES = (0, 2)


def begun(prompt: int = 4) -> tuple[FeatureDesk, Request]:
    """Of a prompt in nodes 0, 1, ..., of which nothing has come."""
    request = asked(prompt, featured=0)
    request.wants_features = True
    return FeatureDesk(STAGES), request


def sent(stage: int, nodes: Sequence[int], *, epoch: int = 0, request: int = 1) -> FeaturesArrived:
    """Each row says whose it is."""
    rows = tuple(f"{node} of {stage}" for node in nodes)
    return FeaturesArrived(
        stage=stage, features=Features(request=request, epoch=epoch, ids=tuple(nodes)), rows=rows
    )


def rows_of(*nodes: int) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(f"{node} of {stage}" for stage in STAGES) for node in nodes)


def test_drafters_get_features_along_the_path_once_every_stage_has_sent_its_own() -> None:
    desk, request = begun()
    desk.take(sent(2, [2, 0]), request)
    desk.take(sent(0, [1]), request)
    assert desk.complete(request) is None
    desk.take(sent(0, [0]), request)
    assert desk.complete(request) == TakeFeatures(request=1, epoch=0, nodes=(0,), rows=rows_of(0))
    desk.take(sent(0, [2]), request)
    assert desk.complete(request) is None, "node 1 stands before node 2"
    desk.take(sent(2, [1]), request)
    found = desk.complete(request)
    assert found is not None
    assert (found.nodes, found.rows) == ((1, 2), rows_of(1, 2))
    assert request.featured == 3
    desk.validate({1: request})


def test_the_last_stage_may_be_ahead_of_the_verdict_and_what_dies_is_dropped() -> None:
    desk, request = begun()
    for stage in STAGES:
        desk.take(sent(stage, [0, 1, 2, 3]), request)
    desk.complete(request)
    right, wrong = (request.tree.add(3, token, 0.5) for token in (7, 8))
    request.tree.mark_sent([right, wrong])
    desk.take(sent(2, [right, wrong]), request)
    request.tree.commit(right)
    desk.take(sent(0, [wrong]), request)
    request.tree.commit(request.tree.add(right, 9, 1.0))
    found = desk.complete(request)
    assert found is not None
    assert found.nodes == (3,)
    desk.take(sent(0, [right]), request)
    found = desk.complete(request)
    assert found is not None
    assert (found.nodes, found.rows) == ((right,), rows_of(right))
    desk.forget_dead(request)
    assert not desk._came[1], "nothing is kept of what is dead, or given"


def test_what_a_stage_sent_in_the_last_epoch_counts_as_far_as_it_is_on_the_path() -> None:
    desk, request = begun()
    desk.take(sent(0, [0, 1, 2]), request)
    request.tree.rewind(2)
    request.tree.extend_path([200, 201])
    request.opening = structs.replace(request.opening, epoch=1, keep=2, length=4, root=request.tree.root)
    desk.forget_dead(request)
    desk.take(sent(2, [0, 1, 2]), request)
    assert desk.complete(request) == TakeFeatures(request=1, epoch=1, nodes=(0, 1), rows=rows_of(0, 1))


@pytest.mark.parametrize(
    ("said", "trouble"),
    [
        (sent(1, [0]), "stage 2 sent features, but it was to capture nothing"),
        (sent(0, [0], epoch=1), "expected features of epoch 0 of request 1 at most, got 1"),
        (sent(0, [0, 9]), "features came of node 9 of request 1, which there is not"),
    ],
)
def test_what_no_honest_stage_sends_is_refused(said: FeaturesArrived, trouble: str) -> None:
    desk, request = begun()
    with pytest.raises(PeerError, match=trouble):
        desk.take(said, request)


def test_a_lost_pipeline_takes_half_of_what_came_along() -> None:
    head = HeadCore(
        context=100,
        stage_count=3,
        method=make_method("continuous"),
        drafters=[WANTS_FEATURES],
        capturing=STAGES,
    )
    head.handle(ask(1, range(9), 5), 0.0)
    head.handle(sent(0, [0]), 0.0)
    head.features.begin((1,))
    head.features.validate({each.number: each for each in head.requests()})
    assert head.features.capturing == (1,)
    head.handle(sent(1, [0]), 0.0)
    (request,) = head.requests()
    assert request.featured == 1, "one stage has all now"


# --------------------------------------------------------------------------------------------- whole answers

LANGUAGE = HashLanguage(40, seed=5)
SLOW = LinkSpec(delay_s=0.02)


@pytest.mark.parametrize("method", ["tree-sd", "continuous"])
def test_a_verdict_is_told_at_once_where_features_are_read(method: str) -> None:
    """Else stages would send theirs with the next segment, for whose guesses they are needed."""
    told: list[float] = []
    verdicts: list[float] = []

    def watch(handled: Handled) -> None:
        for command in handled.commands:
            if isinstance(command, SendToStages) and isinstance(command.message, Commit):
                told.append(handled.now_s)
            if type(command).__name__ == "Emit":
                verdicts.append(handled.now_s)

    spec = DeviceSpec(curve=Curve(base_s=0.01))
    cluster = Cluster(devices=(spec,) * 3, control=SLOW, data=SLOW, method=method, context=200)
    drafter = FakeDrafter(LANGUAGE, 1.0, seed=1, context=200, captures=(1,))
    world = World(cluster, LANGUAGE, [drafter], watch)
    world.at(0.0, ask(1, (3, 1, 4), 30))
    world.run()
    assert world.head.fired["late features"] == 0
    assert set(verdicts[:-1]) <= set(told)
    (answer,) = world.answers[1]
    assert answer.end is not None
    statistics = answer.end.statistics
    assert statistics.tokens_in_flight > 8, "guesses took part"


def test_a_stage_that_sends_no_features_costs_guesses_and_not_the_answer() -> None:
    cluster = Cluster(devices=(DeviceSpec(curve=Curve(base_s=0.01)),) * 3, method="continuous", context=200)
    drafter = FakeDrafter(LANGUAGE, 1.0, seed=1, context=200, captures=(1,))
    world = World(cluster, LANGUAGE, [drafter])
    world.features[0].tamper = lambda frames: []
    world.at(0.0, ask(1, (3, 1, 4), 20))
    world.run()
    (answer,) = world.answers[1]
    assert answer.end is not None
    assert len(answer.tokens) == 20
    assert world.head.fired["late features"] == 1
    assert answer.ended_s < LATE_S + 20 * 0.05, "they are waited for once"
    plain = World(Cluster(devices=cluster.devices, context=200), LANGUAGE)
    plain.at(0.0, ask(1, (3, 1, 4), 20))
    plain.run()
    assert answer.tokens == plain.answers[1][0].tokens
