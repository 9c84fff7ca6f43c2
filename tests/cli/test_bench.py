"""`flowspec bench` as a command: its files, its refusals, and Ctrl-C at any time, which leaves what is done
and no process."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from flowspec.bench import tune as tune_module
from flowspec.bench.bench import RESULTS, TUNED_FILE, open_out
from flowspec.bench.out_folder import EXPERIMENT
from flowspec.bench.outcome import WRONG, Record, read_records, write_records
from flowspec.cli import bench as bench_command
from flowspec.cli.bench import _tuned, _verdict
from flowspec.cli.bench_request import kinder, pick_experiment
from flowspec.cli.commands import build_parser
from flowspec.cli.main import main
from flowspec.draft.kinds import WORDS
from flowspec.errors import ClusterError, InputError
from flowspec.watch.recording import read_recording
from tests import warm
from tests.bench.benches import TOML
from tests.bench.records import record

COMMAND = [sys.executable, "-m", "flowspec.cli.main", "bench"]
WAIT_S = 90


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    (tmp_path / "tiny.toml").write_text(TOML)
    return tmp_path / "tiny.toml"


def test_an_experiment_becomes_records_tables_and_pictures(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    published = (
        '\n[[published]]\ntestbed = "two boards"\nreference = "ar"\n'
        "tokens_per_s = { ar = 20.0, continuous = 40.0 }\n"
    )
    tiny.write_text(TOML + published)
    done = subprocess.run(
        [*COMMAND, "--experiment", tiny, "--out", out, "--json", "--jobs", "2"],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    summary = json.loads(done.stdout)
    assert json.loads((out / "summary.json").read_text()) == summary
    assert (summary["experiment"], summary["world"], summary["answers"]) == ("tiny", "simulated", 8)
    assert [row["method"] for row in summary["validation"]] == ["ar", "continuous"]
    assert {path.name for path in out.iterdir()} == {
        *(EXPERIMENT, RESULTS, "report.html", "summary.json", "summary.md", "speedup.png", "timeline.png"),
        "trace.json",
        *("recording-ar.json", "recording-continuous.json"),
    }
    records = read_records(out / RESULTS)
    assert len(records) == 8
    assert {one.agreement for one in records} == {"exact"}
    assert "SIMULATED" in (out / "summary.md").read_text("utf-8")
    assert summary["setting"]["command"].startswith(f"flowspec bench --experiment {tiny} ")
    assert (out / "report.html").read_text("utf-8").count("data:image/png;base64,") == 2
    for picture in ("speedup.png", "timeline.png"):
        assert (out / picture).read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "trace.json").read_text())
    for method in ("ar", "continuous"):
        document = read_recording(out / f"recording-{method}.json")
        assert (document["world"], document["method"], len(document["stages"])) == ("simulated", method, 2)
        kinds = [frame["kind"] for frame in document["frames"]]
        assert (kinds[:3], kinds.count("begin"), kinds.count("end")) == (["stages", "begin", "root"], 1, 1)
        assert "draft" in kinds or method == "ar"


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., str]]:
    """What the command says in its one line when it refuses, in this process."""

    def refusal(*args: object) -> str:
        try:
            status = main(["bench", *map(str, args)])
        except SystemExit as end:
            status = int(end.code or 0)
        said = capsys.readouterr()
        assert (status, said.out) == (2, "")
        lines = [line for line in said.err.splitlines() if not line.startswith(("usage: ", " "))]
        assert len(lines) == 1, said.err
        assert lines[0].startswith("flowspec bench: ")
        return lines[0].removeprefix("flowspec bench: ").removeprefix("error: ")

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield refusal
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--experiment", "nothing"], "--experiment: expected a file or one of acceptance, cosine,"),
        (["--methods", "best"], "--methods: expected names among ar, continuous"),
        (["--testbeds", "x"], "--testbeds: expected names among two boards, got 'x'"),
        (["--world", "dream"], "argument --world: expected one of simulated, "),
        (["--world", "emulated", "--tune"], "--tune works in virtual time"),
        (["--world", "emulated"], "world emulated: expected a real model, got 'synthetic'"),
        (["--repeat", "2"], "--repeat: virtual time gives the same figures every time"),
        (["--repeat", "0"], "argument --repeat: expected a whole number from 1, got '0'"),
        (["--limit", "-1"], "argument --limit: expected a whole number from 1, got '-1'"),
        (
            ["--temperatures", "hot"],
            "argument --temperatures: expected numbers with commas, such as 0,0.7,1, got 'hot'",
        ),
        (["--temperatures", "inf"], "--temperatures: temperature: expected 0, or 0.001 to 100.0, got inf"),
        (["--temperatures", ""], "argument --temperatures: expected numbers with commas"),
        (["--seeds", "1.5"], "argument --seeds: expected numbers with commas"),
        (["--seeds", "-1"], "--seeds: expected whole numbers from 0, got -1"),
        (["--jobs", "0"], "argument --jobs: expected a whole number from 1, got '0'"),
        (["--local", "2", "--cluster", "x"], "argument --cluster: not allowed with argument --local"),
        (["--local", "2"], "--cluster and --local are for --world cluster"),
        (
            ["--max-new-tokens", "1000"],
            "a synthetic prompt has 64 tokens, which with 1000 new ones is more than the context of 1024",
        ),
        (
            ["--model", "bundled", "--prompts", "/no/such.jsonl"],
            "/no/such.jsonl: expected a file of prompts, but it cannot be read (No such",
        ),
        (["--model", "bundled", "--max-new-tokens", "1020", "--limit", "1"], "prompt 1 has "),
        (
            ["--model", "/no/model"],
            "expected a model folder, a GGUF file or a hub id such as Qwen/Qwen3-0.6B, but there is no "
            "folder '/no/model'",
        ),
        (
            ["--model", "bundled", "--drafter", "/no/model"],
            f"--drafter: expected bundled, {', '.join(WORDS)}",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_wrong_is_told_in_one_line(
    tiny: Path, tmp_path: Path, refused: Callable[..., str], args: list[str], expected: str
) -> None:
    assert refused("--experiment", tiny, "--out", tmp_path / "out", *args).startswith(expected)
    assert not (tmp_path / "out" / RESULTS).exists()


@pytest.mark.parametrize(
    ("flag", "wrong", "known"),
    [
        ("--experiment", "papr", "paper"),
        ("--methods", "continous", "continuous"),
        ("--testbeds", "two board", "two boards"),
    ],
)
def test_a_wrong_name_is_answered_with_the_one_that_was_meant(
    tiny: Path, tmp_path: Path, refused: Callable[..., str], flag: str, wrong: str, known: str
) -> None:
    told = refused("--experiment", tiny, "--out", tmp_path / "out", flag, wrong)
    assert told.endswith(f", got '{wrong}'; did you mean {known}?")


def test_matplotlib_is_asked_for_before_anything_runs(
    tiny: Path, tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    out = tmp_path / "out"
    said = refused("--experiment", tiny, "--out", out)
    assert said.startswith("plots need matplotlib, which is not installed: run launch/install plots")
    assert said.endswith("--no-plots goes on without")
    assert not out.exists()
    assert main(["bench", "--experiment", str(tiny), "--out", str(out), "--jobs", "1", "--no-plots"]) == 0
    assert {path.name for path in out.iterdir()} >= {RESULTS, "report.html", "summary.md", "trace.json"}
    assert not list(out.glob("*.png"))


def test_a_folder_that_cannot_be_used_is_refused(
    tiny: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    assert (
        refused("--experiment", tiny, "--out", tiny)
        == f"--out: expected a folder that can be written, got {tiny} (File exists)"
    )
    out = tmp_path / "out"
    args = build_parser(["bench"]).parse_args(["bench", "--experiment", str(tiny)])
    open_out(pick_experiment(args), out, "flowspec bench --experiment tiny.toml")
    write_records(out / RESULTS, [record("ar", "1", 1, 1.0)])
    assert refused("--experiment", tiny, "--out", out, "--limit", "3") == (
        f"--out: {out} holds results of another experiment (limit: expected 2, got 3); go on with those "
        "by: flowspec bench --experiment tiny.toml; or begin anew: give another --out, or remove the folder"
    )
    (out / RESULTS).write_text("nonsense\n")
    assert refused("--experiment", tiny, "--out", out).startswith(
        f"{out}/{RESULTS}: expected results of an earlier run, got "
    )


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--methods", "flowspec-paper"], "as published: --methods 'flowspec-paper (published)'"),
        (
            ["--methods", "ar,pipedec,flowspec-paper", "--world", "emulated"],
            "as published: --world simulated --methods 'pipedec (published),flowspec-paper (published)'",
        ),
        (
            ["--experiment", "matrix", "--methods", "flowspec-paper"],
            "as published: --experiment paper-bundled --methods 'flowspec-paper (published)'",
        ),
        (["--methods", "ar,flowspec-paper,flowspec-paper (published)"], None),
        (["--methods", "ar,continuous,tree-sd"], None),
        ([], None),
    ],
)
def test_whoever_runs_a_published_method_as_ours_does_it_is_told(
    args: list[str], expected: str | None
) -> None:
    parsed = build_parser(["bench"]).parse_args(["bench", *args])
    said = kinder(parsed, pick_experiment(parsed))
    assert (said is None) == (expected is None)
    assert said is None or said.endswith(
        f": as ours does it, kinder than the paper's code (docs/paper.md); {expected}"
    )


def test_where_a_device_is_lost_the_last_line_says_what_is_kept(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"

    def lose(*_: object) -> None:
        write_records(out / RESULTS, [record("ar", "1", 1, 1.0)])
        raise ClusterError("stage 1 is lost")

    monkeypatch.setattr(bench_command, "_run", lose)
    args = ["bench", "--experiment", str(tiny), "--out", str(out)]
    assert main(args) == 1
    assert capsys.readouterr().err.splitlines() == [
        "flowspec bench: stage 1 is lost",
        f"flowspec bench: kept 1 of 8 answers in {out}; go on with: {shlex.join(['flowspec', *args])}",
    ]


def test_a_wrong_answer_fails_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    fine = [record("ar", "a", 1, 1.0), record("continuous", "b", 1, 1.0)]
    assert _verdict(fine) == _verdict([]) == 0
    assert capsys.readouterr().err == ""
    wrong = [
        record("tree-sd", str(number), 1, 1.0, agreement=WRONG, temperature=1.0, seed=7)
        for number in range(9)
    ]
    assert _verdict([*fine, *wrong]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert (
        lines[0]
        == "WRONG: tree-sd on two boards, prompt 0, temperature 1, seed 7: not what plain decoding says"
    )
    assert len(lines) == 5, "the first few say it"


def test_tuned_methods_join_the_experiment_and_its_folder(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_module, "GRIDS", {"continuous": {"segment_nodes": (4, 64)}})
    monkeypatch.setattr(tune_module, "PROMPTS", 1)
    words = ["bench", "--experiment", str(tiny), "--jobs", "1", "--tune", "--temperatures", "0"]
    args = build_parser(["bench"]).parse_args(words)
    args.words = words
    bench, out = pick_experiment(args), tmp_path / "out"
    for _ in range(2):
        tuned = _tuned(bench, out, args)
        assert [setup.name for setup in tuned.setups] == ["ar", "continuous", "continuous tuned"]
        assert tuned.setups[-1].testbeds == ("two boards",)
        open_out(tuned, out)
        write_records(out / RESULTS, [record("ar", "1", 1, 1.0)])
    assert (out / TUNED_FILE).exists()
    with pytest.raises(
        InputError, match="new_tokens: expected 12, got 3"
    ):  # before it spends minutes on tuning
        _tuned(replace(bench, new_tokens=3), out, args)


def wait_for(what: Callable[[], object], command: subprocess.Popen[str]) -> None:
    for _ in range(WAIT_S * 50):
        if what():
            return
        assert command.poll() is None, command.communicate()
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
def long(tiny: Path, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts an experiment of some seconds, in two workers of a group of their own."""
    tiny.write_text(TOML.replace("limit = 2", "limit = 20"))
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


def check_gone(command: subprocess.Popen[str]) -> None:
    for _ in range(WAIT_S * 10):
        if not group(command.pid):
            return
        time.sleep(0.1)  # Python's own resource tracker ends when it sees that nobody is left
    pytest.fail(f"processes are left: {group(command.pid)}")


def check_interrupted(command: subprocess.Popen[str], results: Path) -> None:
    """It says how much is kept, and how to go on."""
    out, err = command.communicate(timeout=WAIT_S)
    assert (command.returncode, out) == (130, "")
    check_gone(command)
    assert isinstance(command.args, list)
    again = shlex.join(["flowspec", *map(str, command.args[len(COMMAND) - 1 :])])
    kept = f"{len(read_records(results))} of 80 answers in {results.parent}"
    assert err == f"flowspec bench: interrupted; kept {kept}; go on with: {again}\n"


def test_ctrl_c_keeps_what_is_done_and_the_next_run_finishes(
    long: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    results = tmp_path / "out" / RESULTS

    command = long()
    wait_for(lambda: len(psutil.Process(command.pid).children()) >= 2, command)
    os.killpg(command.pid, signal.SIGINT)  # as a terminal does; workers are just starting
    check_interrupted(command, results)

    done: list[Record] = []
    for end in (signal.SIGINT, signal.SIGTERM):
        command = long()
        wait_for(lambda: len(read_records(results)) > len(done), command)  # noqa: B023
        os.kill(command.pid, end)
        check_interrupted(command, results)
        found = read_records(results)
        assert found[: len(done)] == done
        assert len(done) < len(found) < 80
        done = found

    command = long()
    out, err = command.communicate(timeout=WAIT_S)
    assert (command.returncode, err) == (0, "")
    assert json.loads(out)["answers"] == 80
    found = read_records(results)
    assert found[: len(done)] == done
    assert len({one.key for one in found}) == len(found) == 80


def test_workers_end_with_their_parent(long: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    command = long()
    wait_for(lambda: len(psutil.Process(command.pid).children()) >= 2, command)
    command.kill()
    command.wait()
    check_gone(command)
