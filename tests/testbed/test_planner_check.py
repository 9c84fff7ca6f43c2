"""The planner's check against the simulator, on a few mixes; and how near the forecast is to an answer in virtual time."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from flowspec.plan.forecast import FITTED, Guessing, seconds_per_token
from flowspec.plan.planner import make_plan
from flowspec.plan.sites import Wish
from flowspec.testbed.planned import simulated_rate, testbed_of
from flowspec.testbed.planner_check import Outcome, drawn, fits, main, planned, summary
from flowspec.testbed.planner_fit import Sample, errors, fit

testbed_of.__test__ = False  # type: ignore[attr-defined]


def small() -> Wish:
    return next(wish for _, wish, plan in planned(20, 0) if len(plan.stages) == 1 and plan.guesses)


def test_mixes_are_drawn_from_their_number() -> None:
    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)


def test_the_check_reports_ratios_errors_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--mixes", "2", "--answers", "1", "--tokens", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mixes"] == len(found["outcomes"]) == 2
    assert found["memory_share_max"] <= 1
    assert found["even"]["median"] > 0
    assert set(found["forecast"]) == {"median_error", "p90_error", "worst_error", "bias", "within_10%"}


def test_the_summary_counts_what_is_slower_and_what_would_not_fit() -> None:
    one = Outcome(
        mix=1,
        model="m",
        precision="int4",
        devices=["a", "b"],
        used=1,
        guesses=True,
        foretold_tokens_per_s=10.5,
        tokens_per_s=10.0,
        even_tokens_per_s=20.0,
        memory_tokens_per_s=5.0,
        even_fits=True,
        memory_fits=True,
        memory_share=0.5,
    )
    found = summary([one, replace(one, foretold_tokens_per_s=15.0, even_tokens_per_s=5.0, memory_tokens_per_s=90.0, memory_fits=False)])
    assert found["even"] == {"median": 1.25, "worst": 0.5, "slower": 1, "would_not_fit": 0}
    assert found["memory"] == {"median": 2.0, "worst": 2.0, "slower": 0, "would_not_fit": 1}, "what does not fit is no rate to beat"
    assert found["forecast"]["within_10%"] == 0.5
    assert found["forecast"]["worst_error"] == pytest.approx(0.5)


def test_a_plain_plan_is_foretold_to_the_percent() -> None:
    wish = replace(small(), drafter=None)
    plan = make_plan(wish)
    assert fits(plan)
    assert simulated_rate(wish, plan, answers=1, tokens=16, first=5) == pytest.approx(plan.forecast.tokens_per_s, rel=0.02)


def test_a_plan_beside_its_head_is_simulated_on_slower_devices() -> None:
    wish = small()
    wish = replace(wish, sites=wish.sites[:1], head=wish.sites[0].name)
    plan = make_plan(wish)
    assert not plan.is_head_free
    slow, fast = testbed_of(wish, plan).devices[0], wish.sites[0].profile
    assert slow.bytes_per_s() == pytest.approx(fast.bytes_per_s() / (2 if plan.guesses else 1))


def test_the_fit_finds_constants_back_that_made_the_rates() -> None:
    truth = replace(FITTED, sharpness=1.3 * FITTED.sharpness, missed_trip=1.1 * FITTED.missed_trip)
    nodes = np.array([1.0, 4.0, 16.0])
    samples = []
    for stages in (1, 2, 4, 8):
        for acceptance in (0.5, 0.7):
            slot_s, guessing = 0.05 * np.array([1.0, 1.1, 1.6]), Guessing(acceptance=acceptance, pass_s=0.004)
            rate = 1 / seconds_per_token(slot_s, stages * slot_s, nodes, guessing, known=truth)[0].min()
            samples.append(Sample(slot_s=slot_s, trip_s=stages * slot_s, nodes=nodes, guessing=guessing, tokens_per_s=float(rate)))
    assert np.abs(errors(samples, truth)).max() < 1e-12
    before, after = (np.abs(errors(samples, known)).mean() for known in (FITTED, fit(samples, FITTED)))
    assert after < before / 3
