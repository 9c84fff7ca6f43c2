"""The head with real stage cores and a fake model: every order of events gives the plain answer, and stages
that are not honest are found out."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.head.events import (
    Cancel,
    Emit,
    Finished,
    Forget,
    PipelineReformed,
    SendToFirstStage,
    SendToStages,
    VerifiedArrived,
)
from flowspec.core.head.head import HeadCore
from flowspec.core.head.prompt_chunks import GAIN, LEAST, SlotTime, chunk_rows
from flowspec.core.head.statistics import Statistics
from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Hop, Open, Release, Verified, VerifiedPart
from flowspec.errors import InputError, PeerError
from flowspec.plan.timing import Curve
from tests.core.runs import LANGUAGE, Run
from tests.nightly import seeds
from tests.pipeline import ask

VOCABULARY = LANGUAGE.vocabulary_size


def pipeline(stages: int, *, context: int = 4000, seed: int | None = None) -> Run:
    return Run(HeadCore(context=context, stage_count=stages, prefix_block=0), seed)


@pytest.mark.parametrize(
    ("stages", "length"), [(1, 1), (2, limits.PREFILL_CHUNK), (2, limits.PREFILL_CHUNK + 1), (5, 700)]
)
def test_an_answer_is_the_plain_one(stages: int, length: int) -> None:
    prompt = [i * 7 % VOCABULARY for i in range(length)]
    run = pipeline(stages)
    run.ask(1, prompt, 20)
    run.settle()
    run.check(1, prompt, 20)
    end = run.pipeline.ends[1]
    assert (end.reason, end.reused, run.head.in_flight) == ("length", 0, 0)


@pytest.mark.parametrize("seed", seeds(15, 500))
def test_any_order_of_control_and_data_gives_the_same_answers(seed: int) -> None:
    """Of several turns, of which some are cancelled."""
    rng = random.Random(seed)
    run = pipeline(rng.randint(1, 4), seed=seed)
    prompts = {
        request: [rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 3, 140, 300]))]
        for request in range(rng.randint(1, 4))
    }
    counts = {request: rng.randint(1, 12) for request in prompts}
    for _ in range(3):
        for request, prompt in prompts.items():
            run.ask(request, prompt, counts[request])
        run.step(rng.randint(0, 40))
        if rng.random() < 0.5:
            run.pipeline.give(Cancel(request=rng.choice(list(prompts))))
        run.settle()
        for request, prompt in prompts.items():
            answer = run.pipeline.answers.get(request, [])
            if run.pipeline.ends[request].reason == "length":
                assert len(answer) == counts[request]
            if answer:
                run.check(request, prompt, len(answer))
            cut = rng.randint(1, len(prompt) + len(answer))
            more = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 5))]
            prompts[request] = [*prompt, *answer][:cut] + more
    assert run.head.in_flight == 0


def test_a_second_turn_reuses_the_longest_common_prefix() -> None:
    prompt = list(range(50))
    run = pipeline(3)
    run.ask(1, prompt, 10)
    run.settle()
    answer = run.pipeline.answers[1]
    for again, reused in (
        ([*prompt, *answer, 3, 4], len(prompt) + len(answer) - 1),  # the last token was drawn and never run
        ([*prompt[:20], 55, *prompt[21:]], 20),
        ([*prompt[:20], 55, *prompt[21:]], len(prompt) - 1),  # the same again runs its last token again
    ):
        run.ask(1, again, 5)
        run.settle()
        run.check(1, again, 5)
        assert run.pipeline.ends[1].reused == reused


def test_prompts_that_cannot_be_answered_are_refused_and_change_nothing() -> None:
    run = pipeline(2, context=20)
    for prompt in ([], list(range(20)), list(range(21))):
        with pytest.raises(InputError):
            run.ask(1, prompt)
    run.ask(1, [1, 2])
    run.settle()
    run.check(1, [1, 2])


def test_a_forgotten_conversation_is_released_everywhere() -> None:
    run = pipeline(2)
    run.ask(1, [1, 2, 3])
    run.settle()
    assert run.head.handle(Forget(request=1), 0.0) == [SendToStages(message=Release(request=1))]
    assert run.head.handle(Forget(request=1), 0.0) == []
    run.ask(2, list(range(50)) * 9, 30)  # forgotten in mid-answer: once nothing of it is in flight
    assert run.head.handle(Forget(request=2), 0.0) == [
        Finished(request=2, reason="cancelled", reused=0, statistics=Statistics(stage_count=2))
    ]
    run.settle()
    assert run.head.in_flight == 0
    assert 2 not in [each for stage in run.pipeline.stages for each in stage.requests()], (
        "no segment opened it again behind the Release"
    )


def test_the_first_commands_of_an_answer_are_its_open_and_its_first_chunks() -> None:
    head = HeadCore(context=4000, stage_count=2)
    commands = head.handle(ask(7, range(1000), 5), 0.0)
    assert isinstance(commands[0], SendToStages)
    assert isinstance(commands[0].message, Open)
    segments = [command.segment for command in commands[1:] if isinstance(command, SendToFirstStage)]
    assert len(segments) == 3 == head.in_flight, "one more than there are stages"
    assert [segment.row_count for segment in segments] == [limits.PREFILL_CHUNK] * 3
    assert all(segment.parts[0].opening is not None for segment in segments), (
        "the Open rides along until it is known to be everywhere"
    )
    later = head.handle(VerifiedArrived(verified=Verified(segment=0, parts=(), hops=())), 0.0)
    (sent,) = [command.segment for command in later if isinstance(command, SendToFirstStage)]
    assert sent.parts[0].opening is None


def asked_once(stages: int = 1) -> HeadCore:
    """A head whose prompt, nodes 0 to 2, is in flight as segment 0; planned were so many stages, one came."""
    head = HeadCore(context=100, stage_count=stages)
    head.vocabulary = 50
    head.begin(PipelineReformed(stage_count=1))
    head.handle(ask(1, [1, 2, 3], 5), 0.0)
    return head


def said(*next_tokens: tuple[int, int], hops: int = 1, segment: int = 0) -> VerifiedArrived:
    part = VerifiedPart(
        request=1,
        epoch=0,
        ids=tuple(node for node, _ in next_tokens),
        next_tokens=tuple(token for _, token in next_tokens),
    )
    hop = Hop(received_s=0, queued_s=0, compute_s=0, own_s=0, rows=1)
    parts = (part,) if next_tokens else ()
    return VerifiedArrived(verified=Verified(segment=segment, parts=parts, hops=(hop,) * hops))


@pytest.mark.parametrize(
    ("event", "trouble"),
    [
        (said(), "never dropped"),
        (said(segment=3), "not in flight"),
        (said((2, 7), hops=2), "segment 0 came back from a pipeline of 2, expected one of 1"),
        (said((2, 50)), "expected next tokens below 50, got 50"),
        (said((2, 7), (3, 7)), "node 3 of request 1 was verified, but the segment did not carry it"),
    ],
)
def test_what_no_honest_stage_says_is_refused(event: VerifiedArrived, trouble: str) -> None:
    assert Emit(request=1, tokens=(49,)) in asked_once(stages=4).handle(said((2, 49)), 0.0)
    with pytest.raises(PeerError, match=trouble):
        asked_once().handle(event, 0.0)


def test_too_many_conversations_are_refused_before_a_stage_is_asked() -> None:
    head = HeadCore(context=100, stage_count=1)
    for number in range(limits.CONVERSATIONS_MAX):
        head.handle(ask(number, [1, 2, 3], 5), 0.0)
    with pytest.raises(InputError, match=f"at most {limits.CONVERSATIONS_MAX} conversations at once"):
        head.handle(ask(1000, [1, 2, 3], 5), 0.0)
    assert len(head.requests()) == limits.CONVERSATIONS_MAX
    head.handle(Cancel(request=0), 0.0)
    head.handle(ask(0, [1, 2, 3, 4], 5), 0.0)


# ------------------------------------------------------------------------------------------ chunks of prompts

BOARD = Curve(base_s=1.0, extra_row_s=0.1).seconds


def through_s(length: int, chunk: int, stages: int, slot_s: SlotTime) -> float:
    """When the last chunk has left the last stage: each waits for its own way and for the one before it."""
    free_s = [0.0] * stages
    for first in range(0, length, chunk):
        at_s = 0.0
        for stage in range(stages):
            at_s = free_s[stage] = max(at_s, free_s[stage]) + slot_s(min(chunk, length - first))
    return free_s[-1]


@given(
    length=st.integers(1, 3000),
    most=st.sampled_from((1, 20, 100, 128)),
    stages=st.integers(1, 8),
    knee=st.floats(0.1, 300),
)
def test_no_other_size_is_through_sooner(length: int, most: int, stages: int, knee: float) -> None:
    curve = Curve(base_s=1.0, row_s=1 / knee, extra_row_s=0.1 / knee)
    found = chunk_rows(length, most, stages, curve.seconds)
    sizes = [most >> halved for halved in range(4) if halved == 0 or most >> halved >= LEAST]
    assert found in sizes
    taken = through_s(length, found, stages, curve.seconds)
    best = min(through_s(length, size, stages, curve.seconds) for size in sizes)
    assert taken <= best / (1 - GAIN) ** 3 + 1e-9


def sent(slot_s: SlotTime | None, answers: int) -> list[int]:
    """Rows of the segments that leave when the last of so many prompts of 512 tokens has come."""
    head = HeadCore(context=1000, stage_count=4, slot_s=slot_s)
    for request in range(answers):
        commands = head.handle(ask(request, range(512), 9), 0.0)
    return [
        len(part.ids)
        for command in commands
        if isinstance(command, SendToFirstStage)
        for part in command.segment.parts
    ]


def test_a_head_cuts_prompts_by_what_is_foretold_of_its_stages() -> None:
    assert set(sent(BOARD, answers=1)) == {32}
    assert set(sent(None, answers=1)) == {128}
