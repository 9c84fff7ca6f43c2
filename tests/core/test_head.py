"""The head with real stage cores and a fake model: every schedule gives the sequential answer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from flowspec.core import limits
from flowspec.core.events import Cancel, Finished, Forget, RunLayers, Submit, ToPipeline, ToStages, VerifiedArrived
from flowspec.core.head import HeadCore
from flowspec.core.messages import Hop, Open, Release, Sampling, Verified
from flowspec.core.methods import METHODS
from flowspec.core.methods.continuous import Continuous
from flowspec.core.statistics import Statistics
from flowspec.errors import InputError, PeerError
from flowspec.sim.device import Curve, DeviceSpec
from flowspec.sim.drafter import FakeDrafter
from flowspec.sim.experiment import Experiment
from flowspec.sim.language import HashLanguage, plain_answer
from tests.core.desk import Desk, commits, drafts, emits, ends, opens, sends, sends_all, wakes
from tests.pipeline import Pipeline

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
    """Stages whose payload is each row's token and whose caches hold the tokens by slot: what a row sees is its prefix.

    The last stage predicts from what it sees through the mask alone, so a wrong mask, slot or order gives a wrong token.
    """

    def __init__(self, stages: int) -> None:
        self.stages = stages
        self.caches: list[dict[int, dict[int, tuple[int, int]]]] = [{} for _ in range(stages)]

    def __call__(self, stage: int, job: RunLayers, payload: np.ndarray | None) -> tuple[tuple[int, ...], np.ndarray, tuple[int, ...]]:
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
                assert [at for at, _ in seen] == list(range(position + 1)), "a row sees exactly one node at each position up to its own"
                found.append(next_token([token for _, token in seen]) if part.sampled[row] else -1)
        last = stage == self.stages - 1
        return tuple(range(len(tokens))), tokens[:, None], tuple(found) if last else ()


def pipeline(stages: int, *, context: int = 4000, rng: random.Random | None = None) -> Pipeline:
    return Pipeline(HeadCore(context=context, stage_count=stages), FakeLayers(stages), stages, rng=rng)


def ask(request: int, prompt: Sequence[int], count: int, **extra: object) -> Submit:
    fields = {"sampling": Sampling(), "stop_ids": frozenset(), **extra}
    return Submit(request=request, prompt=tuple(prompt), new_tokens_max=count, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize("length", [1, 2, limits.PREFILL_CHUNK, limits.PREFILL_CHUNK + 1, 700])
def test_an_answer_is_the_sequential_one(stages: int, length: int) -> None:
    prompt = [i * 7 % VOCABULARY for i in range(length)]
    run = pipeline(stages)
    run.give(ask(1, prompt, 20))
    run.settle()
    assert run.answers[1] == sequential(prompt, 20)
    assert (run.ends[1].reason, run.ends[1].reused, run.head.in_flight) == ("length", 0, 0)


@pytest.mark.parametrize("seed", range(60))
def test_any_order_of_control_and_data_gives_the_same_answers(seed: int) -> None:
    rng = random.Random(seed)
    run = pipeline(rng.randint(1, 4), rng=rng)
    prompts = {request: [rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 3, 140, 300]))] for request in range(rng.randint(1, 4))}
    counts = {request: rng.randint(1, 12) for request in prompts}
    for turn in range(3):
        for request, prompt in prompts.items():
            run.answers.pop(request, None)
            run.give(ask(request, prompt, counts[request]))
        run.settle()
        for request, prompt in prompts.items():
            assert run.answers[request] == sequential(prompt, counts[request]), f"seed {seed}, turn {turn}, request {request}"
            cut = rng.randint(1, len(prompt) + counts[request])
            prompts[request] = [*prompt, *run.answers[request]][:cut] + [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 5))]


def test_a_second_turn_reuses_the_longest_common_prefix() -> None:
    prompt = list(range(50))
    run = pipeline(3)
    run.give(ask(1, prompt, 10))
    run.settle()
    answer = run.answers.pop(1)
    again = [*prompt, *answer, 3, 4]
    run.give(ask(1, again, 5))
    run.settle()
    assert run.ends[1].reused == len(prompt) + len(answer) - 1, "all but the last token, which was drawn and never run"
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


def test_an_answer_ends_at_a_stop_token_and_does_not_hold_it() -> None:
    prompt = [1, 2, 3]
    stop = sequential(prompt, 9)[6]
    expected = sequential(prompt, 50, stop=stop)
    run = pipeline(2)
    run.give(ask(1, prompt, 50, stop_ids=frozenset([stop])))
    run.settle()
    assert run.answers.get(1, []) == expected
    assert run.ends[1].reason == "stop"


@dataclass
class StopAfter:
    """A stop rule that ends the answer at its n-th token."""

    count: int

    def stops_at(self, tokens: Sequence[int]) -> bool:
        return len(tokens) == self.count


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


def test_prompts_that_cannot_be_answered_are_refused_and_change_nothing() -> None:
    run = pipeline(2, context=20)
    for prompt in ([], list(range(20)), list(range(21))):
        with pytest.raises(InputError):
            run.give(ask(1, prompt, 5))
    run.give(ask(1, [1, 2], 5))
    run.settle()
    assert run.answers[1] == sequential([1, 2], 5)


@pytest.mark.parametrize("seed", range(20))
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
    assert run.head.handle(Forget(request=1), 0.0) == [ToStages(message=Release(request=1))]
    assert run.head.handle(Forget(request=1), 0.0) == []


def test_a_conversation_that_is_forgotten_in_mid_answer_is_released_once_nothing_of_it_is_in_flight() -> None:
    run = pipeline(2)
    run.give(ask(1, list(range(90)) * 5, 30))
    commands = run.head.handle(Forget(request=1), 0.0)
    assert commands == [Finished(request=1, reason="cancelled", reused=0, statistics=Statistics(stage_count=2))]
    run.settle()
    assert run.head.in_flight == 0
    assert [stage.requests() for stage in run.stages] == [[], []], "no segment opened it again behind the Release"


def test_a_root_that_comes_back_dropped_is_the_stages_fault() -> None:
    head = HeadCore(context=100, stage_count=1)
    head.handle(ask(1, [1, 2, 3], 5), 0.0)
    with pytest.raises(PeerError, match="never dropped"):
        head.handle(VerifiedArrived(verified=Verified(segment=0, parts=(), hops=())), 0.0)


def test_the_first_commands_of_an_answer_are_its_open_and_its_first_chunks() -> None:
    head = HeadCore(context=4000, stage_count=2)
    commands = head.handle(ask(7, range(1000), 5), 0.0)
    assert isinstance(commands[0], ToStages)
    assert isinstance(commands[0].message, Open)
    segments = [command.segment for command in commands[1:] if isinstance(command, ToPipeline)]
    assert len(segments) == 3 == head.in_flight, "one more than there are stages"
    assert [segment.row_count for segment in segments] == [limits.PREFILL_CHUNK] * 3
    assert all(segment.parts[0].opening is not None for segment in segments), "the Open rides along until it is known to be everywhere"
    later = head.handle(VerifiedArrived(verified=Verified(segment=0, parts=(), hops=())), 0.0)
    (sent,) = [command.segment for command in later if isinstance(command, ToPipeline)]
    assert sent.parts[0].opening is None


def test_a_segment_that_is_not_in_flight_is_the_stages_fault() -> None:
    head = HeadCore(context=100, stage_count=1)
    with pytest.raises(PeerError, match="not in flight"):
        head.handle(VerifiedArrived(verified=Verified(segment=3, parts=(), hops=())), 0.0)


# --------------------------------------------------------------------------------- guesses, played by hand


def guessing(window: int = 9, **extra: object) -> Desk:
    """A prompt of three and two guesses below it in flight, and the drafter asked about both: nodes 3 (token 10) and 4 (token 11)."""
    desk = Desk(Continuous(window=window))
    assert desk.ask(**extra) == [opens(), sends(0, 1, 2), drafts(0, 1, 2)]
    assert desk.propose({2: [(10, 0.5), (11, 0.3)]}) == [sends(3, 4), drafts(3, 4)]
    return desk


def say_commit(desk: Desk) -> tuple[int, tuple[int, ...]]:
    """Base and path of the Commit in the newest segment."""
    commit = desk.sent[-1].parts[0].commit
    return commit.base, commit.path


def test_a_guess_that_holds_is_emitted_when_the_root_is_and_its_successor_when_it_is_back() -> None:
    desk = guessing()
    assert desk.back({2: 10}) == [emits(10), commits(3, base=3)]
    assert desk.back({3: 12}) == [emits(12), sends(5)]
    assert say_commit(desk) == (3, (3, 5)), "from the length on that every stage was told"
    assert desk.back({5: 13}) == [emits(13), sends(6)]
    assert say_commit(desk) == (5, (6,))


def test_every_token_is_emitted_the_moment_it_is_known() -> None:
    desk = guessing()
    desk.propose({3: [(12, 0.9)], 4: []})
    assert desk.segments[-1].parts[0].ids == (5,)
    assert desk.back({2: 10}) == [emits(10), commits(3, base=3)]
    assert desk.back({3: 12}) == [emits(12), commits(3, 5, base=3)]
    assert desk.back({5: 13})[0] == emits(13)


def test_a_commit_goes_out_on_control_only_while_something_is_in_flight_that_it_could_prune() -> None:
    alone = Desk(Continuous(), drafter=None)
    alone.ask()
    assert alone.back({2: 10}) == [emits(10), sends(3)]
    assert guessing().back({2: 10}) == [emits(10), commits(3, base=3)]
    others = Desk(Continuous(), drafter=None)
    others.ask(1, (5,))
    others.ask(2, (5,))
    assert others.back({0: 10}, request=1) == [emits(10, request=1), sends(1, request=1)], "what others have in flight is no reason"


def test_a_root_that_was_guessed_may_not_come_back_dropped_but_dead_guesses_may() -> None:
    desk = guessing()
    desk.back({2: 10})
    with pytest.raises(PeerError, match="segment 1 came back without the root of request 1"):
        desk.back({4: 1})
    desk = guessing()
    desk.back({2: 99})
    assert desk.back() == []
    with pytest.raises(PeerError, match="segment 2 came back without the root"):
        desk.back()


def test_a_segment_of_several_requests_tells_each_its_own() -> None:
    desk = Desk("ar", stages=1)
    for request in (1, 2, 3):
        desk.ask(request, (5,))
    assert desk.back({0: 8}, request=1) == [emits(8, request=1), sends(1, request=1)]
    assert desk.back({0: 8}, request=2) == [emits(8, request=2), sends(0, request=3)]
    assert desk.back({1: 9}, request=1) == [emits(9, request=1), sends_all({2: (1,), 1: (2,)})]
    assert [(part.commit.base, part.commit.path) for part in desk.sent[-1].parts] == [(1, (1,)), (2, (2,))]
    assert desk.back({0: 8}, request=3) == [emits(8, request=3), sends(1, request=3)]
    desk.give(Cancel(request=1))
    assert desk.back_all({1: {2: 31}, 2: {1: 32}}) == [emits(32, request=2), sends(2, request=2)], "the other's end is no end"


def test_what_the_drafter_says_after_the_end_changes_nothing() -> None:
    desk = guessing()
    assert desk.give(Cancel(request=1)) == [ends("cancelled")]
    nodes = len(desk.tree())
    assert desk.propose({3: [(12, 0.9)], 4: [(13, 0.9)]}) == []
    assert len(desk.tree()) == nodes


def test_forgetting_tells_the_drafter_at_once_and_the_stages_when_nothing_of_it_is_in_flight() -> None:
    desk = guessing()
    assert desk.give(Forget(request=1)) == [ends("cancelled"), ("drafter forgets", 1)]
    assert desk.propose({3: [(12, 0.9)], 4: []}) == []
    assert desk.back({2: 10}) == []
    assert desk.back({3: 12}) == [("release", 1)]
    assert desk.ask(2, (7,)) == [opens(2), sends(0, request=2), drafts(0, request=2)]


def test_what_the_drafter_says_of_an_older_epoch_changes_nothing() -> None:
    desk = guessing()
    desk.give(Cancel(request=1))
    assert desk.ask(prompt=(5, 6, 8, 9)) == [opens(epoch=1), sends(5, 6, 7, 8)], "nothing is known to be computed yet"
    assert desk.propose({3: [(12, 0.9)], 4: [(13, 0.9)]}) == [drafts(5, 6, 7, 8)]
    assert desk.job is not None
    part = desk.job.segment.parts[0]
    assert part.opening is not None
    assert (part.commit.epoch, part.opening.keep) == (1, 0)
    assert desk.tree().alive_count == 0
    assert [desk.back({2: 10}), desk.back({3: 12})] == [[], []], "nor what the stages say of it"
    assert desk.back({8: 14})[0] == emits(14)


def test_a_timer_is_asked_for_again_only_when_its_time_changes() -> None:
    desk = Desk(Continuous(segment_nodes=1))
    hops = (Hop(queued_s=0, compute_s=0.5, own_s=0, rows=1),) * 4
    desk.head.costs.learn(hops, 1, 2.0)
    desk.ask()
    assert desk.propose({2: [(10, 0.5), (11, 0.3)]}) == [sends(3), drafts(3, 4), wakes(0.5)]
    desk.now_s = 0.25
    assert desk.propose({}) == []
    assert desk.ask(2, (7,)) == [opens(2), sends(0, request=2), drafts(0, request=2)]
    assert desk.wake(0.5) == [sends(4)], "the window is full"
    assert desk.back({2: 10}) == [emits(10), commits(3, base=3), wakes(1.0)]


def test_the_end_of_an_answer_says_what_happened() -> None:
    """Three guesses of which two hold. Every stage computes 10 ms for each segment, drafting takes no time."""
    desk = guessing(count=3)
    assert desk.propose({3: [(12, 0.9)], 4: []}) == [sends(5)], "and no draft: the answer ends there"
    hops = (Hop(queued_s=0.002, compute_s=0.010, own_s=0.001, rows=2, dead_in_queue=1),) * 4
    desk.now_s = 0.060
    assert desk.back({2: 10}, hops=hops) == [emits(10), commits(3, base=3)]
    desk.now_s = 0.080
    assert desk.back({3: 12}, hops=hops) == [emits(12), commits(3, 5, base=3)]
    desk.now_s = 0.140
    assert desk.back({5: 13}, hops=hops) == [emits(13), ends("length")]
    found = desk.ends[0].statistics.report()
    expected = {
        "segments": 2,
        "committing_segments": 3,
        "nodes_drafted": 3,
        "nodes_sent": 3,
        "tokens_per_commit": 1.0,
        "acceptance_length": 1.5,
        "share_in_flight": 0.5,
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


# ------------------------------------------------------------------------------------------------ later turns


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("quality", [0.5, 1.0])
def test_a_second_turn_after_guesses_that_held_is_the_sequential_one(name: str, quality: float) -> None:
    """The last guesses of an answer hold at the head, but no Commit ever told the stages and the drafter so."""
    language = HashLanguage(24, 5, 4.0)
    device = DeviceSpec(curve=Curve(base_s=0.02, row_s=0.001), layers=2)
    world = Experiment(devices=(device,) * 2, method=name, context=100).build(language, FakeDrafter(language, quality, 5, context=100))
    prompt = (1, 2, 3)
    for turn in range(4):
        world.at(100.0 * turn, ask(1, prompt, 12))
        world.run()
        answer = world.answers[1][-1]
        assert answer.tokens == plain_answer(language, prompt, Sampling(), new_tokens_max=12, context=100)[0]
        assert answer.end is not None
        assert answer.end.reused >= (len(prompt) - 20 if turn else 0), "most of it is still there"
        prompt = (*prompt, *answer.tokens, 4, 5)
