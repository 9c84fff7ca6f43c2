"""Experiments of rivals: the file, refusals in one line, and a small one run, gone on with and shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowspec.bench.bench import RESULTS
from flowspec.bench.experiments import find_experiment
from flowspec.bench.rival_experiment import cells_of, is_of_rivals, read_rivals, request_of
from flowspec.bench.rival_runs import read_rival_records, total
from flowspec.cli.main import main
from flowspec.errors import InputError

TOML = """
rivals = true
models = ["tinyllama-1.1b", "llama-2-70b"]
precision = "int4"
new_tokens = 8
answers = 2
prompt = 40
typical_context = 64
acceptances = [0.5, 0.8]
published = 0.8

[[network]]
name = "fast"
bandwidth_mbps = 1000
latency_ms = 0.1

[[testbed]]
name = "three boards"
devices = ["3 x raspberry-pi-5"]

[[figure]]
testbed = "three boards"
model = "tinyllama-1.1b"
tokens_per_s = 20
what = "somebody's"
"""


def written(tmp_path: Path, text: str = TOML) -> Path:
    path = tmp_path / "some.toml"
    path.write_text(text)
    return path


def test_the_shipped_one_has_every_model_board_and_network() -> None:
    path = find_experiment("rivals")
    assert is_of_rivals(path)
    assert not is_of_rivals(find_experiment("paper"))
    bench = read_rivals(path)
    assert [shape.name for shape in bench.models] == [
        "llama-3-8b",
        "llama-3-70b",
        "qwen3-32b",
        "qwen3-30b-a3b",
    ]
    assert {testbed.name: len(testbed.devices) for testbed in bench.testbeds} == {
        "4 x Pi 5": 4,
        "8 x Pi 5": 8,
        "4 x Orin Nano": 4,
        "4 x AGX Orin": 4,
        "mixed": 4,
    }
    assert [network.link.bandwidth_mbps for network in bench.networks] == [1000, 150, 50]
    first = bench.networks[0].acceptances
    assert (first[0], first[-1]) == (0.5, 0.86)
    cell = next(cells_of(bench))
    request = request_of(bench, cell, 0.5)
    assert request.drafter is not None
    assert (request.drafter.acceptance, request.precisions) == (0.5, ("int4",))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("rivals = true", "rivals = false", "rivals: expected true, got False"),
        ("published = 0.8", "published = 0.7", "published: expected one of the acceptances of each network"),
        ("0.5, 0.8", "0.5, 1", "acceptances: expected numbers above 0, up to 0.99, got [0.5, 1]"),
        ('"llama-2-70b"', '"lama"', "models: shape: expected one of llama-2-7b,"),
        ("new_tokens", "tokens", "unknown key 'tokens'"),
        ("answers = 2", "answers = 0", "answers: expected a whole number from 1 to 1000, got 0"),
        ('model = "tiny', 'model = "t', "figure 1: model: expected one of tinyllama-1.1b, llama-2-70b"),
        ("3 x rasp", "0 x rasp", "testbed 1: devices: expected names such as"),
        ("latency_ms", "latency", "network 1: unknown key 'latency'"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in TOML
    with pytest.raises(InputError) as caught:
        read_rivals(written(tmp_path, TOML.replace(old, new)))
    assert "\n" not in str(caught.value)
    assert said in str(caught.value)


def test_a_small_one_is_run_and_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = written(tmp_path), tmp_path / "out"
    args = ["bench", "--experiment", str(path), "--out", str(out), "--jobs", "1"]
    assert main([*args, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    records = read_rival_records(out / RESULTS)
    assert len(records) == total(read_rivals(path)) == 6, "SpecPipe is simulated at one acceptance"
    tiny, large = summary["cells"]
    assert tiny["fits"]
    assert (large["fits"], [point["ours"] for point in large["points"]]) == (False, [None, None])
    assert not tiny["is_larger_than_one"]
    low, high = tiny["points"]
    assert (low["acceptance"], high["acceptance"]) == (0.5, 0.8)
    assert "SpecPipe (pipedec)" in high["rivals"]
    assert "SpecPipe (pipedec)" not in low["rivals"]
    assert (high["ours"]["how"], summary["answers"]) == ("simulated", 2)
    assert 0 < high["ours"]["error"] < 0.5
    assert {record.tokens for record in records if record.boards} == {2 * 7}, "each but its first token"
    best = max(each["tokens_per_s"] for each in high["rivals"].values())
    assert high["rivals"][high["best_rival"]]["tokens_per_s"] == best
    assert high["to_best_rival"] == pytest.approx(high["ours"]["tokens_per_s"] / best)
    assert summary["figures"][0]["tokens_per_s"] == 20
    assert {file.name for file in out.iterdir()} >= {"summary.json", "summary.md", "rivals-three-boards.png"}
    text = (out / "summary.md").read_text("utf-8")
    assert "SIMULATED" in text
    assert "does not fit" in text
    assert "20 tokens/s measured by others: somebody's" in text

    kept = (out / RESULTS).read_text()
    (out / RESULTS).write_text("".join(kept.splitlines(keepends=True)[:4]))
    assert main([*args, "--json", "--no-plots"]) == 0
    capsys.readouterr()
    assert sorted((out / RESULTS).read_text().splitlines()) == sorted(kept.splitlines())
    assert main([*args, "--no-plots"]) == 0
    assert "three boards (simulated)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--methods", "ar"],
            "--methods: expected none with an experiment of rivals, which takes --testbeds,",
        ),
        (["--max-new-tokens", "9"], "--max-new-tokens: expected none with"),
        (["--profile", "eagle3"], "--profile: expected none with"),
        (["--acceptance", ".5"], "--acceptance: expected none with"),
        (["--testbeds", "no"], "--testbeds: expected names among three boards, got 'no'"),
    ],
)
def test_flags_that_mean_nothing_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    out = tmp_path / "out"
    assert main(["bench", "--experiment", str(written(tmp_path)), "--out", str(out), *flags]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not out.exists()


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        (
            '{"command": "flowspec bench --experiment x"}',
            'another experiment (name: expected nothing, got "some"); go on with those by: flowspec bench '
            "--experiment x; or begin anew: give another --out, or remove the folder",
        ),
        ("{}", '(name: expected nothing, got "some"); give the same flags as then; or begin anew: give'),
        (None, "expected what an earlier run wrote, got something else"),
        ("not JSON", "expected what an earlier run wrote, got something else"),
        ("[" * 100_000, "expected what an earlier run wrote, got something else"),
    ],
)
def test_a_folder_of_another_experiment_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kept: str | None, said: str
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / RESULTS).write_text("")
    if kept is not None:
        (out / "experiment.json").write_text(kept)
    assert main(["bench", "--experiment", str(written(tmp_path)), "--out", str(out), "--no-plots"]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
