"""A file of prompts, several at a time: the answers of one by one, in the order of the file, and one line for
every mistake."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from flowspec.bench.checkpoints import SMALL, make_checkpoint
from flowspec.cli.console import STARTING
from flowspec.core.protocol.limits import REQUESTS_MAX
from flowspec.draft.kinds import WORDS
from tests import warm
from tests.cli.starting import without_starting

FLOWSPEC = [sys.executable, "-m", "flowspec.cli.main", "generate"]
DIALOGUES = [
    {"question_id": "plays", "turns": ["Tell me a story.", "And what came then?"]},
    {"question_id": "sum", "turns": ["What is 17 + 25?"]},
    {"question_id": "sums", "turns": ["What is 2 + 3?", "What is 4 + 4?", "What is 9 + 9?"]},
    {"question_id": "code", "turns": ["Write a function that adds two numbers."]},
    {"question_id": "hi", "turns": ["hi"]},
]
COMMON = (
    "--local",
    "2",
    "--dtype",
    "float32",
    "--temperature",
    "0.8",
    "--seed",
    "5",
    "--max-new-tokens",
    "48",
)


def generate(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = warm.run([*FLOWSPEC, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == status, f"{arguments}: status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in DIALOGUES))
    return path


@pytest.fixture(scope="module")
def one_by_one(file: Path) -> list[dict[str, Any]]:
    done = generate("--prompts", str(file), "--json", "--method", "ar", *COMMON)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_three_at_a_time_give_what_plain_decoding_gives_one_by_one(
    file: Path, one_by_one: list[dict[str, Any]]
) -> None:
    done = generate("--prompts", str(file), "--json", "--parallel", "3", *COMMON)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    order = [(str(row["question_id"]), turn) for row in DIALOGUES for turn in range(len(row["turns"]))]
    assert [(answer["prompt"], answer["turn"]) for answer in found] == order
    assert {(answer["method"], answer["drafter"]) for answer in found} == {("continuous", "bundled, ngram")}
    assert {(answer["method"], answer["drafter"]) for answer in one_by_one} == {("ar", "none")}
    assert [answer["token_ids"] for answer in found] == [answer["token_ids"] for answer in one_by_one]
    assert [answer["text"] for answer in found] == [answer["text"] for answer in one_by_one]
    assert all(answer["statistics"]["segments"] > 0 for answer in found if answer["new_tokens"] > 1)


def test_a_later_turn_reuses_the_dialogue_so_far(one_by_one: list[dict[str, Any]]) -> None:
    before: dict[str, Any] = {"prompt": None}
    for answer in one_by_one:
        if answer["turn"] == 0:
            assert answer["reused_tokens"] == 0
        else:
            assert answer["prompt"] == before["prompt"]
            assert before["prompt_tokens"] <= answer["reused_tokens"] < answer["prompt_tokens"]
        before = answer


def test_text_comes_in_the_order_of_the_file_with_a_line_of_figures_each(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("Tell me a long story.\n\nWhat is 2 + 3?\nhi\n")
    done = generate("--prompts", str(path), "--parallel", "3", *COMMON)
    heads = [line.split("]")[0] for line in done.stdout.splitlines() if line.startswith("[")]
    assert heads == ["[1", "[3", "[4"], "lines are named by their numbers"
    assert done.stderr.startswith(f"({STARTING})\n")
    figures = without_starting(done.stderr)
    assert len(figures) == 3
    assert all("tokens/s, first after" in line for line in figures)


def test_ctrl_c_prints_what_is_there_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("hi\n" + "Tell me a story.\n" * 8)
    command = [
        *FLOWSPEC,
        "--prompts",
        str(path),
        "--parallel",
        "2",
        "--json",
        "--local",
        "2",
        "--ignore-eos",
        "--max-new-tokens",
        "150",
    ]
    with warm.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = json.loads(process.stdout.readline())
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        rest = [json.loads(line) for line in process.stdout]
        said = process.stderr.read()
    assert process.returncode == 130
    assert "Traceback" not in said
    assert (first["prompt"], first["finish_reason"]) == ("1", "length")
    assert {answer["finish_reason"] for answer in rest} <= {"cancelled", "length"}
    assert len(rest) < 8
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive


# ------------------------------------------------------------------------------------------------- mistakes


def refusal(*arguments: str) -> str:
    """The one line on standard error of a command that is refused."""
    done = generate(*arguments, status=2)
    assert done.stdout == ""
    (line,) = without_starting(done.stderr)
    assert line.startswith("flowspec generate: ")
    return line.removeprefix("flowspec generate: ")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["hi", "--parallel", "3"], "--parallel needs --prompts: one prompt has one answer"),
        (
            ["hi", "--prompts", "x.txt"],
            "expected one of PROMPT, --prompt, --prompt-token-ids and --prompts, got several",
        ),
        (
            ["--prompt-token-ids", "1,2", "--prompts", "x.txt"],
            "expected one of PROMPT, --prompt, --prompt-token-ids and --prompts, got several",
        ),
        (
            ["--prompts", "/no/file.jsonl"],
            "/no/file.jsonl: expected a file of prompts, but it cannot be read (No such file",
        ),
        (
            ["--prompts", "x.txt", "--parallel", "0"],
            "argument --parallel: expected a whole number from 1, got '0'",
        ),
        (
            ["--prompts", "x.txt", "--parallel", "257"],
            f"--parallel: expected at most {REQUESTS_MAX}, got 257",
        ),
        (["hi", "--tree-nodes", "9999"], "--tree-nodes: expected at most 256, got 9999"),
        (["hi", "--tree-nodes", "0"], "argument --tree-nodes: expected a whole number from 1, got '0'"),
        (["hi", "--tree-depth", "-1"], "argument --tree-depth: expected a whole number from 1, got '-1'"),
        (["hi", "--method", "psychic"], "argument --method: expected one of continuous, "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_flag_is_one_line(arguments: list[str], expected: str) -> None:
    assert refusal(*arguments).startswith(expected)


def test_a_drafter_that_is_not_there_or_does_not_fit_is_one_line(tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", "llama", {**SMALL, "num_hidden_layers": 1})
    assert refusal("hi", "--local", "1", "--drafter", "nonsense").startswith(
        f"--drafter: expected bundled, {', '.join(WORDS)}, one of block, draft, "
    )
    assert refusal("hi", "--local", "1", "--drafter", "eagel3").endswith("; did you mean eagle3?")
    (tmp_path / "empty").mkdir()
    empty = refusal("hi", "--local", "1", "--drafter", str(tmp_path / "empty"))
    assert empty.startswith(f"--drafter: model '{tmp_path / 'empty'}' has no config.json")
    line = refusal("hi", "--local", "1", "--drafter", str(other))
    assert (
        "has another tokenizer than model 'bundled': expected a vocabulary of 4096 entries, got 300" in line
    )


def test_a_prompt_of_the_file_that_does_not_fit_ends_the_command_with_one_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("What is 2 + 3? " * 40 + "\nhi\n")
    line = refusal("--prompts", str(path), "--json", "--local", "1", "--context", "64", "--parallel", "2")
    assert "but the context holds 64" in line
