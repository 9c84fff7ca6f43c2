"""Where time goes beside the oracle: what each step takes away, and that the shares are all there is."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from flowspec.bench.config import Setup
from flowspec.bench.oracle import SeenToken
from tests.bench.benches import boards, synthetic
from tests.perf import oracle_gap
from tests.perf.oracle_gap import gaps_of, in_order, only_sent, when_sent

EARLY = SeenToken(known_s=9.0, here_s=2.0, asked_s=1.0, sent_s=5.0)
NEVER = SeenToken(known_s=9.0, here_s=2.0, asked_s=1.0)
TOO_LATE = SeenToken(known_s=9.0, here_s=2.0, asked_s=1.0, sent_s=9.0)
UNSAID = SeenToken(known_s=9.0, here_s=9.0, sent_s=9.5)


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
        took_s=10.0, oracle_s=4.0, sent_s=5.0, not_passed_s=7.0, in_time_s=8.0, tokens=20, unsaid=5
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
    assert oracle_gap.main(["--limit", "1"]) == 0
    assert "40.0%" in capsys.readouterr().out
