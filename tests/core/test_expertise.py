"""Who suits which request: domains found in prompts, worth learnt from matches, and choices that weigh both."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.expertise import DOMAINS_MAX, UNKNOWN, Expertise, Record, sketch

EQUAL = (0.0, 0.0, 0.0)
TEMPLATE = tuple(range(1, 20))
"""What every prompt begins with."""
CODE, PLAYS = (100, 101, 102, 103), (200, 201, 202, 203)


def answered(expertise: Expertise, prompt: tuple[int, ...], chances: tuple[float, ...], tokens: int = 10) -> Record:
    """An answer of so many tokens, to each of which drafter j had given `chances[j]`."""
    record = expertise.begin(prompt)
    for _ in range(tokens):
        for drafter, chance in enumerate(chances):
            expertise.observe(record, drafter, chance)
    expertise.end(record)
    return record


def test_prompts_of_the_same_rare_words_are_one_domain_whatever_all_prompts_share() -> None:
    expertise = Expertise(1)
    domains = [expertise.begin((*TEMPLATE, *words)).domain for words in (CODE, PLAYS, CODE[1:], PLAYS[:3], (*CODE, *CODE))]
    assert domains == [0, 1, 0, 1, 0]


def test_there_are_so_many_domains_and_no_more() -> None:
    expertise = Expertise(1)
    for number in range(3 * DOMAINS_MAX):
        expertise.begin((10 * number, 10 * number + 1))
    assert len(expertise.domains) == DOMAINS_MAX


def test_an_empty_prompt_and_one_of_a_single_word_have_a_domain_too() -> None:
    expertise = Expertise(2)
    assert [expertise.begin(prompt).domain for prompt in ((), (7,), (7,))] == [0, 1, 1]
    assert sketch(()) == {}


def test_a_request_begins_with_what_its_domain_learnt_and_a_new_domain_with_what_all_did() -> None:
    expertise = Expertise(2)
    assert expertise.begin(CODE).worth == [UNKNOWN, UNKNOWN]
    answered(expertise, CODE, (0.9, 0.1), tokens=200)
    assert expertise.begin(CODE).worth == pytest.approx([0.9, 0.1], abs=0.01)
    assert expertise.begin(PLAYS).worth == pytest.approx([0.9, 0.1], abs=0.01), "nothing else is known of it"
    answered(expertise, PLAYS, (0.1, 0.9), tokens=200)
    assert expertise.begin(PLAYS).worth[1] > expertise.begin(PLAYS).worth[0], "its own matches count"
    assert expertise.begin(CODE).worth == pytest.approx([0.9, 0.1], abs=0.01)


def test_a_request_goes_its_own_way_within_some_tokens() -> None:
    expertise = Expertise(2)
    for _ in range(5):
        answered(expertise, CODE, (0.9, 0.3))
    record = expertise.begin(CODE)
    assert expertise.choose(record, 1, (0, 1), EQUAL) == (0,)
    for _ in range(30):
        expertise.observe(record, 0, 0.1)
        expertise.observe(record, 1, 0.8)
    assert expertise.choose(record, 1, (0, 1), EQUAL) == (1,)


def test_the_less_comes_true_the_sooner_the_unknown_has_a_turn() -> None:
    def chosen_after(chance: float) -> tuple[int, ...]:
        expertise = Expertise(2)
        record = expertise.begin(CODE)
        record.worth[1] = 0.4
        for _ in range(50):
            expertise.observe(record, 0, chance)
        return expertise.choose(record, 1, (0, 1), EQUAL)

    assert (chosen_after(0.95), chosen_after(0.45)) == ((0,), (1,))


def test_a_drafter_that_takes_longer_must_save_as_many_misses() -> None:
    expertise = Expertise(2)
    for _ in range(5):
        answered(expertise, CODE, (0.7, 0.8))
    record = expertise.begin(CODE)
    assert expertise.choose(record, 1, (0, 1), (0.05, 0.1)) == (1,)
    assert expertise.choose(record, 1, (0, 1), (0.05, 0.25)) == (0,)


def test_only_those_that_are_there_are_chosen() -> None:
    expertise = Expertise(3)
    record = expertise.begin(CODE)
    assert expertise.choose(record, 2, (2,), EQUAL) == (2,)
    assert expertise.choose(record, 2, (), EQUAL) == ()


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0, 1)), max_size=60), st.integers(1, 4))
def test_worth_is_a_mean_of_chances_and_the_best_weighs_one(matches: list[tuple[int, float]], answers: int) -> None:
    expertise = Expertise(3)
    for number in range(answers):
        record = expertise.begin((*TEMPLATE, number))
        for drafter, chance in matches:
            expertise.observe(record, drafter, chance)
        weights = expertise.weights(record)
        assert all(0 <= worth <= 1 for worth in record.worth)
        assert all(0 <= weight <= 1 for weight in weights)
        assert max(weights) == 1
        assert set(expertise.choose(record, 3, range(3), EQUAL)) == {0, 1, 2}
        expertise.end(record)
    assert sum(domain.answers for domain in expertise.domains) == answers
    assert all(0 <= worth <= 1 for domain in expertise.domains for worth in domain.worth)
