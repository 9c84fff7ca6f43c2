"""Which chains come into question: all of a few models, and of many the best without looking at all."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest

from flowspec.core.head.expertise import Expertise
from flowspec.core.head.request import Request
from flowspec.core.methods.base import View
from flowspec.core.methods.chains import CHAINS_MAX, Chain, by_level, chains_to_try, every_chain, slowest_s
from flowspec.core.methods.specrouter import TIMED_KEPT, ChainRecords, SpecRouter
from tests.core.test_routes import Run

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


def test_a_chain_rises_level_by_level_and_has_one_model_of_each() -> None:
    assert every_chain(by_level((1, 0, 0), range(3))) == [(1,), (2,), (0,), (1, 0), (2, 0)]


def test_of_a_few_models_every_chain_comes_into_question() -> None:
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
    measured = ChainRecords(Expertise(1))
    for number in range(3 * TIMED_KEPT):
        measured.learn((number,), 1.5)
        measured.learn((0,), 0.9)
    assert len(measured.times) == len(measured.correction) == TIMED_KEPT
    assert measured.times[0,] == 3 * TIMED_KEPT + 1
