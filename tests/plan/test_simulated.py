"""How near a forecast is to answers in virtual time, the rules that it obeys, and that small plans are the
best of all."""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.bench.cases import synthetic_cases
from flowspec.bench.experiment import AR, Setup
from flowspec.bench.simulated import run_many
from flowspec.cli.plan import add_arguments, read_plan_inputs
from flowspec.core.protocol.messages import Sampling
from flowspec.plan.forecast import HEAD_S, guessing_rates, plain_rates, seconds_per_token
from flowspec.plan.planner import first_token_s, make_plan
from flowspec.plan.sites import PlanRequest
from lab.perf import planner_fit
from lab.perf.planner_check import compare, fits, planned, simulated, testbed_of
from tests.nightly import nightly

testbed_of.__test__ = False  # type: ignore[attr-defined]


def small() -> PlanRequest:
    return next(request for _, request, plan in planned(20, 0) if len(plan.stages) == 1 and plan.guesses)


@pytest.mark.parametrize("number", range(nightly(6, 12)))
def test_small_plans_are_the_best_of_all(number: int) -> None:
    assert compare(number).is_best


def test_plain_decoding_is_within_two_percent() -> None:
    request = replace(small(), drafter=None)
    plan = make_plan(request)
    assert fits(plan)
    rate, _ = simulated(request, plan, answers=1, tokens=16, first=5)
    assert rate == pytest.approx(plan.forecast.tokens_per_s, rel=0.02)


@pytest.mark.parametrize("number", [20102, 20207])
def test_one_board_is_within_ten_percent(number: int) -> None:
    """It computes many rows as fast as one, and its drafter is quick: patience pays."""
    found = planner_fit.sampled(number)
    assert found is not None
    assert found.stages == 1
    assert np.abs(planner_fit.lacked([found])) < 0.1


def test_a_stage_beside_the_head_is_slower() -> None:
    request = small()
    request = replace(request, sites=request.sites[:1], head=request.sites[0].name)
    plan = make_plan(request)
    assert not plan.is_head_free
    slow, fast = testbed_of(request, plan).devices[0], request.sites[0].profile
    assert slow.bytes_per_s() == pytest.approx(fast.bytes_per_s() / (2 if plan.guesses else 1))


@pytest.mark.parametrize(
    ("devices", "more"),
    [
        ("4x raspberry-pi-5", 0.001),
        ("raspberry-pi-4", 0.001),
        ("2x jetson-orin-nano,raspberry-pi-5 --link 50/5", 0.06),
    ],
)
def test_the_first_token_comes_as_the_simulator_says(devices: str, more: float) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["--shape", "tinyllama-1.1b", "--dtype", "int8", "--devices", *devices.split()]
    request = read_plan_inputs(parser.parse_args(words)).request
    plan = make_plan(request)
    for size in (1, 128, 129, 700):
        cases = synthetic_cases(1, [Sampling()], 1, 0, size)
        world = run_many(testbed_of(request, plan), Setup(name="planned", method=AR), cases, {}, size + 1)
        forecast_s, answer = first_token_s(request, plan, size), world.answers[0][0]
        taken_s = answer.times_s[0] - answer.submitted_s
        assert taken_s * (1 - more) < forecast_s < taken_s * 1.02, f"{size} tokens"


# ----------------------------------------------------------------------------------------------- the forecast

TIMES = st.floats(0.002, 2.0)


def one(slot_s: float, trip_s: float, nodes: float, acceptance: float, pass_s: float = 0.001) -> float:
    found, _, _ = seconds_per_token(np.array(slot_s), np.array(trip_s), np.array(nodes), acceptance, pass_s)
    return float(found)


@given(
    slot_s=TIMES,
    stages=st.floats(1, 8),
    more=st.floats(1, 3),
    acceptance=st.floats(0.2, 0.9),
    nodes=st.sampled_from([1, 4, 16]),
)
def test_a_longer_trip_and_a_slower_drafter_never_help_free_nodes_and_a_better_drafter_do(
    slot_s: float, stages: float, more: float, acceptance: float, nodes: int
) -> None:
    trip_s = slot_s * stages
    time_s = one(slot_s, trip_s, nodes, acceptance)
    assert one(slot_s, trip_s * more, nodes, acceptance) >= time_s * (1 - 1e-12)
    assert one(slot_s, trip_s, nodes, acceptance, pass_s=0.001 * more) >= time_s * (1 - 1e-12)
    assert one(slot_s, trip_s, 2 * nodes, acceptance) <= time_s * (1 + 1e-12)
    assert one(slot_s, trip_s, nodes, min(0.95, acceptance + 0.05)) <= time_s * (1 + 1e-12)


def test_plain_decoding_takes_a_trip_and_users_share_slots_but_are_faster_together() -> None:
    slot_s, trip_s = np.array([0.1, 0.1, 0.12]), np.array([0.4, 0.4, 0.48])
    nodes = np.array([1.0, 2.0, 4.0])
    assert plain_rates(slot_s, trip_s, nodes, 1) == pytest.approx([1 / (0.4 + HEAD_S), 0, 0]), (
        "one user has one node"
    )
    assert plain_rates(slot_s, trip_s, nodes, 4)[0] == pytest.approx(4 / (0.4 + HEAD_S))
    assert plain_rates(slot_s, trip_s, nodes, 100) == pytest.approx([10, 20, 4 / 0.12])
    slot_s, trip_s, nodes = np.array([0.1]), np.array([0.8]), np.array([16.0])
    one_user, eight = (
        float(guessing_rates(slot_s, trip_s, nodes, 0.635, 0.005, users)[0].max()) for users in (1, 8)
    )
    assert one_user < eight <= 8 * one_user * (1 + 1e-9)
    assert one_user == pytest.approx(1 / one(0.1, 0.8, 16, 0.635, 0.005))
