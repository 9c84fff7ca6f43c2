"""Hundreds of random schedules, and thousands at night: whatever the cluster, the method and the order of
events, the answers are the plain ones."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from flowspec.core.head.events import Emit, Forget, SendToFirstStage
from flowspec.core.methods import METHODS
from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Commit
from flowspec.core.stage.events import ControlArrived, Trim
from flowspec.core.stage.slots import CacheRoom
from flowspec.plan.timing import Curve
from flowspec.sim.device import DeviceSpec
from flowspec.sim.drafter import FakeDrafter
from flowspec.sim.experiment import Experiment
from flowspec.sim.language import HashLanguage
from flowspec.sim.record import HEAD
from flowspec.sim.world import Handled
from tests.nightly import seeds
from tests.pipeline import ask, validate_at_rest
from tests.plain import plain_answer
from tests.sim.swarm import Play, draw

SEEDS = seeds(300, 20_000)
RUN_TWICE_EVERY = 4
CHUNK = 10
REMEMBERED = {
    6: "a new turn keeps nodes that the drafter was never told are committed",
    17: "a new turn keeps nodes that the stages were never told are committed",
    12462: "a lock-step turn with nothing to draft leaves verified segments unseen for ever",
}


def play(seed: int) -> None:
    """Runs a seed with every check after every event, and one in a few once more for the digest."""
    schedule = draw(seed)
    first = Play(schedule, checks=True).run()
    if seed % RUN_TWICE_EVERY == 0:
        assert first == Play(schedule, checks=False).run(), "two runs of one seed differ"


@pytest.mark.parametrize("start", SEEDS[::CHUNK])
def test_any_schedule_gives_the_plain_answers(start: int) -> None:
    for seed in range(start, start + CHUNK):
        try:
            play(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.parametrize("seed", REMEMBERED, ids=REMEMBERED.values())
def test_seeds_that_once_failed(seed: int) -> None:
    play(seed)


def test_the_swarm_sees_the_troubles_that_it_is_for() -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        schedule = draw(seed)
        run = Play(schedule, checks=False)
        _watch(run, seen)
        run.run()
        seen[f"{len(run.world.stages)} stages"] += 1
        seen["timers"] += run.world.timers
        seen["drafts"] += run.world.drafts
        seen["window slots given back"] += sum(stage.fired["given back"] for stage in run.world.stages)
        seen["window slots restored"] += sum(stage.fired["restored"] for stage in run.world.stages)
        seen["read anew"] += run.world.head.fired["read anew"]
        for hop in (hop for timed in run.world.timings for hop in timed.hops):
            seen["dead in queue"] += hop.dead_in_queue
            seen["dead between layers"] += hop.dead_between_layers
            seen["dead late"] += hop.dead_late
        for answer in (answer for answers in run.world.answers.values() for answer in answers):
            assert answer.end is not None
            seen[answer.end.reason] += 1
            seen["cancelled in mid-answer"] += answer.end.reason == "cancelled" and bool(answer.tokens)
            seen["reused"] += answer.end.reused > 0
            seen["several tokens at once"] += len(set(answer.times_s)) < len(answer.times_s)
            seen["the context is full"] += (
                len(answer.submit.prompt) + len(answer.tokens) == schedule.experiment.context
            )
    wanted = [
        *(f"{count} stages" for count in range(1, 9)),
        *(
            "timers",
            "drafts",
            "dead in queue",
            "dead between layers",
            "dead late",
            "stop",
            "length",
            "cancelled",
        ),
        *("window slots given back", "window slots restored", "read anew"),
        *("cancelled in mid-answer", "reused", "several tokens at once", "the context is full"),
        *("trims", "early commits", "shared segments", "forgotten", "stops behind a drafted node"),
    ]
    assert [name for name in wanted if not seen[name]] == []


def test_answers_that_outgrow_their_room_wait_and_go_on_as_if_they_had_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Caches that grow by few slots, of which there are hardly more than one answer may come to take."""
    monkeypatch.setattr(limits, "CACHE_BLOCK_SLOTS", 4)
    seen: Counter[str] = Counter()
    for seed in range(20):
        schedule = draw(seed)
        run = Play(schedule, checks=True)
        rng, admission = random.Random(f"room {seed}"), run.world.head.admission
        prompts = sorted(len(dialogue.first.prompt) for dialogue in schedule.dialogues)[-2:]
        two = sum(prompts) + 2 * limits.TREE_NODES_MAX + rng.choice([8, 12])
        slots = max(schedule.experiment.context + limits.TREE_NODES_MAX, two)
        admission.reserved_tokens = rng.choice([1, 3])
        admission.move_to([CacheRoom(slots=slots)] * len(run.world.stages))
        run.run()
        seen += run.world.head.fired
    wanted = ("waits", "grows", "pauses", "gives up", "begins again")
    assert [name for name in wanted if not seen[name]] == []


def test_the_swarm_draws_every_method() -> None:
    drawn = Counter(draw(seed).method_name for seed in range(200))
    assert set(drawn) == set(METHODS)


@pytest.mark.parametrize(
    ("method", "nodes"),
    [("tree-sd", 512), ("chunk-pp", 400), ("pipedec", 300), ("flowspec-paper", 400), ("continuous", 512)],
)
def test_a_tree_that_wants_too_much_stays_within_the_slots(method: str, nodes: int) -> None:
    """The widest trees and a drafter that is always wrong: the bounds are met, hold after every event, and
    stop nothing."""
    language = HashLanguage(60, seed=1, sharpness=0.5)
    options = {"nodes": nodes, "width": 32}
    experiment = Experiment(
        devices=(DeviceSpec(curve=Curve(base_s=0.05)),) * 4,
        method=method,
        options=options,
        context=200,
        drafting=Curve(base_s=0.001),
    )
    world = experiment.build(language, [FakeDrafter(language, 0.0, seed=1)])
    most = 0

    def watch(handled: Handled) -> None:
        nonlocal most
        del handled
        most = max(most, max(request.tree.sent_alive for request in world.head.requests()))

    world.on_event = watch
    submit = ask(0, (1, 2, 3), 6)
    world.at(0.0, submit)
    world.run(events_max=10_000)
    validate_at_rest(world)
    assert (
        world.answers[0][0].tokens
        == plain_answer(language, submit.prompt, submit.sampling, new_tokens_max=6, context=200)[0]
    )
    assert method == "continuous" or most == limits.TREE_NODES_MAX, "it never came to the bound"


def _watch(run: Play, seen: Counter[str]) -> None:
    look = run.world.on_event
    assert look is not None

    def watch(handled: Handled) -> None:
        look(handled)
        if handled.place == HEAD:
            seen["forgotten"] += isinstance(handled.event, Forget)
            for command in handled.commands:
                seen["shared segments"] += (
                    isinstance(command, SendToFirstStage) and len(command.segment.parts) > 1
                )
                if isinstance(command, Emit):
                    answer = run.world.answers[command.request][-1]
                    seen["stops behind a drafted node"] += (
                        answer.end is not None and answer.end.reason == "stop" and len(command.tokens) > 1
                    )
        else:
            seen["trims"] += any(isinstance(command, Trim) for command in handled.commands)
            is_commit = isinstance(handled.event, ControlArrived) and isinstance(
                handled.event.message, Commit
            )
            seen["early commits"] += is_commit and any(
                request.early for request in run.world.stages[handled.place]._requests.values()
            )

    run.world.on_event = watch
