"""Where time goes beside the oracle: what each step takes away, and that the shares are all there is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from flowspec.bench.config import Setup
from flowspec.bench.oracle import SeenToken
from tests.bench.benches import boards, synthetic
from tests.perf import oracle_gap
from tests.perf.oracle_gap import fate_of, gaps_of, in_order, only_sent, when_sent

EARLY = SeenToken(known_s=9.0, here_s=2.0, asked_s=1.0, sent_s=5.0)
NEVER = SeenToken(known_s=9.0, here_s=2.0, asked_s=1.0)
TOO_LATE = SeenToken(known_s=9.0, here_s=2.0, asked_s=1.0, sent_s=9.0)
UNSAID = SeenToken(known_s=9.0, here_s=9.0, sent_s=9.5)
TOML = """
name = "two places"
model = "synthetic"
acceptance = 0.6
limit = 2
new_tokens = 16
temperatures = [0]
methods = ["continuous"]

[[testbed]]
name = "two boards"
devices = ["2 x jetson-orin-nano"]
bandwidth_mbps = 150
latency_ms = 1
shape = "tinyllama-1.1b"

[[testbed]]
name = "four boards"
devices = ["4 x jetson-orin-nano"]
bandwidth_mbps = 150
latency_ms = 1
shape = "tinyllama-1.1b"
"""


def test_a_guess_that_was_not_sent_in_time_counts_as_none() -> None:
    assert only_sent(EARLY) == EARLY
    assert not only_sent(NEVER).is_guessed
    assert not only_sent(TOO_LATE).is_guessed
    assert only_sent(UNSAID) == UNSAID


def test_a_guess_that_was_sent_late_is_there_late() -> None:
    assert when_sent(EARLY) == replace(EARLY, here_s=5.0)
    assert [when_sent(each).is_guessed for each in (NEVER, TOO_LATE)] == [False, False]
    assert when_sent(UNSAID) == UNSAID


def test_below_a_token_that_is_later_now_nobody_was_asked_earlier() -> None:
    before, child = replace(EARLY, here_s=5.0), replace(EARLY, asked_s=3.0, here_s=4.0, known_s=9.5)
    assert in_order([before, child]) == [before, replace(child, asked_s=5.0, here_s=5.0)]
    assert in_order([before, replace(child, here_s=7.0)]) == [before, replace(child, asked_s=5.0, here_s=7.0)]
    assert in_order([UNSAID, child])[1] == replace(child, asked_s=9.0, here_s=9.0)
    assert in_order([before, UNSAID]) == [before, UNSAID]


@pytest.mark.parametrize(
    ("token", "fate"),
    [
        (replace(EARLY, rank=1, has_spoken=True), "best_in_flight"),
        (replace(EARLY, rank=2, has_spoken=True), "other_in_flight"),
        (replace(NEVER, rank=1, has_spoken=True), "best_not_sent"),
        (replace(TOO_LATE, rank=3, has_spoken=True), "other_not_sent"),
        (replace(UNSAID, has_spoken=True), "not_guessed"),
        (UNSAID, "not_spoken_of"),
    ],
)
def test_what_had_become_of_a_token_goes_by_its_rank_and_by_what_was_sent_in_time(
    token: SeenToken, fate: str
) -> None:
    assert fate_of(token) == fate


def test_of_a_drafter_that_is_nearly_always_right_nearly_all_best_guesses_fly() -> None:
    def fates(acceptance: float) -> dict[str, float]:
        bench = synthetic(
            testbeds=(boards(4),),
            setups=(Setup(name="a", method="continuous"),),
            temperatures=(0.0,),
            new_tokens=48,
            acceptance=acceptance,
        )
        (first, second) = (gap for _, gap in gaps_of(bench))
        return (first + second).fates()

    sure, unsure = fates(0.98), fates(0.3)
    assert sum(sure.values()) == sum(unsure.values()) == pytest.approx(1)
    assert sure["best in flight"] > 0.8
    assert unsure["best in flight"] < 0.5
    assert unsure["other in flight"] > sure["other in flight"]
    assert unsure["other not sent"] + unsure["not guessed"] > sure["other not sent"] + sure["not guessed"]


@pytest.mark.parametrize("method", ["continuous", "tree-sd", "ar"])
def test_each_step_allows_less_and_the_shares_are_the_whole(method: str) -> None:
    bench = synthetic(
        testbeds=(boards(4),), setups=(Setup(name="a", method=method),), temperatures=(0.0,), new_tokens=24
    )
    found = list(gaps_of(bench))
    assert len(found) == 2
    for (temperature, domain), gap in found:
        assert (temperature, domain) == (0.0, "synthetic")
        shares = gap.shares()
        assert all(each >= -1e-9 for each in shares.values())
        assert sum(shares.values()) - shares["unsaid"] == pytest.approx(1)
        assert (shares["unsaid"] == 1) == (method == "ar")
        if method == "ar":
            assert shares["oracle"] == pytest.approx(1, rel=0.02)
        if method == "continuous":
            assert shares["late"] + shares["passed over"] > 0.01


def test_the_command_sums_up_by_domain(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = oracle_gap.Gap(
        took_s=10.0,
        oracle_s=4.0,
        sent_s=5.0,
        not_passed_s=7.0,
        in_time_s=8.0,
        tokens=20,
        unsaid=5,
        best_in_flight=12,
        other_in_flight=3,
        not_guessed=4,
        not_spoken_of=1,
    )
    monkeypatch.setattr(
        oracle_gap, "gaps_of", lambda bench: iter([((0.0, "code"), one), ((0.0, "plays"), one)])
    )
    assert oracle_gap.main(["--json"]) == 0
    found = {each["domain"]: each for each in json.loads(capsys.readouterr().out)}
    assert list(found) == ["code", "all", "plays"]
    assert found["all"]["took_s"] == 20.0
    assert found["all"]["shares"] == pytest.approx(
        {"oracle": 0.4, "not sent": 0.1, "passed over": 0.2, "late": 0.1, "rest": 0.2, "unsaid": 0.25}
    )
    assert found["all"]["fates"] == pytest.approx(
        {
            "best in flight": 0.6,
            "other in flight": 0.15,
            "best not sent": 0.0,
            "other not sent": 0.0,
            "not guessed": 0.2,
            "not spoken of": 0.05,
        }
    )
    assert oracle_gap.main(["--limit", "1"]) == 0
    shown = capsys.readouterr().out
    assert "40.0%" in shown
    assert "60.0%" in shown


def test_the_command_takes_a_testbed_and_an_acceptance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "places.toml"
    path.write_text(TOML)

    def took_s(*flags: str) -> float:
        assert oracle_gap.main(["--experiment", str(path), "--json", *flags]) == 0
        found = {each["domain"]: each for each in json.loads(capsys.readouterr().out)}
        return float(found["all"]["took_s"])

    first_s = took_s()
    assert took_s("--testbed", "two boards") == first_s
    assert took_s("--testbed", "four boards") != first_s
    assert took_s("--acceptance", "0.9") < first_s


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--experiment", "acceptance", "--testbed", "mars"], "--testbed: expected one of 2 x Jetson"),
        (["--acceptance", "0.5"], "--acceptance: expected an experiment with model synthetic, got"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert oracle_gap.main(flags) != 0
    assert said in capsys.readouterr().err


def test_an_acceptance_is_a_share(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        oracle_gap.main(["--experiment", "acceptance", "--acceptance", "1.5"])
    assert "expected a share above 0" in capsys.readouterr().err
