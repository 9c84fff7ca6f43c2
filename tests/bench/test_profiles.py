"""Profiles of acceptance: what a file may say, and that a synthetic drafter is right as often as it says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flowspec.bench.config import Bench, Setup
from flowspec.bench.experiments import read_experiment
from flowspec.bench.guesses import WIDTH_MAX, MemoDrafter
from flowspec.bench.outcome import EXACT
from flowspec.bench.profiled import BlockOfProfile, ChainOfProfile, Profiled
from flowspec.bench.profiles import (
    BLOCK,
    CHAIN,
    MEASURED,
    RECONSTRUCTED,
    TEXT,
    Profile,
    Shares,
    beta_of,
    find_profile,
    profile_folders,
    profile_text,
    read_profile,
)
from flowspec.bench.simulated import run
from flowspec.bench.synthetic import synthetic_cases
from flowspec.core.protocol.messages import Sampling
from flowspec.errors import InputError
from lab.perf.acceptance import count_hits
from tests.bench.benches import TOML, boards, synthetic

FALLING = ((0.9, 0.97), (0.8, 0.93), (0.6, 0.8), (0.5, 0.7), (0.4, 0.6), (0.3, 0.5))
OURS = Setup(name="continuous", method="continuous")
FIGURES = """
basis = "measured"
source = "somebody"
reads = "chain"
depths = [0.25, 1.0]
within = [1, 4]

[files]
"head/model.safetensors" = "abc"

[[domain]]
name = "code"
temperature = 0
tokens = [20, 10]
shares = [[0.5, 0.75], [0.25, 0.5]]
"""


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


@pytest.mark.parametrize("reads", [CHAIN, BLOCK, TEXT])
def test_answers_are_exact_and_features_travel(reads: str) -> None:
    rows = FALLING if reads != TEXT else FALLING[:1]
    (case,) = synthetic_cases(1, [Sampling()], 24, domains=("code",))
    bench = replace(synthetic(), profile=profile(reads, rows))
    sent = []
    for own in (bench.profile, profile(TEXT, FALLING[:1])):
        assert own is not None
        drafter = Profiled(own, 1024).begin(case)()
        assert drafter is not None
        record = run(bench, boards(4), OURS, case, {"some": drafter}).record
        assert record.agreement == EXACT
        assert 0 < (record.oracle_s or 0.0) <= record.decode_s * (1 + 1e-9)
        sent.append(record.network_bytes / record.rows)
    assert (sent[0] > 1.1 * sent[1]) == (reads != TEXT), "a verified token's state of the middle travels, too"


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "some.toml"
    path.write_text(FIGURES)
    found = read_profile(path)
    assert (found.name, found.domains, found.temperatures) == ("some", ("code",), (0.0,))
    assert found.of("code", 0).shares == ((0.5, 0.75), (0.25, 0.5))
    again = tmp_path / "again.toml"
    again.write_text(profile_text(found))
    assert replace(read_profile(again), name="some") == found
    assert json.loads(json.dumps(found.described()))["domains"][0]["tokens"] == [20, 10]
    assert "| code | 0 | 20 | 0.50 / 0.25 | 0.50 / 0.75 |" in found.table()


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            '"measured"',
            '"guessed"',
            "basis: expected one of measured, published, reconstructed, got 'guessed'",
        ),
        ("[1, 4]", "[4, 1]", "within: expected whole numbers from 1 on that grow"),
        ("[0.5, 0.75], ", "[0.5, 1.75], ", "domain 1: shares: expected for each distance"),
        ("[0.5, 0.75], ", "[0.75, 0.5], ", "domain 1: shares: expected for each distance"),
        ("[20, 10]", "[20]", "domain 1: tokens: expected 2 numbers"),
        ("depths = [0.25, 1.0]", "", "depths: expected shares of the target's layers"),
        ('"chain"', '"text"', "depths: expected shares of the target's layers"),
        ('source = "somebody"', 'source = "somebody"\nspeed = 3', "unknown key 'speed'"),
    ],
)
def test_what_is_wrong_with_a_profile_is_one_line(tmp_path: Path, old: str, new: str, expected: str) -> None:
    path = tmp_path / "some.toml"
    path.write_text(FIGURES.replace(old, new, 1))
    with pytest.raises(InputError) as caught:
        read_profile(path)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def read(tmp_path: Path, text: str) -> Bench:
    (tmp_path / "some.toml").write_text(FIGURES)
    path = tmp_path / "exp.toml"
    path.write_text(text)
    return read_experiment(path)


def test_an_experiment_names_its_profile(tmp_path: Path) -> None:
    text = TOML.replace("acceptance = 0.6", 'profile = "some.toml"')
    bench = read(tmp_path, text)
    assert bench.profile is not None
    assert (bench.acceptance, bench.profile.name, bench.profile.domains) == (0.0, "some", ("code",))
    with pytest.raises(InputError, match="acceptance: expected either `acceptance` or `profile`"):
        read(tmp_path, "acceptance = 0.5\n" + text)
    with pytest.raises(InputError, match=r"profile: expected nothing for model 'bundled'"):
        read(tmp_path, text.replace('"synthetic"', '"bundled"'))
    with pytest.raises(InputError, match=r"profile: expected a .toml file or one of .*, got 'eagel3'"):
        read(tmp_path, text.replace("some.toml", "eagel3"))


def test_shipped_profiles_can_be_read_and_say_where_they_are_from() -> None:
    names = sorted(path.stem for path in profile_folders()[0].glob("*.toml"))
    assert names
    for name in names:
        found = find_profile(name)
        assert found.source
        assert bool(found.files) == (found.basis == MEASURED), "what was measured is named by its hash"
        assert 0.0 in found.temperatures
        if found.basis == RECONSTRUCTED:
            assert all(len(row) == 1 for each in found.shares for row in each.shares)
