"""Loads that change in steps: users who come and go, drafters that are slow, lost and back, exact all the
time."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from flowspec.bench.bench import read_cases
from flowspec.bench.config import Bench, DeclaredDrafter, LoadStep, Setup
from flowspec.bench.load_steps import (
    BINS,
    StepsRecord,
    dealt,
    run_step_load,
    starts_of,
)
from flowspec.bench.outcome import EXACT
from flowspec.bench.virtual_runs import VirtualRuns
from tests.bench.benches import boards, synthetic

SINGLE = Setup(name="continuous", method="continuous", drafters=("all",))
TEAM = Setup(name="cosine", method="cosine", drafters=("all", "code", "plays"))
DECLARED = (
    DeclaredDrafter(name="all", acceptance=(("code", 0.5), ("plays", 0.5))),
    DeclaredDrafter(name="code", acceptance=(("code", 0.8), ("plays", 0.3))),
    DeclaredDrafter(name="plays", acceptance=(("code", 0.3), ("plays", 0.8))),
)
STEPS = (LoadStep(users=1, seconds=1.0), LoadStep(users=3, seconds=1.0), LoadStep(users=2, seconds=1.0))


def experiment(*steps: LoadStep, **changes: Any) -> Bench:
    plain: dict[str, Any] = {
        "setups": (SINGLE, TEAM),
        "drafters": tuple(each.name for each in DECLARED),
        "declared": DECLARED,
        "acceptance": 0.0,
        "temperatures": (0.0,),
        "limit": 12,
        "new_tokens": 10,
        "steps": steps or STEPS,
        "silent_s": 0.5,
    }
    return synthetic(**(plain | changes))


def run(bench: Bench, setup: Setup) -> StepsRecord:
    runs = VirtualRuns(bench, ())
    return run_step_load(bench, boards(), setup, read_cases(bench, None), partial(runs.drafters, setup))


@pytest.fixture(scope="module")
def both() -> dict[str, StepsRecord]:
    return {setup.name: run(experiment(), setup) for setup in (SINGLE, TEAM)}


def test_in_each_step_so_many_users_ask_and_who_goes_waits_for_the_answer(
    both: dict[str, StepsRecord],
) -> None:
    record = both["cosine"]
    assert {answer.agreement for answer in record.answers} == {EXACT}
    starts = starts_of(STEPS)
    for answer in record.answers:
        step, start_s, end_s = STEPS[answer.step], starts[answer.step], starts[answer.step + 1]
        assert answer.user < step.users
        assert start_s <= answer.asked_s < end_s
        under_way = [other for other in record.answers if other.asked_s <= answer.asked_s < other.last_s]
        assert step.users <= len(under_way) <= 3
        assert len({other.user for other in under_way}) == len(under_way), "a user asks twice at once"
    first = [answer for answer in record.answers if answer.step == 1 and answer.turn == 0]
    assert sorted(answer.user for answer in first) == [0, 1, 2]
    assert all(answer.asked_s == starts[1] for answer in first if answer.user > 0)
    assert max(answer.last_s for answer in record.answers) > starts[-1], "the last ones are waited for"
    one, other = (
        {(each.step, each.user, each.turn): each.prompt_id for each in record.answers}
        for record in both.values()
    )
    assert len(one.keys() & other.keys()) > 3
    assert all(one[key] == other[key] for key in one.keys() & other.keys()), "whatever the setup"
    assert all(0 < share <= 1 for span in record.spans for share in span.stage_busy)


def test_nobody_is_given_what_another_has_and_domains_take_turns() -> None:
    cases = read_cases(experiment(limit=24), None)
    for turn in range(8):
        given = [dealt(cases, 4, 0, user, turn) for user in range(4)]
        assert len({case.prompt_id for case in given}) == 4
        assert [case.domain for case in given] == [["code", "plays"][(user + turn) % 2] for user in range(4)]
    own = [dealt(cases, 4, 0, 0, turn).prompt_id for turn in range(6)]
    assert len(set(own)) == 6
    assert own != [dealt(cases, 4, 1, 0, turn).prompt_id for turn in range(6)]


def test_a_drafter_is_slow_lost_and_back_as_the_steps_say() -> None:
    whole = LoadStep(users=2, seconds=3.0)
    slowed, without = replace(whole, slow=(("all", 50.0),)), replace(whole, lost=("all",))
    bench = experiment(whole, slowed, without, whole)
    record = run(bench, SINGLE)
    assert {answer.agreement for answer in record.answers} == {EXACT}
    usual, slow, lost, back = (span.asked["all"] for span in record.spans)
    assert 0 < sum(slow) < 0.5 * sum(usual)
    silent = int(BINS * bench.silent_s / whole.seconds) + 1
    assert sum(lost[silent:]) == 0
    assert sum(back) > 0.5 * sum(usual)
    rates = [sum(span.tokens) for span in record.spans]
    assert rates[2] < 0.8 * rates[0]
    assert rates[3] > 0.8 * rates[0]
