"""Answers are recorded by those who ask for it, and an answer comes although its recording cannot be
written."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowspec.cli import generate
from flowspec.runtime.session import RecoveryOptions
from tests import warm
from tests.cli.running import FLOWSPEC, Run, real

CHAT = ("chat", "--local=2", "--temperature=0", "--no-journal")
ASKED = ("--local=2", "--temperature=0", "What is 17 + 25?")


@pytest.mark.usefixtures("shared")
def test_generate_saves_a_recording_of_its_answer(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "answer.json"
    answer = run("generate", "--json", "--record", path, *ASKED).json
    document = json.loads(path.read_text())
    frames = document["frames"]
    text = "".join(text for frame in frames if frame["kind"] == "tokens" for _, text in frame["nodes"])
    assert text == answer["text"]
    about = [document[name] for name in ("world", "model", "method", "drafters")]
    assert about == ["cluster", "bundled", "continuous", ["bundled", "ngram"]]
    assert [stage["name"] for stage in document["stages"]] == [stage["name"] for stage in answer["stages"]]
    end = frames[-1]
    assert (end["kind"], end["reason"]) == ("end", "stop")
    assert {**end["statistics"], "head_s": answer["statistics"]["head_s"]} == answer["statistics"]
    assert "What is 17 + 25?" in next(frame["text"] for frame in frames if frame["kind"] == "begin")
    assert [stage["layers"] for stage in document["stages"]] == [[0, 4], [4, 8]]


def test_generate_records_what_is_told_of_devices(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, told = tmp_path / "answer.json", "device pi-5 is lost (its connection closed)"
    opened, asked = generate.open_llm, generate.ask
    given: list[RecoveryOptions] = []

    def open_llm(args: Any, options: RecoveryOptions, *rest: Any, **named: Any) -> Any:
        given.append(options)
        return opened(args, options, *rest, **named)

    def ask(llm: Any, question: Any, request: int, show: Callable[[str], None], journal: Any) -> Any:
        def shown(text: str) -> None:
            if given:
                given.pop().on_note(told)
            show(text)

        return asked(llm, question, request, shown, journal)

    monkeypatch.setattr(generate, "open_llm", open_llm)
    monkeypatch.setattr(generate, "ask", ask)
    run("generate", "--local=1", "--max-new-tokens=8", "--record", path, "hello")
    frames = json.loads(path.read_text())["frames"]
    assert [frame["text"] for frame in frames if frame["kind"] == "note"] == [told]


FULL = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
from flowspec.cli.main import main
sys.exit(main())
"""
"""The command where no file can grow beyond 4 KiB, as on a disk that is full."""


def test_an_answer_comes_although_its_recording_cannot_be_written(tmp_path: Path) -> None:
    done = real("generate", "--record", tmp_path / "answer.json", *ASKED, status=1, code=FULL)
    assert "42" in done.out
    assert "(the answer is whole, but cannot write the recording" in done.err
    assert "Traceback" not in done.err
    assert not list(tmp_path.iterdir()), "nothing half-written is left"


def test_a_recording_that_fails_leaves_the_answer_in_the_dialogue(tmp_path: Path) -> None:
    """The path was free as it was named, and is a folder once the answer is there."""
    path, dialogue = tmp_path / "chat.json", tmp_path / "dialogue.json"
    with warm.Popen([*FLOWSPEC, *CHAT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as chat:
        assert chat.stdin is not None
        assert chat.stdout is not None
        chat.stdin.write(f"/record {path}\n")
        chat.stdin.flush()
        while "(the next answer" not in chat.stdout.readline():
            pass
        path.mkdir()
        told, _ = chat.communicate(f"What is 2 + 3?\n/save {dialogue}\n/quit\n", timeout=120)
    assert chat.returncode == 0
    assert "cannot write the recording" in " ".join(told.split())
    roles = [message["role"] for message in json.loads(dialogue.read_text())["messages"]]
    assert roles == ["user", "assistant"]
    left = sorted(each.name for each in tmp_path.iterdir())
    assert left == ["chat.json", "dialogue.json"], "nothing half-written"


@pytest.mark.usefixtures("shared")
def test_a_chat_records_the_next_answer_and_draws_nothing_into_a_pipe(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "chat.json"
    commands = f"/watch\n/record\n/record {tmp_path}\n/save {tmp_path}\n/record {path}\n"
    done = run(*CHAT, stdin=f"{commands}What is 2 + 3?\nWhat is 3 + 4?\n/help\n/quit\n")
    assert "\x1b" not in done.out
    for told in ("/watch draws in a terminal", "expected a file: /record", "is a folder", "/watch show"):
        assert told in done.words
    (begin,) = (frame for frame in json.loads(path.read_text())["frames"] if frame["kind"] == "begin")
    assert "What is 2 + 3?" in begin["text"], "the next answer, and no other"
