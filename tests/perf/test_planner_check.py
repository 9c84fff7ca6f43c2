"""The planner's check against the simulator, on a few mixes; and how near the forecast is to an answer in
virtual time."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest

from flowspec.bench.config import AR, Setup
from flowspec.bench.planned import (
    Simulated,
    first_token_s,
    simulated,
    testbed_of,
)
from flowspec.bench.simulated import run_many
from flowspec.bench.synthetic import synthetic_cases
from flowspec.cli.plan import add_arguments
from flowspec.cli.plan_request import read_plan_request
from flowspec.core.protocol.messages import Sampling
from flowspec.plan.planner import make_plan
from flowspec.plan.sites import PlanRequest
from tests.perf import exhaustive
from tests.perf.exhaustive import compare, small_request
from tests.perf.planner_check import Outcome, drawn, fits, main, planned, summary

testbed_of.__test__ = False  # type: ignore[attr-defined]


def small() -> PlanRequest:
    return next(request for _, request, plan in planned(20, 0) if len(plan.stages) == 1 and plan.guesses)


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


def test_a_run_goes_on_with_what_is_in_its_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "outcomes.jsonl"
    args = ["--answers", "1", "--tokens", "8", "--out", str(file), "--json"]
    assert main(["--mixes", "1", *args]) == 0
    first = json.loads(capsys.readouterr().out)["outcomes"]
    before = file.read_text(encoding="utf-8")
    changed = before.replace('"model": "', '"model": "told-')
    file.write_text(changed, encoding="utf-8")
    assert main(["--mixes", "2", *args]) == 0
    both = json.loads(capsys.readouterr().out)["outcomes"]
    assert both[0] == {**first[0], "model": f"told-{first[0]['model']}"}, "what is known is not made again"
    assert len(both) == 2
    assert file.read_text(encoding="utf-8").startswith(changed)
    assert main(["--mixes", "1", "--out", str(file), "--answers", "2"]) == 2
    assert "give another --out" in capsys.readouterr().err


@pytest.mark.parametrize("number", range(12))
def test_small_plans_are_the_best_of_all(number: int) -> None:
    assert compare(number).is_best


def test_a_plan_that_misses_something_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--exhaustive", "1"]) == 0
    assert "1 of 1 small mixes" in capsys.readouterr().out
    slow = make_plan(replace(small_request(0), sites=small_request(0).sites[:1], drafter=None))
    monkeypatch.setattr(exhaustive, "make_plan", lambda request: slow)
    assert main(["--exhaustive", "1", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["best_of_all"] == 0


def test_the_error_of_a_rate_is_that_of_its_mean() -> None:
    found = Simulated(tokens=(10, 10, 10, 10), seconds=(1.0, 2.0, 1.0, 2.0))
    assert found.tokens_per_s == pytest.approx(40 / 6)
    assert found.error == pytest.approx((1 / 3) ** 0.5 / 1.5 / 2)
    assert Simulated(tokens=(10,), seconds=(1.0,)).error == 0


def test_the_summary_counts_what_is_slower_and_what_would_not_fit() -> None:
    one = Outcome(
        mix=1,
        model="m",
        precision="int4",
        users=1,
        devices=["a", "b"],
        used=1,
        guesses=True,
        foretold_tokens_per_s=10.5,
        tokens_per_s=10.0,
        rate_error=0.04,
        even_tokens_per_s=20.0,
        memory_tokens_per_s=5.0,
        even_fits=True,
        memory_fits=True,
        memory_share=0.5,
    )
    found = summary(
        [
            one,
            replace(
                one,
                foretold_tokens_per_s=15.0,
                even_tokens_per_s=5.0,
                memory_tokens_per_s=90.0,
                memory_fits=False,
            ),
        ]
    )
    even = {"median": 1.25, "worst": 0.5, "slower": 1}
    assert found["even"] == {**even, "would_not_fit": 0, "of_fitting": even}
    fitting = {"median": 2.0, "worst": 2.0, "slower": 0}
    assert found["memory"] == {
        "median": pytest.approx(19 / 18),
        "worst": pytest.approx(1 / 9),
        "slower": 1,
        "would_not_fit": 1,
        "of_fitting": fitting,
    }
    assert found["noise"]["median"] == pytest.approx(0.04)
    assert found["forecast"]["within_10%"] == 0.5
    assert found["forecast"]["worst_error"] == pytest.approx(0.5)


def test_a_plain_plan_is_foretold_to_the_percent() -> None:
    request = replace(small(), drafter=None)
    plan = make_plan(request)
    assert fits(plan)
    assert simulated(request, plan, answers=1, tokens=16, first=5).tokens_per_s == pytest.approx(
        plan.forecast.tokens_per_s, rel=0.02
    )


def test_a_plan_beside_its_head_is_simulated_on_slower_devices() -> None:
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
def test_a_prompts_first_token_comes_when_the_simulator_says_so(devices: str, more: float) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["--shape", "tinyllama-1.1b", "--dtype", "int8", "--devices", *devices.split()]
    request = read_plan_request(parser.parse_args(words)).request
    plan = make_plan(request)
    for size in (1, 128, 129, 700):
        cases = synthetic_cases(1, [Sampling()], 1, 0, size)
        world = run_many(testbed_of(request, plan), Setup(name="planned", method=AR), cases, {}, size + 1)
        told, taken = first_token_s(request, plan, size), world.answers[0][0].first_token_s
        assert taken * (1 - more) < told < taken * 1.02, f"{size} tokens"
