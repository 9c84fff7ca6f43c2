"""The head with real stage cores and a fake model: every schedule gives the sequential answer."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

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
from flowspec.core.head.statistics import Statistics
from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Hop, Open, Release, Verified, VerifiedPart
from flowspec.core.stage.events import RunLayers
from flowspec.errors import InputError, PeerError
from tests.nightly import seeds
from tests.pipeline import Pipeline, StopAfter, ask

VOCABULARY = 97


def next_token(prefix: Sequence[int]) -> int:
    """A fake language model: the next token is a hash of the whole prefix."""
    value = 17
    for token in prefix:
        value = (value * 31 + token + 7) % 1_000_003
    return value % VOCABULARY


def sequential(prompt: Sequence[int], count: int, stop: int | None = None) -> list[int]:
    tokens = list(prompt)
    while len(tokens) - len(prompt) < count:
        token = next_token(tokens)
        if token == stop:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


class FakeLayers:
    """Stages whose payload is each row's token and whose caches hold the tokens by slot: what a row sees is
    its prefix.

    The last stage predicts from what it sees through the mask alone, so a wrong mask, slot or order gives a
    wrong token.
    """

    def __init__(self, stages: int) -> None:
        self.stages = stages
        self.caches: list[dict[int, dict[int, tuple[int, int]]]] = [{} for _ in range(stages)]

    def __call__(
        self, stage: int, job: RunLayers, payload: np.ndarray | None
    ) -> tuple[tuple[int, ...], np.ndarray, tuple[int, ...]]:
        tokens = np.concatenate([part.tokens for part in job.parts])
        if payload is not None:
            assert payload[:, 0].tolist() == tokens.tolist(), "rows and payload went apart"
        found: list[int] = []
        for part in job.parts:
            cache = self.caches[stage].setdefault(part.request, {})
            for slot, token, position in zip(part.slots, part.tokens, part.positions, strict=True):
                cache[int(slot)] = (int(position), int(token))
            for row, position in enumerate(part.positions):
                seen = sorted(cache[int(slot)] for slot in np.flatnonzero(part.visible[row]))
                assert [at for at, _ in seen] == list(range(position + 1)), (
                    "a row sees exactly one node at each position up to its own"
                )
                found.append(next_token([token for _, token in seen]) if part.sampled[row] else -1)
        last = stage == self.stages - 1
        return tuple(range(len(tokens))), tokens[:, None], tuple(found) if last else ()


def pipeline(stages: int, *, context: int = 4000, rng: random.Random | None = None) -> Pipeline:
    return Pipeline(HeadCore(context=context, stage_count=stages), FakeLayers(stages), stages, rng=rng)


@pytest.mark.parametrize(
    ("stages", "length"), [(1, 1), (2, limits.PREFILL_CHUNK), (2, limits.PREFILL_CHUNK + 1), (5, 700)]
)
def test_an_answer_is_the_sequential_one(stages: int, length: int) -> None:
    prompt = [i * 7 % VOCABULARY for i in range(length)]
    run = pipeline(stages)
    run.give(ask(1, prompt, 20))
    run.settle()
    assert run.answers[1] == sequential(prompt, 20)
    assert (run.ends[1].reason, run.ends[1].reused, run.head.in_flight) == ("length", 0, 0)


@pytest.mark.parametrize("seed", seeds(20, 500))
def test_any_order_of_control_and_data_gives_the_same_answers(seed: int) -> None:
    rng = random.Random(seed)
    run = pipeline(rng.randint(1, 4), rng=rng)
    prompts = {
        request: [rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 3, 140, 300]))]
        for request in range(rng.randint(1, 4))
    }
    counts = {request: rng.randint(1, 12) for request in prompts}
    for turn in range(3):
        for request, prompt in prompts.items():
            run.answers.pop(request, None)
            run.give(ask(request, prompt, counts[request]))
        run.settle()
        for request, prompt in prompts.items():
            assert run.answers[request] == sequential(prompt, counts[request]), (
                f"seed {seed}, turn {turn}, request {request}"
            )
            cut = rng.randint(1, len(prompt) + counts[request])
            prompts[request] = [*prompt, *run.answers[request]][:cut] + [
                rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 5))
            ]


def test_a_second_turn_reuses_the_longest_common_prefix() -> None:
    prompt = list(range(50))
    run = pipeline(3)
    run.give(ask(1, prompt, 10))
    run.settle()
    answer = run.answers.pop(1)
    again = [*prompt, *answer, 3, 4]
    run.give(ask(1, again, 5))
    run.settle()
    assert run.ends[1].reused == len(prompt) + len(answer) - 1, (
        "all but the last token, which was drawn and never run"
    )
    assert run.answers.pop(1) == sequential(again, 5)
    changed = [*prompt[:20], 90, *prompt[21:]]
    run.give(ask(1, changed, 5))
    run.settle()
    assert run.ends[1].reused == 20
    assert run.answers[1] == sequential(changed, 5)


def test_the_same_prompt_again_runs_its_last_token_again() -> None:
    run = pipeline(2)
    for _ in range(2):
        run.answers.clear()
        run.give(ask(1, [5, 6, 7], 4))
        run.settle()
        assert run.answers[1] == sequential([5, 6, 7], 4)
    assert run.ends[1].reused == 2


def test_prompts_that_cannot_be_answered_are_refused_and_change_nothing() -> None:
    run = pipeline(2, context=20)
    for prompt in ([], list(range(20)), list(range(21))):
        with pytest.raises(InputError):
            run.give(ask(1, prompt, 5))
    run.give(ask(1, [1, 2], 5))
    run.settle()
    assert run.answers[1] == sequential([1, 2], 5)


@pytest.mark.parametrize("seed", seeds(8, 100))
def test_a_cancelled_answer_leaves_the_conversation_usable(seed: int) -> None:
    rng = random.Random(seed)
    run = pipeline(3, rng=rng)
    prompt = [rng.randrange(VOCABULARY) for _ in range(400)]
    run.give(ask(1, prompt, 30))
    for _ in range(rng.randint(0, 40)):
        waiting = [key for key, link in run._links.items() if link]
        run.step(rng.choice(waiting))
    run.give(Cancel(request=1))
    assert run.ends[1].reason == "cancelled"
    emitted = run.answers.pop(1, [])
    assert emitted == sequential(prompt, 30)[: len(emitted)]
    run.give(ask(1, prompt[:300], 6))
    run.settle()
    assert run.answers[1] == sequential(prompt[:300], 6)
    assert run.head.in_flight == 0


def test_a_forgotten_conversation_is_released_everywhere() -> None:
    run = pipeline(2)
    run.give(ask(1, [1, 2, 3], 3))
    run.settle()
    assert run.head.handle(Forget(request=1), 0.0) == [SendToStages(message=Release(request=1))]
    assert run.head.handle(Forget(request=1), 0.0) == []


def test_a_conversation_that_is_forgotten_in_mid_answer_is_released_once_nothing_of_it_is_in_flight() -> None:
    run = pipeline(2)
    run.give(ask(1, list(range(90)) * 5, 30))
    commands = run.head.handle(Forget(request=1), 0.0)
    assert commands == [
        Finished(request=1, reason="cancelled", reused=0, statistics=Statistics(stage_count=2))
    ]
    run.settle()
    assert run.head.in_flight == 0
    assert [stage.requests() for stage in run.stages] == [[], []], (
        "no segment opened it again behind the Release"
    )


def test_a_root_that_comes_back_dropped_is_the_stages_fault() -> None:
    head = HeadCore(context=100, stage_count=1)
    head.handle(ask(1, [1, 2, 3], 5), 0.0)
    with pytest.raises(PeerError, match="never dropped"):
        head.handle(VerifiedArrived(verified=Verified(segment=0, parts=(), hops=())), 0.0)


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


def asked_once() -> HeadCore:
    """A head of one stage whose prompt, nodes 0 to 2, is in flight as segment 0."""
    head = HeadCore(context=100, stage_count=1)
    head.vocabulary = 50
    head.handle(ask(1, [1, 2, 3], 5), 0.0)
    return head


def said(*next_tokens: tuple[int, int], hops: int = 1) -> VerifiedArrived:
    part = VerifiedPart(
        request=1,
        epoch=0,
        ids=tuple(node for node, _ in next_tokens),
        next_tokens=tuple(token for _, token in next_tokens),
    )
    return VerifiedArrived(
        verified=Verified(
            segment=0,
            parts=(part,),
            hops=(Hop(received_s=0, queued_s=0, compute_s=0, own_s=0, rows=1),) * hops,
        )
    )


def test_only_as_many_hops_as_there_are_stages_come_back() -> None:
    with pytest.raises(PeerError, match="segment 0 came back from a pipeline of 2, expected one of 1"):
        asked_once().handle(said((2, 7), hops=2), 0.0)
    assert Emit(request=1, tokens=(7,)) in asked_once().handle(said((2, 7)), 0.0)


def test_the_first_pipeline_may_have_fewer_stages_than_were_planned() -> None:
    head = HeadCore(context=100, stage_count=4)
    head.vocabulary = 50
    head.begin(PipelineReformed(stage_count=1))
    head.handle(ask(1, [1, 2, 3], 5), 0.0)
    assert Emit(request=1, tokens=(7,)) in head.handle(said((2, 7)), 0.0)


def test_a_token_that_the_model_does_not_have_is_the_stages_fault() -> None:
    assert Emit(request=1, tokens=(49,)) in asked_once().handle(said((2, 49)), 0.0)
    with pytest.raises(PeerError, match="expected next tokens below 50, got 50"):
        asked_once().handle(said((2, 50)), 0.0)


def test_a_verified_node_that_the_segment_did_not_carry_is_the_stages_fault() -> None:
    with pytest.raises(PeerError, match="node 3 of request 1 was verified, but the segment did not carry it"):
        asked_once().handle(said((2, 7), (3, 7)), 0.0)


def test_too_many_conversations_are_refused_before_a_stage_is_asked() -> None:
    head = HeadCore(context=100, stage_count=1)
    for number in range(limits.CONVERSATIONS_MAX):
        head.handle(ask(number, [1, 2, 3], 5), 0.0)
    with pytest.raises(InputError, match=f"at most {limits.CONVERSATIONS_MAX} conversations at once"):
        head.handle(ask(1000, [1, 2, 3], 5), 0.0)
    assert len(head.requests()) == limits.CONVERSATIONS_MAX
    head.handle(Cancel(request=0), 0.0)
    head.handle(ask(0, [1, 2, 3, 4], 5), 0.0)


def test_an_answer_ends_at_a_stop_token_and_does_not_hold_it() -> None:
    prompt = [1, 2, 3]
    stop = sequential(prompt, 9)[6]
    expected = sequential(prompt, 50, stop=stop)
    run = pipeline(2)
    run.give(ask(1, prompt, 50, stop_ids=frozenset([stop])))
    run.settle()
    assert run.answers.get(1, []) == expected
    assert run.ends[1].reason == "stop"


def test_a_stop_rule_ends_the_answer_with_the_token_it_names() -> None:
    run = pipeline(2)
    run.give(ask(1, [4, 4], 50, stop_rule=StopAfter(7)))
    run.settle()
    assert run.answers[1] == sequential([4, 4], 7)
    assert run.ends[1].reason == "stop"


def test_the_context_limits_the_answer() -> None:
    run = pipeline(2, context=20)
    run.give(ask(1, list(range(15)), 50))
    run.settle()
    assert run.answers[1] == sequential(list(range(15)), 5)
    assert run.ends[1].reason == "length"


def test_a_segment_that_is_not_in_flight_is_the_stages_fault() -> None:
    head = HeadCore(context=100, stage_count=1)
    with pytest.raises(PeerError, match="not in flight"):
        head.handle(VerifiedArrived(verified=Verified(segment=3, parts=(), hops=())), 0.0)
