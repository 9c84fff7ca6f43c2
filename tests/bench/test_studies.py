"""Experiments of the laboratory: what their files say, drafters that are right as a profile or a declaration
says, tuning, and figures beside published ones."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs, to_builtins

from flowspec.bench.cases import PlainCase, prompt_path, read_prompts, synthetic_cases
from flowspec.bench.drafters import Guesses, MemoDrafter
from flowspec.bench.engine import Engine
from flowspec.bench.experiment import TUNING_PROMPTS, WIDTH_MAX, Setup, Testbed, read_setups
from flowspec.bench.records import EXACT, Record, read_records
from flowspec.bench.simulated import run
from flowspec.core.protocol.messages import Sampling
from flowspec.errors import InputError
from flowspec.plan.tables import toml_of
from lab.bench import __main__ as command
from lab.bench import tune
from lab.bench.drafters import BlockOfProfile, ChainOfProfile, Declared, DeclaredDrafter, Profiled
from lab.bench.experiment import FOLDER, Study, read_study
from lab.bench.profiles import BLOCK, CHAIN, MEASURED, TEXT, Profile, Shares, find_profile
from lab.perf.acceptance import count_hits
from tests.bench.benches import TOML, boards, synthetic

PROFILES = sorted(path.stem for path in FOLDER.with_name("profiles").glob("*.toml"))
PROFILED = TOML.replace("acceptance = 0.6", 'profile = "some.toml"')
DECLARED = TOML.replace("acceptance = 0.6", "correlation = 0.5") + (
    '\n[[drafter]]\nname = "one"\nacceptance = { code = 0.5 }\n'
)
FALLING = ((0.9, 0.97), (0.8, 0.93), (0.6, 0.8), (0.5, 0.7), (0.4, 0.6), (0.3, 0.5))


def profile(reads: str) -> Profile:
    rows = FALLING if reads != TEXT else FALLING[:1]
    return Profile(
        basis=MEASURED,
        source="nobody",
        reads=reads,
        depths=() if reads == TEXT else (0.25, 0.5),
        within=(1, 4),
        shares=(Shares(domain="code", temperature=0.0, shares=rows),),
    )


PROFILE = toml_of(to_builtins(profile(CHAIN)))


def study(**changes: object) -> Study:
    return Study(**structs.asdict(synthetic()) | changes)


# ------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_experiments_of_the_laboratory_read(path: Path) -> None:
    found = read_study(path)
    assert found.name == path.stem
    if found.declared and not found.steps:
        assert {case.domain for case in found.cases(None)} == set(found.declared[0].acceptance)


def test_profiles_read_and_one_that_is_written_is_read(tmp_path: Path) -> None:
    assert all(0.0 in {each.temperature for each in find_profile(name).shares} for name in PROFILES)
    (tmp_path / "some.toml").write_text(PROFILE)
    (tmp_path / "tiny.toml").write_text(PROFILED)
    found = read_study(tmp_path / "tiny.toml")
    assert (found.acceptance, found.profile) == (None, profile(CHAIN))


@pytest.mark.parametrize(
    ("text", "old", "new", "error"),
    [
        (DECLARED, "limit = 2", "limit = 2\nacceptance = 0.5", "acceptance: expected nothing beside tables"),
        (DECLARED, "correlation = 0.5", "correlation = 1.5", "correlation:"),
        (DECLARED, "code = 0.5", "code = 1.5", "drafter 1: acceptance: code:"),
        (DECLARED, '[[drafter]]\nname = "one"', '[[drafter]]\nnom = "one"', "drafter 1: unknown key 'nom'"),
        (DECLARED, '"synthetic"', '"bundled"', "model: expected synthetic"),
        (TOML, "limit = 2", "limit = 2\ncorrelation = 0.5", "correlation: expected nothing without"),
        (PROFILED, "limit = 2", "limit = 2\nacceptance = 0.5", "acceptance: expected nothing beside"),
        (PROFILED, "some.toml", "other.toml", "profile: "),
        (PROFILE, '"measured"', '"guessed"', "basis:"),
        (PROFILE, "[0.8, 0.93]", "[0.8, 1.93]", "domain 1: shares 2 2:"),
        (PROFILE, "[0.8, 0.93]", "[0.93, 0.8]", "domain 1: shares:"),
        (PROFILE, "depths = [0.25, 0.5]", "", "depths:"),
    ],
)
def test_a_mistake_in_a_file_is_one_line(text: str, old: str, new: str, error: str, tmp_path: Path) -> None:
    files = {"some.toml": PROFILE, "tiny.toml": PROFILED}
    files["some.toml" if text == PROFILE else "tiny.toml"] = text.replace(old, new)
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=r"\.toml: ") as refused:
        read_study(tmp_path / "tiny.toml")
    assert error in str(refused.value)


# ------------------------------------------------------------------------------------------ drafters


@pytest.mark.parametrize(
    ("reads", "kind"), [(CHAIN, ChainOfProfile), (BLOCK, BlockOfProfile), (TEXT, MemoDrafter)]
)
def test_a_profiled_drafter_is_right_as_often_as_its_profile_says_at_each_distance(
    reads: str, kind: type
) -> None:
    """Within four standard errors, among the best one and the best four; a block says nothing beyond its
    last place."""
    rows = profile(reads).shares[0].shares
    (case,) = synthetic_cases(1, [Sampling()], 400, domains=("code",))
    drafter = Profiled(profile(reads), 100_000)(case)()
    assert drafter is not None
    assert isinstance(drafter, kind)
    hits = count_hits(drafter, case, 0, ahead=len(rows) + (reads == BLOCK), stride=1)
    assert all(row[WIDTH_MAX] >= 390 for row in hits[: len(rows)])
    for expected, counted in zip(rows, hits, strict=False):
        for within, share in zip((1, 4), expected, strict=True):
            error = (share * (1 - share) / counted[WIDTH_MAX]) ** 0.5
            assert sum(counted[:within]) / counted[WIDTH_MAX] == pytest.approx(share, abs=4 * error + 0.01)
    assert [row[WIDTH_MAX] for row in hits[len(rows) :]] == [0] * (reads == BLOCK)


def test_answers_with_a_profile_are_exact_and_features_travel() -> None:
    (case,) = synthetic_cases(1, [Sampling()], 24, domains=("code",))
    sent = {}
    for reads in (TEXT, CHAIN, BLOCK):
        drafter = Profiled(profile(reads), 1024)(case)()
        assert drafter is not None
        setup = Setup(name="continuous", method="continuous")
        record = run(study(profile=profile(reads)), boards(4), setup, case, {"some": drafter}).record
        assert record.agreement == EXACT
        sent[reads] = record.network_bytes / record.rows
    assert min(sent[CHAIN], sent[BLOCK]) > 1.1 * sent[TEXT], "states of the middle travel, too"


TOKENS = 2_000


def declared_guesses(case: PlainCase, number: int, correlation: float) -> Guesses:
    drafter = (
        DeclaredDrafter(name="strong", acceptance={"code": 0.8, "plays": 0.4}),
        DeclaredDrafter(name="weak", acceptance={"code": 0.5, "plays": 0.5}),
    )[number]
    made = Declared(drafter, number, correlation, 100_000)(case)()
    assert isinstance(made, MemoDrafter)
    return made._guesses


def test_declared_drafters_are_right_as_declared_and_miss_the_same_as_the_correlation_says() -> None:
    phi = []
    cases = synthetic_cases(2, [Sampling()], TOKENS, domains=("code", "plays"), have_words=True)
    for correlation in (0.0, 0.5, 1.0):
        right = {}
        for case, shares in zip(cases, ((0.8, 0.5), (0.4, 0.5)), strict=True):
            for number, share in enumerate(shares):
                guesses = declared_guesses(case, number, correlation)
                path = guesses.prefixes.chain((*case.prompt, *case.answer))[len(case.prompt) - 1 : -1]
                said = zip(guesses.children(path), case.answer, strict=True)
                hits = right[case.domain, number] = np.array([each.tokens[0] == true for each, true in said])
                assert abs(hits.mean() - share) < 4 * np.sqrt(share * (1 - share) / TOKENS) + 0.005
        strong, weak = right["code", 0], right["code", 1]
        phi.append(float(np.corrcoef(strong, weak)[0, 1]))
    assert abs(phi[0]) < 4 / np.sqrt(TOKENS)
    assert all(later > earlier + 0.1 for earlier, later in pairwise(phi))
    assert not (weak & ~strong).any(), "the weaker one knows nothing that the stronger one does not"


# ------------------------------------------------------------------------------------------ tuning, running

JETSON, PI = boards(2, name="a Jetson"), boards(2, "raspberry-pi-4", "a Pi")
GRIDS = {"tree-sd": {"nodes": (2, 16), "depth": (2, 5)}, "continuous": {"segment_nodes": (4, 64)}}


def test_the_best_of_the_grid_is_found_for_each_testbed_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "GRIDS", GRIDS)
    monkeypatch.setattr(tune, "PROMPTS", 1)
    setups = (Setup(name="ar", method="ar"), Setup(name="tree-sd (published)", method="tree-sd"))
    small = study(testbeds=(JETSON, PI), setups=setups, new_tokens=8)
    path = tmp_path / "deep" / "tuned.toml"
    found = tune.tune(small, path, 1, quiet=True)
    assert [(each.name, each.method, each.testbeds) for each in found] == [
        ("tree-sd tuned", "tree-sd", ("a Jetson",)),
        ("tree-sd tuned", "tree-sd", ("a Pi",)),
    ], "ar has nothing to tune, and continuous is not in the experiment"
    (case,) = structs.replace(small, limit=1, temperatures=(0.0,)).cases(None, for_tuning=True)
    engine = Engine(small, [case])

    def decode_s(testbed: Testbed, options: object) -> float:
        setup = Setup(name=json.dumps(options), method="tree-sd", options=options)  # type: ignore[arg-type]
        return engine.run(testbed, setup, case).record.decode_s

    alone = [{name: value} for name, values in GRIDS["tree-sd"].items() for value in values]
    for each, testbed in zip(found, (JETSON, PI), strict=True):
        assert decode_s(testbed, each.options) == min(
            decode_s(testbed, some) for some in (each.options, *alone)
        )
    assert found[0].options != found[1].options, "a Pi pays for every node"
    assert list(read_setups(path)) == found, "the file says the same"
    monkeypatch.setattr(tune, "_best", None)
    assert tune.tune(small, path, 1, quiet=True) == found, "nothing is tuned twice"


def test_prompts_for_tuning_are_never_those_that_are_reported() -> None:
    cases, reported = (study(limit=50).cases(None, for_tuning=each) for each in (True, False))
    assert len(cases) == len(reported) == 100
    assert {case.prompt for case in cases}.isdisjoint(case.prompt for case in reported)
    shipped, tuning = (
        {prompt.turns for prompt in read_prompts(prompt_path(name))} for name in ("shipped", TUNING_PROMPTS)
    )
    assert len(tuning) >= 12
    assert shipped.isdisjoint(tuning)


def test_an_experiment_is_run_and_set_beside_published_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "PUBLISHED", tmp_path)
    rates = "{ ar = 2.0, continuous = 6.0 }"
    (tmp_path / "tiny.toml").write_text(
        f'[[published]]\ntestbed = "two boards"\nreference = "ar"\nfitted = true\ntokens_per_s = {rates}\n'
    )
    (tmp_path / "experiment.toml").write_text(TOML)
    words = ["--experiment", str(tmp_path / "experiment.toml"), "--jobs", "1", "--out", str(tmp_path / "out")]
    assert command.main([*words, "--temperatures", "0"]) == 0
    assert "two boards: ar *" in capsys.readouterr().out
    records = read_records(tmp_path / "out" / "results.jsonl", Record)
    rate = {
        name: sum(each.new_tokens - 1 for each in records if each.method == name)
        / sum(each.decode_s for each in records if each.method == name)
        for name in ("ar", "continuous")
    }
    assert command.main([*words, "--temperatures", "0", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["published"]
    assert [row["ratio"] for row in rows] == [1, rate["continuous"] / rate["ar"]]
    assert rows[1]["deviation"] == rows[1]["ratio"] / 3 - 1
    with pytest.raises(SystemExit):
        command.main([*words, "--no-such-flag"])
    assert command.main([*words, "--world", "emulated"]) == 2
