"""How many drafters work for a request: taken in while they save more than they cost, and tried again ever
more seldom."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from flowspec.core.head.team_size import TeamSize

TRIP_S = 0.2


def run(chances: tuple[float, ...], level_s: dict[int, float], tokens: int = 2000) -> list[int]:
    """The sizes at each token, where drafter n finds a token by chance, alone or after those before it
    failed."""
    teams, chance = TeamSize(len(chances)), random.Random(4)
    sizes = []
    for token in range(tokens):
        sizes.append(teams.size)
        offers = {
            drafter: ((token if chance.random() < found else -1, 0.5),)
            for drafter, found in enumerate(chances)
        }
        team = range(teams.size)
        teams.observe(team, {drafter: offers[drafter] for drafter in team}, token)
        teams.tokens = token
        teams.look(level_s[teams.size], TRIP_S)
    return sizes


def test_those_that_find_more_and_cost_nothing_are_taken_in() -> None:
    assert run((0.6, 0.6, 0.6), {1: 0.01, 2: 0.01, 3: 0.01})[-1] == 3


def test_those_that_slow_the_others_down_for_more_than_they_save_are_not() -> None:
    sizes = run((0.6, 0.2), {1: 0.01, 2: 0.05})  # finds .08 more, which saves .016 s a token, and costs .04 s
    assert sizes[-1] == 1
    assert 2 in sizes


def test_those_that_find_nothing_new_are_tried_ever_more_seldom() -> None:
    sizes = run((0.6, 0.0), {1: 0.01, 2: 0.02})
    began = [token for token in range(1, len(sizes)) if sizes[token] > sizes[token - 1]]
    pauses = [later - earlier for earlier, later in pairwise(began)]
    assert len(began) >= 4
    assert pauses == sorted(pauses)
    assert sizes.count(2) < 0.2 * len(sizes)


@pytest.mark.parametrize("offers", [{}, {0: ((7, 0.5),)}])
def test_one_drafter_alone_is_a_team_of_one(offers: dict[int, tuple[tuple[int, float], ...]]) -> None:
    teams = TeamSize(1)
    for token in range(500):
        teams.observe((0,), offers, token)
        teams.tokens = token
        teams.look(0.01, TRIP_S)
    assert teams.size == 1
