"""Prompts that begin with what other conversations have computed: what the head asks of the stages, and when.

`tests/sim` and `lab/faults` show that answers are right whatever happens meanwhile, `tests/model`
that bits are.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from flowspec.core.head.drafter_traits import DrafterTraits
from flowspec.core.head.events import Cancel, Forget, PipelineLost, PipelineReformed, SendToStages
from flowspec.core.head.flights import Bounds
from flowspec.core.head.head import HeadCore
from flowspec.core.head.sharing import BLOCK
from flowspec.core.methods import make_method
from flowspec.core.protocol.messages import Open, Release, SegmentPart
from flowspec.core.stage.slots import CacheRoom
from tests.core.runs import CONTEXT, Run
from tests.nightly import seeds
from tests.pipeline import ask

SYSTEM = [7 * at % 60 for at in range(200)]
SHARED = 200 // BLOCK * BLOCK


class Shared(Run):
    """What of prompts is sent, and what is copied."""

    def start_again(self) -> None:
        """Other stages, which hold nothing; what was on its way is gone."""
        self.pipeline._links.clear()
        self.pipeline.__post_init__()
        for caches in self.layers.caches:
            caches.clear()

    def prompt_rows(self, request: int) -> int:
        """Rows of its prompts that were sent."""
        return sum(sum(part.committed) for part in self.parts(request))

    def parts(self, request: int) -> list[SegmentPart]:
        parts = [part for segment in self.segments for part in segment.parts]
        return [part for part in parts if part.commit.request == request]

    def told(self, kind: type) -> list[Any]:
        """What all stages were told by control connections."""
        told = [each.message for each in self.sent if isinstance(each, SendToStages)]
        return [each for each in told if isinstance(each, kind)]

    def openings(self, request: int) -> list[Open]:
        """Those that went with segments."""
        return [part.opening for part in self.parts(request) if part.opening is not None]


def test_a_second_client_costs_its_own_tokens_but_for_less_than_a_block() -> None:
    run = Shared()
    run.ask(1, [*SYSTEM, 1, 2, 3])
    run.settle()
    run.ask(2, [*SYSTEM, 4, 5])
    run.settle()
    run.check(1, [*SYSTEM, 1, 2, 3])
    run.check(2, [*SYSTEM, 4, 5])
    assert run.prompt_rows(2) == 202 - SHARED
    assert run.pipeline.ends[2].reused == SHARED
    assert (run.openings(2)[0].source, run.openings(2)[0].keep) == (1, SHARED)
    assert [each.request for each in run.told(Open)] == [1], "a copy goes with its segment alone"
    run = Shared()
    run.ask(1, [*SYSTEM[: BLOCK - 1], 1])
    run.settle()
    run.ask(2, [*SYSTEM[: BLOCK - 1], 2, *SYSTEM])
    run.settle()
    assert run.head.fired["copies"] == 0
    run.ask(3, SYSTEM[:BLOCK])
    run.ask(4, [*SYSTEM[:BLOCK], 9])
    run.settle()
    assert run.head.fired["copies"] == 1, "the last token of a prompt is always run"


def test_clients_who_come_at_once_wait_for_the_first_to_read() -> None:
    run = Shared()
    for request in range(1, 9):
        run.ask(request, [*SYSTEM, request, request])
    run.settle()
    for request in range(1, 9):
        run.check(request, [*SYSTEM, request, request])
    assert run.prompt_rows(1) == 202
    assert [run.prompt_rows(request) for request in range(2, 9)] == [202 - SHARED] * 7
    assert run.head.fired["reads along"] == 7


def test_what_waits_takes_over_when_the_reader_is_cancelled() -> None:
    run = Shared()
    run.ask(1, [*SYSTEM, 1])
    run.ask(2, [*SYSTEM, 2])
    run.ask(3, [*SYSTEM, 3])
    run.pipeline.give(Cancel(request=1))
    run.settle()
    run.check(2, [*SYSTEM, 2])
    run.check(3, [*SYSTEM, 3])
    assert run.prompt_rows(3) == 201 - SHARED


def test_a_source_is_released_or_rewound_once_it_is_copied() -> None:
    run = Shared()
    run.ask(1, [*SYSTEM, 1])
    run.settle()
    run.ask(2, [*SYSTEM, 2])
    run.pipeline.give(Forget(request=1))
    assert run.told(Release) == [], "a segment that copies from it is in flight"
    run.settle()
    run.check(2, [*SYSTEM, 2])
    assert run.told(Release) == [Release(request=1)]
    assert all(stage.requests() == [2] for stage in run.pipeline.stages)
    # Its next question goes back further; the Open of that goes behind the one that copies.
    run = Shared()
    run.ask(1, [*SYSTEM, 1])
    run.settle()
    before = len(run.told(Open))
    run.ask(2, [*SYSTEM, 2])
    run.ask(1, [*SYSTEM[:20], 5])
    assert len(run.told(Open)) == before
    run.settle()
    run.check(2, [*SYSTEM, 2])
    run.check(1, [*SYSTEM[:20], 5])


def test_whoever_waits_in_vain_holds_up_nobody() -> None:
    """Its source goes while one segment, all that may be in flight, is on its way. Now a longer beginning is
    that of an answer whose root is still to be sent, and that is sent, though it is the turn of a prompt."""
    run = Shared(HeadCore(context=CONTEXT, stage_count=3, prefix_block=1, bounds=Bounds(flights_max=1)))
    run.ask(1, SYSTEM, 40)
    run.settle()
    text = [*SYSTEM, *run.pipeline.answers[1], 3]
    run.ask(2, SYSTEM, 40)
    while len(run.pipeline.answers.get(2, ())) < 10:
        run.pipeline.step(next(key for key, link in run.pipeline._links.items() if link))
    run.ask(3, text)
    (asked,) = (each for each in run.head.requests() if each.number == 3)
    assert (asked.awaits and asked.awaits.number, run.head.in_flight) == (1, 1)
    run.pipeline.give(Forget(request=1))
    run.settle()
    run.check(2, SYSTEM, 40)
    run.check(3, text)
    assert run.pipeline.ends[3].reused > len(SYSTEM)


@pytest.mark.parametrize("seed", seeds(15, 500))
def test_whatever_happens_to_a_source_the_copy_is_right(seed: int) -> None:
    """Control and data interleave in any order; sources go on, are cancelled, forgotten, and asked again."""
    rng = random.Random(seed)
    run = Shared(HeadCore(context=CONTEXT, stage_count=3, prefix_block=rng.choice([1, 8, 32])), seed)
    prompts: dict[int, list[int]] = {}
    numbers = list(range(1, 5))
    for _ in range(20):
        request, known = rng.choice(numbers), {each.number: each for each in run.head.requests()}
        if request in known and known[request].submit is not None:
            if rng.random() < 0.3:
                run.pipeline.give(Cancel(request=request))
        else:
            text = prompts.get(rng.choice(numbers), SYSTEM)
            prompts[request] = [*text[: rng.randint(len(text) // 3, len(text))], *rng.sample(range(60), 2)]
            run.ask(request, prompts[request], rng.randint(1, 20))
        if rng.random() < 0.15:
            other = rng.choice(numbers)
            numbers[numbers.index(other)] = max(numbers) + 1  # that of one that is over is not used again
            run.pipeline.give(Forget(request=other))
            prompts.pop(other, None)
        run.step(rng.choice([0, 3, 30]))
    run.settle()
    for request, prompt in prompts.items():
        answer = run.pipeline.answers.get(request, [])
        assert run.pipeline.ends[request].reason in ("length", "cancelled")
        if answer:
            run.check(request, prompt, len(answer))
    assert run.head.fired["copies"], f"seed {seed}"
    for stage in run.pipeline.stages:
        stage.validate()


def test_nothing_is_shared_where_that_is_off_or_a_drafter_wants_all_features() -> None:
    run = Shared(HeadCore(context=CONTEXT, stage_count=3, prefix_block=0))
    for request in (1, 2):
        run.ask(request, [*SYSTEM, request])
    run.settle()
    assert [run.prompt_rows(request) for request in (1, 2)] == [201, 201]
    traits = [DrafterTraits(context=CONTEXT, needs_features=True)]
    head = HeadCore(context=CONTEXT, stage_count=3, method=make_method("continuous"), drafters=traits)
    for request in (1, 2):
        head.handle(ask(request, [*SYSTEM, request], 5), 0.0)
    assert all(each.awaits is None for each in head.requests())


def test_what_the_next_answer_copies_from_is_given_up_last() -> None:
    """Room for two: the older one of two idle conversations stays, for the third begins as it does."""
    head = HeadCore(context=CONTEXT, stage_count=3)
    one = head.admission.need_of(ask(1, [*SYSTEM, 1], 5)).stages[0]
    head.admission.move_to([CacheRoom(slots=2 * one)] * 3)
    run = Shared(head)
    run.ask(1, [*SYSTEM, 1])
    run.settle()
    run.ask(2, [59, 58, *SYSTEM])
    run.settle()
    run.ask(3, [*SYSTEM, 3])
    run.settle()
    run.check(3, [*SYSTEM, 3])
    assert run.pipeline.ends[3].reused == SHARED
    assert sorted(run.pipeline.stages[0].requests()) == [1, 3]
    assert head.fired["gives up"] == 1


def test_a_pipeline_that_is_lost_with_a_copy_on_its_way_begins_anew() -> None:
    """Nothing is told of copies that were asked of the lost one; of the next one reads for all."""
    run = Shared()
    run.ask(1, [*SYSTEM, 1])
    run.settle()
    texts = {1: [*SYSTEM, 1, *run.pipeline.answers[1], 8], 2: [*SYSTEM, 2], 3: [*SYSTEM, 3]}
    for request, text in texts.items():
        run.ask(request, text)
    assert run.openings(2)[-1].source == 1
    run.pipeline.give(PipelineLost())
    assert all(each.opening.source == -1 and each.opening.keep == 0 for each in run.head.requests())
    run.sent.clear()
    run.start_again()
    run.pipeline.give(PipelineReformed(stage_count=3))
    assert [each.awaits.number for each in run.head.requests() if each.awaits is not None] == [1, 1]
    run.settle()
    for request, text in texts.items():
        run.check(request, text)
    rows = {request: run.prompt_rows(request) for request in texts}
    assert rows == {1: len(texts[1]), 2: 201 - SHARED, 3: 201 - SHARED}
