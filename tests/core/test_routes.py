"""`cosine` and `specrouter` in simulated clusters: who is asked, what is learnt, and what is told of it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from flowspec.core.head.events import Draft, DrafterLost, Submit
from flowspec.core.head.request import Request
from flowspec.core.methods.base import View
from flowspec.core.methods.chains import CHAINS_MAX, Chain, by_level, chains_to_try, every_chain, slowest_s
from flowspec.core.methods.cosine import Cosine
from flowspec.core.methods.specrouter import (
    STAY_TOKENS,
    TIMED_KEPT,
    TO_COME_MAX,
    ChainRecords,
    SpecRouter,
    similarity,
)
from flowspec.core.protocol.messages import Sampling
from flowspec.plan.timing import Curve
from flowspec.sim.device import DeviceSpec
from flowspec.sim.drafter import FakeDrafter
from flowspec.sim.drafter_device import DrafterDeviceSpec
from flowspec.sim.language import HashLanguage
from flowspec.sim.world import Cluster, Handled, World
from tests.pipeline import ask
from tests.plain import plain_answer

LANGUAGE = HashLanguage(40, seed=3, sharpness=3.0)
FAST = Curve(base_s=0.002)
TOKENS = 80
LOST_S = 0.2


class Run:
    """Some answers, one after another, and which models were asked how often."""

    def __init__(
        self,
        method: str,
        qualities: Sequence[float],
        *,
        drafting: Sequence[Curve] = (),
        levels: tuple[int, ...] = (),
        answers: int = 4,
        lost: int | None = None,
        tokens: int = TOKENS,
        boards: tuple[DrafterDeviceSpec, ...] = (),
        **options: Any,
    ) -> None:
        self.asked: Counter[int] = Counter()
        self.jobs: list[tuple[float, int]] = []
        stages = (DeviceSpec(curve=Curve(base_s=0.01, row_s=0.0005)),) * 4
        cluster = Cluster(
            devices=stages,
            method=method,
            options=options,
            drafting=tuple(drafting) or (FAST,) * len(qualities),
            levels=levels,
            boards=boards,
        )
        self.world: World = World(
            cluster,
            LANGUAGE,
            [FakeDrafter(LANGUAGE, quality, 90 + at) for at, quality in enumerate(qualities)],
            self._watch,
        )
        self.world.checks = False  # `tests.sim.test_schedules` has all methods with all checks
        self.method: Any = self.world.head.method
        submits = [self._submit(number, tokens) for number in range(answers)]
        if lost is not None:
            self.world.at(LOST_S, DrafterLost(drafter=lost))
        for submit in submits:
            self.world.at(0.0, submit)
            self.world.run()
        for submit in submits:
            (answer,) = self.world.answers[submit.request]
            expected, _ = plain_answer(
                LANGUAGE, submit.prompt, submit.sampling, new_tokens_max=tokens, context=4096
            )
            assert answer.tokens == list(expected), "whoever drafts, the answer is the same"

    def _submit(self, number: int, tokens: int = TOKENS) -> Submit:
        return ask(number, (1, 2, 3, 4 + number), tokens, sampling=Sampling(temperature=1.0, seed=number))

    def _watch(self, handled: Handled) -> None:
        for command in handled.commands:
            if isinstance(command, Draft):
                self.asked[command.drafter] += 1
                self.jobs.append((handled.now_s, command.drafter))

    def chains(self, request: int) -> list[tuple[int, ...]]:
        (answer,) = self.world.answers[request]
        assert answer.end is not None
        return [chain for _, _, chain, _ in answer.end.statistics.chains]


# -----------------------------------------------------------------------------------------------------------
# cosine


def test_requests_go_to_the_drafter_whose_guesses_come_true_unless_routing_is_off() -> None:
    run = Run("cosine", (0.0, 0.95, 0.0), count=1)
    assert run.asked[1] > 2 * (run.asked[0] + run.asked[2])
    assert isinstance(run.method, Cosine)
    found = [run.method.expertise.in_domain(domain) for domain in run.method.expertise.domains]
    assert all(max(worth) == worth[1] for worth in found)
    run = Run("cosine", (0.0, 0.95, 0.0), count=1, routing=False, answers=3, tokens=40)
    assert set(run.asked) == {0, 1, 2}
    assert run.asked[1] < 2 * (run.asked[0] + run.asked[2])


def test_several_drafters_are_faster_together_each_from_its_own_guesses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def seconds(*qualities: float, **options: Any) -> float:
        return Run("cosine", qualities, answers=2, **options).world.clock.now_s

    assert seconds(0.6, 0.6, count=2) < 0.97 * seconds(0.6, count=1)
    run = Run("cosine", (0.5, 0.6), count=2, answers=1, tokens=40)
    monkeypatch.setattr(Cosine, "may_ask", lambda *_: True)
    free = Run("cosine", (0.5, 0.6), count=2, answers=1, tokens=40)
    assert sum(drafter.rows for drafter in run.world.drafters) < sum(
        drafter.rows for drafter in free.world.drafters
    )


def test_the_one_that_is_replaced_goes_on_until_the_next_has_the_text() -> None:
    """The second needs a second for a prompt's worth of rows; the answer does not wait for it."""
    late = Curve(base_s=0.002, row_s=0.02)
    run = Run("cosine", (0.3, 0.95), drafting=(FAST, late), count=1, answers=3, tokens=40)
    alone = Run("cosine", (0.3,), count=1, answers=3, tokens=40)
    assert run.asked[1] > 0
    assert run.world.clock.now_s < 1.1 * alone.world.clock.now_s


def test_a_board_that_others_wait_for_keeps_its_drafters_apart() -> None:
    """Three that are as good, on one board, where each slows the others down: a second one is tried and let
    go."""
    run = Run(
        "cosine",
        (0.9, 0.9, 0.9),
        drafting=(Curve(base_s=0.012),) * 3,
        answers=6,
        boards=(DrafterDeviceSpec(drafters=(0, 1, 2)),),
    )
    assert run.method._team_size.size == 1
    assert len(run.asked) > 1


# --------------------------------------------------------------------------------------------------------
# specrouter


def test_judges_that_pay_are_in_the_chain_and_similarity_is_what_two_share() -> None:
    assert similarity(((1, 0.6), (2, 0.3)), ((2, 0.5), (1, 0.4))) == pytest.approx(0.7)
    assert similarity(((1, 0.6),), ((2, 0.5),)) == 0
    run = Run("specrouter", (0.3, 0.97), levels=(0, 1))
    assert run.chains(0)[0] == (0, 1)
    assert all(1 in chain for request in (0, 3) for chain in run.chains(request))
    assert run.method.measured.times
    (answer,) = run.world.answers[0]
    assert answer.end is not None
    told = answer.end.statistics.report()["chains"]
    assert (told[0][0], told[0][3]) == (0, "predicted to be the fastest")
    # It is at its first job for the whole answer, and no chain waits for it from the first choice on.
    run = Run("specrouter", (0.8, 0.97), levels=(0, 1), drafting=(FAST, Curve(base_s=100.0)), answers=1)
    assert run.chains(0) == [(0, 1), (0,)]


@pytest.mark.parametrize(("slower", "pays_after"), [(1.0, 100), (1.1, 700)])
def test_a_chain_is_tried_where_the_tokens_to_come_would_pay_for_it(slower: float, pays_after: int) -> None:
    def gain(tokens: int) -> float:
        return ChainRecords(tokens=tokens).gain((0,), slower)

    assert gain(0) < gain(pays_after // 2) < 0 < gain(pays_after)
    assert gain(TO_COME_MAX) == gain(2 * TO_COME_MAX)


def test_what_is_gained_by_a_try_is_the_mean_over_what_it_may_turn_out_to_take() -> None:
    """By drawing two million times how long the chain takes in truth, and what a timing of that would say."""
    measured = ChainRecords(tokens=1000, times={(0,): 3})
    draw, many = np.random.default_rng(1).normal, 2 * 10**6
    spread, known = 0.5, 3 + 5
    truth = np.log(1.1) + draw(0, spread / np.sqrt(known), many)
    timing = truth + draw(0, spread, many)
    believed = (known * np.log(1.1) + timing) / (known + 1)
    saved = np.maximum(-believed, 0).mean() * 1000
    assert measured.gain((0,), 1.1) == pytest.approx(saved - 0.1 * STAY_TOKENS - 3, abs=0.05)


def test_a_chain_that_was_timed_often_is_hardly_tried_again_and_preferred() -> None:
    measured = ChainRecords(tokens=1000)
    new = measured.gain((0,), 1.1)
    measured.times[0,] = 20
    assert measured.gain((0,), 1.1) < 0 < new
    measured = ChainRecords(times={(0, 1): 9, (0,): 1})
    assert measured.corrected((0, 1), 0.1) < measured.corrected((0,), 0.1)


def test_a_chain_that_is_given_stays_but_for_a_model_that_is_lost() -> None:
    run = Run("specrouter", (0.8, 0.97), levels=(0, 1), chain=(1,))
    assert set(run.asked) == {1}
    assert run.chains(0) == [(1,)]
    assert not Run("specrouter", (0.8, 0.97), levels=(0, 1), chain=()).asked, "plain decoding asks nobody"
    run = Run("specrouter", (0.8, 0.97), levels=(0, 1), chain=(0, 1), answers=1, lost=1)
    assert run.chains(0) == [(0, 1), (0,)]
    assert not any(drafter == 1 for at_s, drafter in run.jobs if at_s > LOST_S)


# ----------------------------------------------------------------------------------------------------- chains

TRIP_S = 0.1


class Case:
    """Models with turns, likenesses and worths by chance."""

    def __init__(self, levels: Sequence[int], seed: int) -> None:
        chance = random.Random(seed)
        self.groups = by_level(levels, range(len(levels)))
        self.turn_s = [chance.uniform(0.001, 0.02) * (1 + level) for level in levels]
        self.worth = [chance.uniform(0.2, 0.95) for _ in levels]
        pairs = [(low, high) for low in range(len(levels)) for high in range(len(levels))]
        self.unlike = {pair: chance.uniform(0.05, 0.9) for pair in pairs}

    def step_s(self, low: int, high: int) -> float:
        return self.turn_s[high] * self.unlike[low, high]

    def seconds(self, chain: Chain) -> float:
        chance = max(self.worth[model] for model in chain)
        return slowest_s(chain, self.turn_s, self.step_s) + (1 - chance) * TRIP_S

    def to_try(self) -> list[Chain]:
        return chains_to_try(self.groups, self.turn_s, self.step_s)


def test_chains_rise_level_by_level_and_of_a_few_models_each_is_tried() -> None:
    assert every_chain(by_level((1, 0, 0), range(3))) == [(1,), (2,), (0,), (1, 0), (2, 0)]
    case = Case(range(8), seed=0)
    assert case.to_try() == every_chain(case.groups)
    assert len(case.to_try()) == CHAINS_MAX


@pytest.mark.parametrize(
    "levels", [range(10), (0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 4)], ids=["one-each", "several-each"]
)
def test_of_many_models_the_best_chain_is_among_a_few(levels: Sequence[int]) -> None:
    for seed in range(20):
        case = Case(levels, seed)
        found = case.to_try()
        assert len(found) <= 3 * len(levels)
        assert min(map(case.seconds, found)) == min(map(case.seconds, every_chain(case.groups)))


def test_a_judge_that_costs_nothing_is_taken_along() -> None:
    case = Case(range(16), seed=3)
    case.turn_s[9] = 0.0
    case.unlike.update({(9, high): 0.0 for high in range(16)})
    assert 9 in min(case.to_try(), key=lambda chain: (case.seconds(chain), -len(chain)))


def test_many_levels_are_decided_about_with_a_few_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the head's thread, where all of sixteen levels took two seconds each time."""
    found: list[int] = []
    choose = SpecRouter._choose

    def counted(
        method: SpecRouter, view: View, request: Request, seconds: Mapping[Chain, float], *, is_seen: bool
    ) -> None:
        found.append(len(seconds))
        choose(method, view, request, seconds, is_seen=is_seen)

    monkeypatch.setattr(SpecRouter, "_choose", counted)
    run = Run(
        "specrouter",
        [0.9 - 0.05 * level for level in range(10)],
        levels=tuple(range(10)),
        answers=1,
        tokens=30,
    )
    assert 0 < max(found) <= CHAINS_MAX
    assert run.chains(0)


def test_only_the_last_timings_are_kept() -> None:
    measured = ChainRecords()
    for number in range(3 * TIMED_KEPT):
        measured.learn((number,), 1.5)
        measured.learn((0,), 0.9)
    assert len(measured.times) == len(measured.correction) == TIMED_KEPT
    assert measured.times[0,] == 3 * TIMED_KEPT + 1
