"""Profiles of acceptance: a drafter is right as often as its profile says, and answers are exact."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flowspec.bench.config import Setup
from flowspec.bench.guesses import WIDTH_MAX, MemoDrafter
from flowspec.bench.outcome import EXACT
from flowspec.bench.profiled import BlockOfProfile, ChainOfProfile, Profiled
from flowspec.bench.profiles import BLOCK, CHAIN, MEASURED, TEXT, Profile, Shares, beta_of
from flowspec.bench.simulated import run
from flowspec.bench.synthetic import synthetic_cases
from flowspec.core.protocol.messages import Sampling
from lab.perf.acceptance import count_hits
from tests.bench.benches import boards, synthetic

FALLING = ((0.9, 0.97), (0.8, 0.93), (0.6, 0.8), (0.5, 0.7), (0.4, 0.6), (0.3, 0.5))
OURS = Setup(name="continuous", method="continuous")


def profile(reads: str, rows: tuple[tuple[float, ...], ...] = FALLING) -> Profile:
    return Profile(
        name="some",
        basis=MEASURED,
        source="nobody",
        reads=reads,
        depths=() if reads == TEXT else (0.25, 0.5),
        within=(1, 4),
        shares=(Shares(domain="code", temperature=0.0, shares=rows),),
    )


@pytest.mark.parametrize(
    ("reads", "kind"), [(CHAIN, ChainOfProfile), (BLOCK, BlockOfProfile), (TEXT, MemoDrafter)]
)
def test_guesses_are_right_as_often_as_the_profile_says_at_each_distance(reads: str, kind: type) -> None:
    """Within four standard errors, among the best one and the best four; a block says nothing beyond its
    last place."""
    rows = FALLING if reads != TEXT else FALLING[:1]
    (case,) = synthetic_cases(1, [Sampling()], 400, domains=("code",))
    drafter = Profiled(profile(reads, rows), 100_000).begin(case)()
    assert isinstance(drafter, kind)
    ahead = len(rows) + (reads == BLOCK)
    hits = count_hits(drafter, case, 0, ahead=ahead, stride=1)
    assert all(row[WIDTH_MAX] >= 390 for row in hits[: len(rows)])
    for expected, counted in zip(rows, hits, strict=False):
        for within, share in zip((1, 4), expected, strict=True):
            error = (share * (1 - share) / counted[WIDTH_MAX]) ** 0.5
            assert sum(counted[:within]) / counted[WIDTH_MAX] == pytest.approx(share, abs=4 * error + 0.01)
    assert [row[WIDTH_MAX] for row in hits[len(rows) :]] == [0] * (reads == BLOCK)


def test_the_beta_distribution_has_the_shares() -> None:
    """By draws, not by the formula."""
    for rows in ((0.635,), (0.64, 0.82, 0.9), (0.5, 0.55, 0.6)):
        within = (1, 4, 16)[: len(rows)]
        drawn = np.random.default_rng(1).beta(*beta_of(rows, within), 200_000)
        for count, share in zip(within, rows, strict=True):
            assert (1 - (1 - drawn) ** count).mean() == pytest.approx(share, abs=0.03 if count > 1 else 0.005)


def test_answers_are_exact_and_features_travel() -> None:
    (case,) = synthetic_cases(1, [Sampling()], 24, domains=("code",))
    sent = {}
    for reads in (TEXT, CHAIN, BLOCK):
        own = profile(reads, FALLING if reads != TEXT else FALLING[:1])
        drafter = Profiled(own, 1024).begin(case)()
        assert drafter is not None
        record = run(replace(synthetic(), profile=own), boards(4), OURS, case, {"some": drafter}).record
        assert record.agreement == EXACT
        assert 0 < (record.oracle_s or 0.0) <= record.decode_s * (1 + 1e-9)
        sent[reads] = record.network_bytes / record.rows
    assert min(sent[CHAIN], sent[BLOCK]) > 1.1 * sent[TEXT], "states of the middle travel, too"
