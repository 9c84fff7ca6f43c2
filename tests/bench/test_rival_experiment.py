"""A small experiment of rivals is run, gone on with and summed up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowspec.bench.bench import RESULTS
from flowspec.bench.rival_experiment import read_rivals
from flowspec.bench.rival_runs import read_rival_records, total
from flowspec.cli.main import main
from tests.bench.benches import RIVALS


def test_a_small_one_is_run_and_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "some.toml", tmp_path / "out"
    path.write_text(RIVALS)
    args = ["bench", "--experiment", str(path), "--out", str(out), "--jobs", "1"]
    assert main([*args, "--json", "--no-plots"]) == 0
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
    assert "20 tokens/s measured by others: somebody's" in (out / "summary.md").read_text("utf-8")
    kept = (out / RESULTS).read_text()
    (out / RESULTS).write_text("".join(kept.splitlines(keepends=True)[:4]))
    assert main([*args, "--json", "--no-plots"]) == 0
    assert sorted((out / RESULTS).read_text().splitlines()) == sorted(kept.splitlines())
