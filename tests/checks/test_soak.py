"""The soak: what it calls growth, what it refuses, and a short one on real daemons, in which one is
killed."""

from __future__ import annotations

import json
import random

import pytest

from flowspec.runtime.pipeline_connections import StageStatus
from tests.checks.soak import ALLOWED, Found, Sample, main, slope_of, slopes


def samples(
    life: str,
    growth: float,
    *,
    noise: float = 0.0,
    level: float = 100.0,
    count: int = 200,
    seed: int = 0,
    start: int = 0,
    holds: int = 3,
) -> list[Sample]:
    """A process sampled at every twentieth answer, that grows so much in a thousand."""
    rng = random.Random(seed)
    return [
        Sample(
            life=life,
            answers=at,
            holds=holds,
            values=dict.fromkeys(ALLOWED, level + growth * at / 1000 + rng.gauss(0, noise)),
        )
        for at in range(start, start + 20 * count, 20)
    ]


def verdict(
    found: list[Sample], whose: str = "head", quantity: str = "rss_mib", warm: int = 0
) -> tuple[str, float]:
    slope = slope_of(found, whose, quantity, warm)
    assert slope is not None
    assert {slope.verdict} == {
        each.verdict for each in slopes(found, warm) if (each.whose, each.quantity) == (whose, quantity)
    }
    return slope.verdict, slope.per_thousand


@pytest.mark.parametrize(("growth", "expected"), [(0.0, "flat"), (0.5, "flat"), (4.0, "grows")])
def test_a_line_that_rises_grows(growth: float, expected: str) -> None:
    found, slope = verdict(samples("head", growth, noise=0.2))
    assert found == expected
    assert slope == pytest.approx(growth, abs=0.3)


def test_few_samples_that_jump_about_tell_nothing() -> None:
    assert verdict(samples("head", 0.0, noise=20.0, count=100, seed=3))[0] == "unclear"


def test_steps_are_no_independent_means() -> None:
    """What rises once and stays would be a sure slope if each mean told something new."""
    found = [*samples("head", 0.0, count=50), *samples("head", 0.0, level=101.5, count=50, start=1000)]
    assert verdict(found)[0] == "unclear"


def test_a_level_that_comes_with_more_layers_is_no_growth() -> None:
    """A daemon that takes over a lost one's layers and keeps them; one that grows while it has them does."""
    taken = [
        *samples("a.1", 0.0, count=100),
        *samples("a.1", 0.0, level=200.0, count=100, start=2000, holds=6),
    ]
    assert verdict(taken, "daemons") == ("flat", pytest.approx(0.0))
    grown = [
        *samples("a.1", 0.0, count=100),
        *samples("a.1", 9.0, level=200.0, count=100, start=2000, holds=6),
    ]
    assert verdict(grown, "daemons")[0] != "flat"


def test_a_daemon_that_waits_says_nothing() -> None:
    assert slope_of(samples("a.1", 50.0, holds=0), "a.1", "rss_mib", 0) is None


def test_samples_count_only_if_the_stages_stay() -> None:
    """Those of a daemon that was already given other layers would be 24 MiB off."""
    found, stages, others = Found(), list[StageStatus](), list[StageStatus]()
    taken = samples("a.1", 0.0, count=1)
    found.pending = stages, taken
    found.keep(others)
    found.keep(stages)
    assert not found.samples
    found.pending = stages, taken
    found.keep(stages)
    found.keep(stages)
    assert found.samples == taken


def test_lives_have_levels_of_their_own_and_a_slope_in_common() -> None:
    found = [
        *samples("a.1", 3.0, level=50, count=80),
        *samples("a.2", 3.0, level=900, count=60),
        *samples("head", 0.0),
    ]
    assert verdict(found, "daemons") == ("grows", pytest.approx(3.0))
    assert verdict(found) == ("flat", pytest.approx(0.0))


def test_what_is_not_warm_does_not_count() -> None:
    rising = [
        Sample(life="head", answers=s.answers, holds=3, values={"rss_mib": min(s.answers, 500.0)})
        for s in samples("head", 0.0)
    ]
    slope = slope_of(rising, "head", "rss_mib", 500)
    assert slope is not None
    assert (slope.verdict, slope.per_thousand) == ("flat", pytest.approx(0.0))
    assert slope_of(rising, "head", "rss_mib", 3000) is None
    assert slope_of(rising, "daemons", "rss_mib", 0) is None


def test_a_fault_that_nobody_knows_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--faults", "kill,burn"]) == 2
    assert (
        "expected --faults of kill, stop and --rate from 0 to 1, got 'kill,burn'" in capsys.readouterr().err
    )


def test_a_short_soak_of_real_daemons(capsys: pytest.CaptureFixture[str]) -> None:
    """Long enough for a kill, too short for slopes."""
    assert (
        main(
            [
                "--answers",
                "8",
                "--faults",
                "kill",
                "--rate",
                "0.06",
                "--daemons",
                "2",
                "--tokens",
                "12",
                "--seed",
                "10",
                "--json",
            ]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert (found["answers"], found["ended"], found["slopes"]) == (8, "", [])
    assert found["verdicts"] == {"exact": 8}
    assert found["faults"] == {"kill": 1}
    assert found["recoveries"] >= 1
