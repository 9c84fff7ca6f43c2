"""Methods side by side: the tuned tree is the best of its grid, the floor is a floor, and what is printed is what was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowspec.core.messages import Sampling
from flowspec.draft.ranking import Ranker
from flowspec.errors import InputError
from flowspec.testbed import compare, coupling, plain
from flowspec.testbed.guesses import Randoms
from flowspec.testbed.virtual import OVERALL, Pipeline, rates
from tests.testbed.cases import STOP, made

GRID = compare.grid_of((4, 60), (2, 3))
PROMPTS = [
    {"question_id": "s", "category": "sums", "turns": ["What is 10 x 6?"]},
    {"question_id": "p", "category": "plays", "turns": ["Continue the play:\nDUKE:\nWho comes so late to our gate?"]},
    {"question_id": "q", "category": "plays", "turns": ["Continue the play:\nMARIA:\nThe night is long."]},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file of prompts, and the file in which their plain answers are kept."""
    found = tmp_path_factory.mktemp("compare")
    (found / "prompts.jsonl").write_text("\n".join(json.dumps(row) for row in PROMPTS))
    return found


def flags(folder: Path, *more: str) -> list[str]:
    return ["--prompts", str(folder / "prompts.jsonl"), "--cache", str(folder / "answers.json"), "--tokens", "12", *more]


def test_the_best_tree_of_the_grid_is_the_tuned_one() -> None:
    cases = [made(str(n), (*range(20 + n, 26 + n), STOP), domain="ab"[n % 2], prompt=(5, 6, n)) for n in range(4)]
    drafting = Randoms(Ranker(64), 64, 1024)
    found = compare.compare(Pipeline(board="pi"), drafting, cases, ("ar",), GRID, tune=1)
    assert len(found.grid) == 4
    assert found.tuned.name == max(found.grid, key=lambda name: found.grid[name])
    assert found.tuned.options["nodes"] == 4, "60 nodes cost a Pi eight slots, and a useless drafter makes nothing of them"
    assert all(len(runs) == 4 for runs in found.runs.values())
    assert found.rates()["ar"][OVERALL] == pytest.approx(Pipeline(board="pi").plain_rate, rel=1e-4)
    for tree in GRID[:2]:
        alone = compare.compare(Pipeline(board="pi"), drafting, cases[:2], ("ar",), [tree], tune=1)
        assert rates(alone.runs[compare.TUNED])[OVERALL] == pytest.approx(found.grid[tree.name])


def test_counts_are_taken_together_by_token() -> None:
    cases = [made("a", (*range(20, 30), STOP)), replace(made("b", range(20, 30), prompt=(8, 9)), new_tokens_max=10)]
    found = compare.compare(Pipeline(), Randoms(Ranker(64), 64, 1024), cases, ("ar", "continuous"), [], tune=1)
    said = compare.report(found, 4)["statistics"]["all"]
    runs = found.runs["continuous"]
    tokens = sum(len(one.case.new_tokens) for one in runs)
    assert tokens == 20
    assert said["nodes_sent"] == pytest.approx(sum(one.statistics.nodes_sent for one in runs) / tokens)
    assert said["nodes_drafted"] >= said["nodes_sent"] - 1 > 0
    assert 0 < said["stage_busy"] < 1
    ar = compare.totals(found.runs["ar"], 4)
    assert ar["tokens_per_commit"] == 1
    assert ar["nodes_sent"] == 19 / 20, "the prompt gave the first tokens, and one answer's last was sent for its stop"
    assert ar["share_in_flight"] == ar["nodes_drafted"] == 0


def test_answers_without_a_second_token_give_no_rate() -> None:
    with pytest.raises(InputError, match="no rate"):
        compare.compare(Pipeline(), Randoms(Ranker(64), 64, 1024), [made("a", (STOP,))], ("ar", "continuous"), [], tune=1)


def test_the_table_and_its_json_twin(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = flags(folder, "--prompts-per-domain", "1", "--nodes", "16", "--depths", "3")
    assert compare.main([*options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["world"], found["board"], found["stages"], found["drafter"]) == ("simulated", "jetson", 4, "bundled")
    assert [each["temperature"] for each in found["temperatures"]] == [0, 1]
    for each in found["temperatures"]:
        assert each["tuned"] == {"nodes": 16, "depth": 3}
        assert set(each["rates"]) == set(compare.COLUMNS)
        assert set(each["rates"]["ar"]) == {"sums", "plays", OVERALL}
        assert each["rates"]["ar"]["plays"] == pytest.approx(Pipeline().plain_rate, rel=1e-4)
        assert each["rates"]["continuous"][OVERALL] > 1.5 * each["rates"]["ar"][OVERALL], "the bundled drafter is worth something"
    compare.show_comparison(found["temperatures"][0])
    text = capsys.readouterr().out
    assert f"{found['temperatures'][0]['rates']['continuous']['plays']:.3f}" in text
    assert "tree-sd tuned: 16 nodes, depth 3" in text


def test_the_star_marks_where_ours_is_not_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    values = dict.fromkeys(compare.STATISTICS, 0.0)
    shown: dict[str, Any] = {
        "temperature": 0.0,
        "answers": 2,
        "tuned": None,
        "rates": {"ar": {"x": 1.0, "y": 1.0}, "pipedec": {"x": 2.0, "y": 0.5}, "continuous": {"x": 1.9, "y": 1.5}},
        "statistics": {"all": values},
    }
    compare.show_comparison(shown)
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if line.startswith("x ")).split()[-3:] == ["0.950", "*", "pipedec"]
    assert next(line for line in lines if line.startswith("y ")).split()[-2:] == ["1.500", "ar"]


def test_the_floor_decides_the_exit_status(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "one.jsonl").write_text(json.dumps(PROMPTS[1]))
    options = [*flags(folder, "--check-floor", "--temperatures", "0"), "--prompts", str(folder / "one.jsonl")]
    for floor, status, verdict in ((0.5, 0, "kept"), (1.5, 1, "BROKEN")):
        monkeypatch.setattr(compare, "FLOOR", floor)
        assert compare.main(options) == status
        said = capsys.readouterr()
        assert f"floor {floor} {verdict}" in said.err
        assert "drafter random" in said.out


def test_answers_that_are_kept_are_not_made_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = flags(folder, "--prompts-per-domain", "1", "--drafter", "ngram", "--nodes", "4", "--depths", "2", "--temperatures", "0")
    assert compare.main(options) == 0
    kept = json.loads((folder / "answers.json").read_text())
    monkeypatch.setattr("flowspec.model.reference.Reference.generate", lambda *_: pytest.fail("an answer was made again"))
    assert compare.main(options) == 0
    assert json.loads((folder / "answers.json").read_text()) == kept


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--temperatures", "-1"], "expected 0, or"),
        (["--drafter", "/no/such"], "there is no folder"),
        (["--tokens", "1020"], "expected at most 1024"),
        (["--prompts", "/no/such"], "cannot be read"),
    ],
)
def test_wrong_input_is_one_line(folder: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(flags(folder, *more)) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_a_file_that_holds_no_answers_is_no_cache(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "answers.json"
    broken.write_text('{"a": "b"}')
    assert compare.main([*flags(folder), "--cache", str(broken)]) == 2
    assert "an earlier run wrote" in capsys.readouterr().err
    assert broken.read_text() == '{"a": "b"}'


def test_samplings_are_one_for_greedy_and_one_for_each_seed() -> None:
    assert plain.make_samplings((0.0, 1.0), (1, 2)) == [Sampling(), Sampling(temperature=1.0, seed=1), Sampling(temperature=1.0, seed=2)]


def test_coupling_is_worth_tokens_where_much_is_open(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "plays.jsonl").write_text("\n".join(json.dumps(row) for row in PROMPTS[1:]))
    options = [*flags(folder, "--trees", "16", "--segments", "16"), "--prompts", str(folder / "plays.jsonl"), "--tokens", "20"]
    assert coupling.main([*options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["tokens_per_segment"]
    assert list(found) == ["tree-sd, 16 nodes", "continuous, 16 nodes"]
    for ways in found.values():
        assert ways["T=1 coupled"]["plays"] > 1.1 * ways["T=1 plain"]["plays"]
    assert found["tree-sd, 16 nodes"]["T=1 coupled"]["all"] <= 6, "five levels give six tokens at most"
    assert coupling.main([*options, "--temperature", "0"]) == 2
