"""How near a forecast is to answers in virtual time, and that small plans are the best of all."""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
import pytest

from flowspec.bench.config import AR, Setup
from flowspec.bench.planned import first_token_s, simulated, testbed_of
from flowspec.bench.simulated import run_many
from flowspec.bench.synthetic import synthetic_cases
from flowspec.cli.plan import add_arguments
from flowspec.cli.plan_request import read_plan_request
from flowspec.core.protocol.messages import Sampling
from flowspec.plan.planner import make_plan
from flowspec.plan.sites import PlanRequest
from lab.perf import planner_fit
from lab.perf.exhaustive import compare
from lab.perf.planner_check import fits, planned
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
    assert simulated(request, plan, answers=1, tokens=16, first=5).tokens_per_s == pytest.approx(
        plan.forecast.tokens_per_s, rel=0.02
    )


@pytest.mark.parametrize("number", [20102, 20207])
def test_one_board_is_within_ten_percent(number: int) -> None:
    """It computes many rows as fast as one, and its drafter is quick: patience pays."""
    found = planner_fit.sampled(number)
    assert found is not None
    assert (found.stages, found.rows) == (1, "free")
    assert np.abs(planner_fit.errors([found], planner_fit.FITTED)) < 0.1


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
    request = read_plan_request(parser.parse_args(words)).request
    plan = make_plan(request)
    for size in (1, 128, 129, 700):
        cases = synthetic_cases(1, [Sampling()], 1, 0, size)
        world = run_many(testbed_of(request, plan), Setup(name="planned", method=AR), cases, {}, size + 1)
        forecast_s, taken_s = first_token_s(request, plan, size), world.answers[0][0].first_token_s
        assert taken_s * (1 - more) < forecast_s < taken_s * 1.02, f"{size} tokens"
