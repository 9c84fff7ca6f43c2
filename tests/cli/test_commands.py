"""The commands as people and programs run them: real processes, the bundled model, JSON, Ctrl-C, nothing left
behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from gguf import GGMLQuantizationType

from flowspec.bench.checkpoints import make_variant
from flowspec.bench.exactness import ClusterAnswer, Verdict, judge
from flowspec.cli.main import main
from flowspec.core.protocol.messages import Sampling
from flowspec.errors import meant
from flowspec.model.files import BUNDLED, TOY_TOLD, ModelFiles
from flowspec.model.reference import Reference
from flowspec.model.step_by_step import StepByStep
from flowspec.model.text import Tokenizer
from flowspec.version import __version__
from tests import warm
from tests.ggufs import convert, make

FLOWSPEC = [sys.executable, "-m", "flowspec.cli.main"]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def flowspec(*arguments: str, status: int = 0, stdin: str = "", run: Run = warm.run) -> str:
    """Runs a command to its end; returns its standard output."""
    done = run([*FLOWSPEC, *arguments], input=stdin, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == status, f"{arguments}: status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def generate(*arguments: str, drafter: str = "ngram", run: Run = warm.run) -> dict[str, Any]:
    """One answer; with n-grams, unless it is about the drafter: they compute less."""
    return dict(json.loads(flowspec("generate", "--json", "--drafter", drafter, *arguments, run=run)))


def test_generate_reports_all_that_is_promised_and_equals_the_plain_model() -> None:
    asked = ("--temperature", "0.8", "--seed", "4", "--dtype", "float32", "What is 17 + 25?")
    found = generate(
        "--local", "3", "--layers", "3,1,4", *asked, drafter="bundled", run=subprocess.run
    )  # cold, as users start it
    files = ModelFiles(BUNDLED)
    tokenizer = Tokenizer(files)
    prompt = tuple(tokenizer.encode_chat([{"role": "user", "content": "What is 17 + 25?"}]))
    expected = Reference(files, "float32").generate(
        prompt, Sampling(temperature=0.8, seed=4), 256, frozenset([2])
    )
    assert found["token_ids"] == [token for token in expected if token != 2]
    assert found["text"] == tokenizer.decode(expected)
    assert (found["finish_reason"], found["world"], found["seed"]) == ("stop", "cluster", 4)
    assert (found["method"], found["drafter"]) == ("continuous", "bundled")
    assert found["statistics"]["nodes_sent"] > 0
    assert (found["prompt_tokens"], found["new_tokens"]) == (len(prompt), len(found["token_ids"]))
    assert found["tokens_per_s"] == pytest.approx((found["new_tokens"] - 1) / found["decode_s"], rel=1e-2)
    assert found["time_to_first_token_s"] > 0
    assert [stage["layers"] for stage in found["stages"]] == [[0, 3], [3, 4], [4, 8]]
    assert all(
        stage["weight_bytes"] > 0 and stage["memory_bytes"] > stage["weight_bytes"]
        for stage in found["stages"]
    )
    assert not any(psutil.pid_exists(stage["pid"]) for stage in found["stages"]), (
        "the local daemons have ended"
    )


def test_generate_needs_no_tokenizer_for_token_ids(tmp_path: Path) -> None:
    folder = make_variant(tmp_path, "qwen3")
    found = generate(
        "--model", str(folder), "--local", "2", "--prompt-token-ids", "5,6,7", "--max-new-tokens", "9"
    )
    expected = Reference(ModelFiles(str(folder)), "float32").generate(
        (5, 6, 7), Sampling(), 9, frozenset([2])
    )
    assert found["token_ids"] == [token for token in expected if token != 2]
    assert found["text"] is None


def test_generate_runs_a_gguf_file(tmp_path: Path) -> None:
    path = convert(make(tmp_path / "checkpoint", "llama"), tmp_path / "model.gguf", GGMLQuantizationType.Q8_0)
    asked = ("--dtype", "float32", "--prompt-token-ids", "5,6,7", "--max-new-tokens", "9")
    found = generate("--model", str(path), "--local", "2", *asked)
    expected = Reference(ModelFiles(str(path)), "float32").generate((5, 6, 7), Sampling(), 9, frozenset([2]))
    assert found["token_ids"] == [token for token in expected if token != 2]
    assert [stage["layers"] for stage in found["stages"]] == [[0, 2], [2, 4]]


def test_stops_end_the_answer_where_they_should() -> None:
    whole = generate("--local", "1", "What is 17 + 25?")
    cut = generate("--local", "1", "--stop", "12", "What is 17 + 25?")
    assert cut["finish_reason"] == "stop"
    assert cut["text"] == whole["text"].split("12")[0]
    assert cut["token_ids"] == whole["token_ids"][: len(cut["token_ids"])]
    token = whole["token_ids"][6]
    cut = generate("--local", "1", "--stop-token-ids", str(token), "What is 17 + 25?")
    assert cut["token_ids"] == whole["token_ids"][: whole["token_ids"].index(token)]


def test_chat_remembers_and_reuses_what_was_said() -> None:
    lines = "What is 2 + 3?\nWhat is 4 + 4?\n/reset\nWhat is 2 + 3?\n/quit\n"
    answers = [
        json.loads(line)
        for line in flowspec("chat", "--json", "--local", "2", stdin=lines).splitlines()
        if line.startswith("{")
    ]
    first, second, again = answers
    assert second["prompt_tokens"] > first["prompt_tokens"]
    assert second["reused_tokens"] >= first["prompt_tokens"]
    assert again["reused_tokens"] == 0
    assert again["token_ids"] == first["token_ids"]


def test_verify_finds_all_exact_and_finds_a_wrong_token(tmp_path: Path) -> None:
    folder = make_variant(tmp_path / "right", "llama-grouped")
    common = [
        "verify",
        "--json",
        "--prompt-token-ids",
        "5,6,7",
        "--prompt-token-ids",
        "9,9,9,9",
        "--temperatures",
        "0,1",
        "--seeds",
        "1,2",
    ]
    report = json.loads(flowspec(*common, "--model", str(folder), "--local", "1,3", "--max-new-tokens", "24"))
    exact, faithful = report["exact"], report["faithful"]
    assert (exact["is_exact"], exact["exact"], exact["wrong"], len(exact["answers"])) == (True, 12, 0, 12)
    assert (faithful["is_faithful"], faithful["tokens"], faithful["faults"]) == (True, 2000, [])
    # This process computes with other weights than the cluster has: this must show.
    script = (
        "import sys\nfrom flowspec.model.step_by_step import StepByStep\nreal = StepByStep.load\n"
        "def other(*given, **named):\n    found = real(*given, **named)\n"
        "    found.part.pieces.layers[3].mlp.down_proj.weight.data *= 1.5\n    return found\n"
        "StepByStep.load = other\nfrom flowspec.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    )

    def broken(*flags: str) -> str:
        command = [
            sys.executable,
            "-c",
            script,
            *common[:1],
            *flags,
            *common[2:],
            "--model",
            str(folder),
            "--local",
            "2",
        ]
        done = warm.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 1, done.stderr
        return done.stdout

    report = json.loads(broken("--json"))
    exact, faithful = report["exact"], report["faithful"]
    assert not exact["is_exact"]
    wrong = next(answer for answer in exact["answers"] if answer["verdict"] == "wrong")
    assert wrong["difference"]["expected"] != wrong["difference"]["found"]
    assert wrong["difference"]["margin"] > 0
    assert not faithful["is_faithful"]
    assert faithful["matrix"]["matrix"] == "layers.3.mlp.down_proj.weight"
    lines = broken("--method", "ar").splitlines()
    assert [
        line for line in lines if line.startswith(f"exact: NO, {exact['wrong']} of 6 answers are wrong")
    ], lines
    assert [line for line in lines if line.startswith("faithful: NO, a logit is off by")], lines


def test_verify_fails_where_the_model_is_exact_but_not_faithful(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowspec.bench.faithfulness.PERPLEXITY_LIMIT", 0.0)
    folder = make_variant(tmp_path / "model", "llama-grouped")
    few = ["--prompt-token-ids=5,6,7", "--temperatures=0", "--max-new-tokens=4", "--local=1", "--method=ar"]
    assert main(["verify", f"--model={folder}", *few]) == 1
    assert "exact: yes, all answers are equal\nfaithful: NO, perplexity is" in capsys.readouterr().out


def test_verify_checks_answers_that_a_schema_binds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another schema step by step than on the devices gives other tokens."""
    pytest.importorskip("llguidance")
    few = ["--limit=1", "--temperatures=0", "--max-new-tokens=24", "--local=2", "--method=continuous"]
    true = judge

    def judged(plain: StepByStep, found: ClusterAnswer, stop_ids: frozenset[int]) -> Verdict:
        grammar = found.case.sampling.grammar
        if grammar is None:
            return true(plain, found, stop_ids)
        other = replace(grammar, text='{"type": "integer"}')
        case = replace(found.case, sampling=replace(found.case.sampling, grammar=other))
        assert true(plain, found, stop_ids).kind == "exact"
        return true(plain, replace(found, case=case), stop_ids)

    monkeypatch.setattr("flowspec.bench.exactness.judge", judged)
    assert main(["verify", *few]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "exact: NO, 1 of 2 answers are wrong" in lines
    assert lines[-1] == "structured output: 1 of the answers were bound by a schema"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_command_that_is_ended_leaves_no_process_behind(number: signal.Signals) -> None:
    command = [
        *FLOWSPEC,
        "generate",
        "--local",
        "2",
        "--ignore-eos",
        "--max-new-tokens",
        "900",
        "Tell me a story.",
    ]
    with warm.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        begun = process.stdout.read(10)
        assert begun, "the answer has begun"
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) == 3, "the pool and two daemons"
        process.send_signal(number)
        process.stdout.read()
        status = process.wait(timeout=30)
    assert status == (-signal.SIGKILL if number == signal.SIGKILL else 130)
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive


def test_a_daemon_command_ends_cleanly_and_gives_its_port_back() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        with subprocess.Popen(
            [*FLOWSPEC, "daemon", "--port", "0", "--name", "here"], stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stderr is not None
            line = process.stderr.readline()
            assert "here listens on 127.0.0.1:" in line
            process.send_signal(number)
            rest = process.stderr.read()
        assert process.returncode == 0
        assert f"stopped ({number.name})" in rest
        assert "Traceback" not in rest


def test_help_fits_a_narrow_terminal_and_names_every_command() -> None:
    environment = {**os.environ, "COLUMNS": "80"}
    for arguments in ([], ["daemon"], ["chat"], ["generate"], ["verify"]):
        done = warm.run(
            [*FLOWSPEC, *arguments, "--help"],
            capture_output=True,
            text=True,
            env=environment,
            timeout=60,
            check=True,
        )
        assert all(len(line) <= 80 for line in done.stdout.splitlines())
    assert all(name in flowspec("--help") for name in ("daemon", "chat", "generate", "verify"))
    assert flowspec("--version", run=subprocess.run).startswith("flowspec 0.")


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "flowspec", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == f"flowspec {__version__}\n"


def test_nothing_is_suggested_where_nothing_is_near() -> None:
    assert meant("--bogus", ["--verbose", "--local"]) == ""
    assert meant("--verbos", ["--verbose", "--local"]) == "; did you mean --verbose?"
    assert meant("-verbose", ["--verbose", "--local"]) == "; did you mean --verbose?"


def test_the_chat_says_that_its_model_is_a_toy() -> None:
    command = [*FLOWSPEC, "chat", "--local", "1", "--no-journal"]
    done = warm.run(command, input=b"", capture_output=True, timeout=60)
    assert f"({TOY_TOLD})\n" in done.stdout.decode()
