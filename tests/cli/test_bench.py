"""`flowspec bench` as a command: its files, and Ctrl-C, which leaves what is done and no process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from flowspec.bench.records import EXACT, EXPERIMENT, RESULTS, WRONG, Record, read_records, write_records
from flowspec.cli import bench as bench_command
from flowspec.cli.bench import exit_status, pick_experiment, published_hint
from flowspec.cli.commands import build_parser
from flowspec.errors import ClusterError
from tests import warm
from tests.bench.benches import TOML
from tests.bench.records import record
from tests.cli.running import FLOWSPEC, Run

COMMAND = [*FLOWSPEC, "bench"]
WAIT_S = 90
LONG = 10
"""Prompts of an experiment that takes some seconds; four answers each."""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    (tmp_path / "tiny.toml").write_text(TOML)
    return tmp_path / "tiny.toml"


def test_an_experiment_becomes_records_tables_and_pictures(tiny: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    done = run("bench", "--experiment", tiny, "--out", out, "--json", "--jobs", "1")
    assert done.err == ""
    summary = done.json
    assert json.loads((out / "summary.json").read_text()) == summary
    assert (summary["experiment"], summary["world"], summary["answers"]) == ("tiny", "simulated", 8)
    made = {"report.html", "summary.json", "summary.md", "speedup.png", "timeline.png", "trace.json"}
    made |= {EXPERIMENT, RESULTS, "recording-ar.json", "recording-continuous.json"}
    assert {path.name for path in out.iterdir()} == made
    assert [one.agreement for one in read_records(out / RESULTS, Record)] == [EXACT] * 8
    assert summary["setting"]["command"].startswith(f"flowspec bench --experiment {tiny} ")
    for method in ("ar", "continuous"):
        document = json.loads((out / f"recording-{method}.json").read_text())
        assert (document["world"], document["method"], len(document["stages"])) == ("simulated", method, 2)


def test_matplotlib_is_asked_for_before_anything_runs(
    tiny: Path, tmp_path: Path, run: Run, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    out = tmp_path / "out"
    asked = ("bench", "--experiment", tiny, "--out", out)
    said = refused(*asked)
    assert re.search("run .*install.* plots;", said)
    assert "--no-plots" in said
    assert not out.exists()
    run(*asked, "--jobs=1", "--no-plots")
    assert {path.name for path in out.iterdir()} >= {RESULTS, "report.html", "summary.md", "trace.json"}
    assert not list(out.glob("*.png"))


def test_whoever_runs_a_published_method_as_ours_does_it_is_told() -> None:
    paper, published = ["--methods", "flowspec-paper"], " --methods 'flowspec-paper (published)'"
    for args, expected in (
        (paper, published),
        ([*paper, "--world", "emulated"], f" --world simulated{published}"),
        ([*paper, "--experiment", "matrix"], f" --experiment paper-bundled{published}"),
        (["--methods", "ar,flowspec-paper,flowspec-paper (published)"], None),
        ([], None),
    ):
        parsed = build_parser(["bench"]).parse_args(["bench", *args])
        said = published_hint(parsed, pick_experiment(parsed))
        assert (said is None) == (expected is None)
        assert said is None or said.endswith(f"as published:{expected}")


def test_where_a_device_is_lost_the_last_line_says_what_is_kept(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    out = tmp_path / "out"

    def lose(*_: object) -> None:
        write_records(out / RESULTS, [record("ar", "1", 1, 1.0)])
        raise ClusterError("stage 1 is lost")

    monkeypatch.setattr(bench_command, "run_simulated", lose)
    args = ["bench", "--experiment", str(tiny), "--out", str(out)]
    again = shlex.join(["flowspec", *args])
    lost, kept = run(*args, status=1).told
    assert lost == "flowspec bench: stage 1 is lost"
    assert kept.endswith(f"kept 1 of 8 answers in {out}; go on with: {again}")


def test_a_wrong_answer_fails_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    fine = [record("ar", "a", 1, 1.0), record("continuous", "b", 1, 1.0)]
    assert exit_status({}, fine) == exit_status({}, []) == 0
    assert capsys.readouterr().err == ""
    wrong = record("tree-sd", "0", 1, 1.0, agreement=WRONG, temperature=1.0, seed=7)
    assert exit_status({}, [*fine, *[wrong] * 9]) == exit_status({"wrong": 1}, []) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("WRONG: tree-sd on two boards, prompt 0, temperature 1, seed 7: ")
    assert len(lines) == 5, "the first few say it"


def wait_until(is_so: Callable[[], object]) -> None:
    for _ in range(WAIT_S * 50):
        if is_so():
            return
        time.sleep(0.02)
    pytest.fail("nothing came")


def group(leader: int) -> list[int]:
    """The living processes that a command left."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            if os.getpgid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


@pytest.fixture
def long(tiny: Path, tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Starts an experiment of some seconds, in two workers of a group of their own."""
    tiny.write_text(TOML.replace("limit = 2", f"limit = {LONG}"))
    started = []

    def start() -> subprocess.Popen[str]:
        command = warm.Popen(
            [*COMMAND, "--experiment", tiny, "--out", tmp_path / "out", "--jobs", "2", "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(command)
        return command

    yield start
    for command in started:
        for process in group(command.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        command.communicate()


def check_interrupted(command: subprocess.Popen[str], results: Path) -> None:
    """It says how much is kept, and how to go on, and leaves no process."""
    out, err = command.communicate(timeout=WAIT_S)
    assert (command.returncode, out) == (130, "")
    wait_until(lambda: not group(command.pid))  # Python's own resource tracker ends when nobody is left
    assert isinstance(command.args, list)
    again = shlex.join(["flowspec", *map(str, command.args[len(COMMAND) - 1 :])])
    kept = f"{len(read_records(results, Record))} of {4 * LONG} answers in {results.parent}"
    assert err == f"flowspec bench: interrupted; kept {kept}; go on with: {again}\n"


def test_a_command_that_is_ended_keeps_what_is_done_and_the_next_run_finishes(
    long: Callable[[], subprocess.Popen[str]], tiny: Path, tmp_path: Path, run: Run
) -> None:
    out = tmp_path / "out"
    results = out / RESULTS
    killed = long()
    wait_until(lambda: len(psutil.Process(killed.pid).children()) >= 2)
    killed.kill()
    killed.wait()
    wait_until(lambda: not group(killed.pid))
    early = long()
    wait_until(lambda: len(psutil.Process(early.pid).children()) >= 2)
    os.killpg(early.pid, signal.SIGINT)  # as a terminal does; workers are just starting
    check_interrupted(early, results)
    before = read_records(results, Record)
    late = long()
    wait_until(lambda: len(read_records(results, Record)) > len(before))
    os.kill(late.pid, signal.SIGTERM)
    check_interrupted(late, results)
    done = read_records(results, Record)
    assert done[: len(before)] == before
    assert 0 < len(done) < 4 * LONG
    whole = run("bench", "--experiment", tiny, "--out", out, "--jobs", "1", "--json")
    assert (whole.json["answers"], whole.err) == (4 * LONG, "")
    found = read_records(results, Record)
    assert found[: len(done)] == done
    assert len({one.key for one in found}) == len(found) == 4 * LONG
