"""A file of prompts, several at a time: the answers of one by one, in the order of the file."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import warm
from tests.cli.running import FLOWSPEC, Run

DIALOGUES = [
    {"question_id": "plays", "turns": ["Tell me a story.", "And what came then?"]},
    {"question_id": "sum", "turns": ["What is 17 + 25?"]},
    {"question_id": "sums", "turns": ["What is 2 + 3?", "What is 4 + 4?"]},
    {"question_id": "hi", "turns": ["hi"]},
]
COMMON = ("--local=1", "--dtype=float32", "--temperature=0.8", "--seed=5", "--max-new-tokens=24")


@pytest.mark.usefixtures("shared")
def test_three_at_a_time_give_what_plain_decoding_gives_one_by_one(tmp_path: Path, run: Run) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in DIALOGUES))
    asked = ("generate", f"--prompts={file}", "--json", *COMMON)
    plain, found = run(*asked, "--method=ar").answers, run(*asked, "--parallel=3").answers
    order = [(str(row["question_id"]), turn) for row in DIALOGUES for turn in range(len(row["turns"]))]
    assert [(answer["prompt"], answer["turn"]) for answer in found] == order
    assert {(answer["method"], answer["drafter"]) for answer in found} == {("continuous", "bundled, ngram")}
    assert {(answer["method"], answer["drafter"]) for answer in plain} == {("ar", "none")}
    for name in ("token_ids", "text"):
        assert [answer[name] for answer in found] == [answer[name] for answer in plain]
    assert all(answer["statistics"]["segments"] > 0 for answer in found if answer["new_tokens"] > 1)
    before: dict[str, Any] = {}
    for answer in plain:
        if answer["turn"]:  # it reuses the dialogue so far
            assert before["prompt_tokens"] <= answer["reused_tokens"] < answer["prompt_tokens"]
        else:
            assert answer["reused_tokens"] == 0
        before = answer


@pytest.mark.usefixtures("shared")
def test_text_comes_in_the_order_of_the_file_with_a_line_of_figures_each(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("Tell me a long story.\n\nWhat is 2 + 3?\nhi\n")
    ended = run("generate", f"--prompts={path}", "--parallel=3", *COMMON)
    heads = [line.split("]")[0] for line in ended.out.splitlines() if line.startswith("[")]
    assert heads == ["[1", "[3", "[4"], "lines are named by their numbers"
    assert ["tokens/s, first after" in line for line in ended.told] == [True] * 3


def test_ctrl_c_prints_what_is_there_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("hi\n" + "Tell me a story.\n" * 8)
    flags = ["--parallel=2", "--json", "--local=2", "--ignore-eos", "--max-new-tokens=100"]
    command = [*FLOWSPEC, "generate", f"--prompts={path}", *flags]
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
