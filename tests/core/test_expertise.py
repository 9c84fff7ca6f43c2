"""Who suits which request: worth learnt from matches by domain, choices that weigh it, and how many work for
one."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.head.expertise import UNKNOWN, Expertise, RequestRecord
from flowspec.core.head.team_size import TeamSize

EQUAL = (0.0, 0.0)
CODE, PLAYS = 0, 1


def answered(
    expertise: Expertise, domain: int, chances: tuple[float, ...], tokens: int = 10
) -> RequestRecord:
    """An answer of so many tokens, to each of which drafter j had given `chances[j]`."""
    record = expertise.begin(domain)
    for _ in range(tokens):
        expertise.observe(record, dict(enumerate(chances)))
    expertise.end(record)
    return record


def known(expertise: Expertise, domain: int) -> list[float]:
    """What a request begins with."""
    return expertise.worth(expertise.begin(domain))


def test_a_request_begins_with_what_its_domain_learnt_and_a_new_domain_with_what_all_did() -> None:
    expertise = Expertise(2)
    assert known(expertise, CODE) == [UNKNOWN, UNKNOWN]
    answered(expertise, CODE, (0.9, 0.1), tokens=200)
    assert known(expertise, CODE) == pytest.approx([0.9, 0.1], abs=0.01)
    assert known(expertise, PLAYS) == pytest.approx([0.9, 0.1], abs=0.01), "nothing else is known of it"
    answered(expertise, PLAYS, (0.1, 0.9), tokens=200)
    assert known(expertise, PLAYS) == pytest.approx([0.1, 0.9], abs=0.03), "its own matches count"
    assert known(expertise, CODE) == pytest.approx([0.9, 0.1], abs=0.03)


def test_a_request_goes_its_own_way_within_some_tokens() -> None:
    expertise = Expertise(2)
    for _ in range(5):
        answered(expertise, CODE, (0.9, 0.3))
    record = expertise.begin(CODE)
    assert expertise.choose(record, 1, (0, 1), EQUAL)[0] == 0
    for _ in range(30):
        expertise.observe(record, {0: 0.1})
        expertise.observe(record, {1: 0.8})
    assert expertise.choose(record, 1, (0, 1), EQUAL)[0] == 1


def test_a_drafter_is_tried_by_one_request_of_each_domain() -> None:
    expertise = Expertise(2)
    answered(expertise, CODE, (0.4,), tokens=40)
    records = [expertise.begin(CODE) for _ in range(4)]
    assert [expertise.choose(record, 1, (0, 1), EQUAL) for record in records] == [(0, 1), (0,), (0,), (0,)]
    expertise.end(records[0])
    assert expertise.choose(records[1], 1, (0, 1), EQUAL) == (0, 1), (
        "the trial ended with the answer, and nothing was learnt"
    )
    expertise = Expertise(2)
    for _ in range(5):
        answered(expertise, CODE, (0.9, 0.01), tokens=50)
    assert expertise.choose(expertise.begin(CODE), 1, (0, 1), EQUAL) == (0,)
    assert expertise.choose(expertise.begin(PLAYS), 1, (0, 1), EQUAL) == (0, 1)


def test_one_on_trial_is_compared_on_the_tokens_that_it_was_there_for() -> None:
    """They were hard ones: what is worth .2 there beside .1 is worth more than the .6 of the one that drafted
    for all."""
    expertise = Expertise(2)
    record = expertise.begin(CODE)
    expertise.choose(record, 1, (0,), EQUAL)
    for _ in range(100):
        expertise.observe(record, {0: 0.6})
    expertise.choose(record, 2, (0, 1), EQUAL)
    for _ in range(8):
        expertise.observe(record, {0: 0.1, 1: 0.2})
    worth = expertise.worth(record)
    assert worth[1] > worth[0]


def test_one_that_had_no_job_for_long_is_tried_as_if_it_were_as_fast_as_is_hoped() -> None:
    """It is not taken for that: whoever is chosen is so by what is known."""
    expertise = Expertise(2)
    for _ in range(40):
        answered(expertise, CODE, (0.6, 0.8))
    slow = (0.05, 0.4)
    assert expertise.choose(expertise.begin(CODE), 1, (0, 1), slow) == (0,)
    assert expertise.choose(expertise.begin(CODE), 1, (0, 1), slow, (0.05, 0.05)) == (0, 1)
    assert expertise.choose(expertise.begin(CODE), 1, (0, 1), (0.05, 0.05), (0.05, 0.05))[0] == 1


def test_one_that_has_the_text_already_stays_unless_another_is_clearly_better() -> None:
    expertise = Expertise(2)
    record = expertise.begin(CODE)
    assert expertise.choose(record, 1, (0,), EQUAL) == (0,)
    for better, chosen in ((0.02, 0), (0.1, 1)):
        for _ in range(200):
            expertise.observe(record, {0: 0.5, 1: 0.5 + better})
        assert expertise.choose(record, 1, (0, 1), EQUAL)[0] == chosen


@given(
    st.lists(st.dictionaries(st.integers(0, 2), st.floats(0, 1)), max_size=40),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_worth_is_a_mean_of_chances_and_the_best_weighs_one(
    matches: list[dict[int, float]], answers: int, count: int
) -> None:
    expertise = Expertise(3)
    for number in range(answers):
        record = expertise.begin(number)
        for chances in matches:
            expertise.observe(record, chances)
            assert len(expertise.choose(record, count, range(3), (*EQUAL, 0.0))) in (count, min(3, count + 1))
        weights = expertise.weights(record)
        assert all(0 <= worth <= 1 for worth in expertise.worth(record))
        assert all(0 <= weight <= 1 for weight in weights)
        assert max(weights) == 1 or max(expertise.worth(record)) == 0
        expertise.end(record)
    assert sum(domain.answers for domain in expertise.domains) == answers
    assert all(0 <= worth <= 1 for domain in expertise.domains for worth in expertise.in_domain(domain))
    assert not any(expertise.working.values())


# ------------------------------------------------------------------------------------------------------ teams

TRIP_S = 0.2


def run(chances: tuple[float, ...], level_s: dict[int, float], tokens: int = 2000) -> list[int]:
    """The sizes at each token, where drafter n finds a token by chance, alone or after those before it
    failed."""
    teams, chance = TeamSize.of(len(chances)), random.Random(4)
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


def test_those_are_taken_in_that_save_more_than_they_cost_and_others_tried_seldom() -> None:
    assert run((0.6, 0.6, 0.6), {1: 0.01, 2: 0.01, 3: 0.01})[-1] == 3
    sizes = run((0.6, 0.2), {1: 0.01, 2: 0.05})  # finds .08 more, which saves .016 s a token, and costs .04 s
    assert sizes[-1] == 1
    assert 2 in sizes
    sizes = run((0.6, 0.0), {1: 0.01, 2: 0.02})
    began = [token for token in range(1, len(sizes)) if sizes[token] > sizes[token - 1]]
    pauses = [later - earlier for earlier, later in pairwise(began)]
    assert len(began) >= 4
    assert pauses == sorted(pauses)
    assert sizes.count(2) < 0.2 * len(sizes)


@pytest.mark.parametrize("offers", [{}, {0: ((7, 0.5),)}])
def test_one_drafter_alone_is_a_team_of_one(offers: dict[int, tuple[tuple[int, float], ...]]) -> None:
    teams = TeamSize.of(1)
    for token in range(500):
        teams.observe((0,), offers, token)
        teams.tokens = token
        teams.look(0.01, TRIP_S)
    assert teams.size == 1
