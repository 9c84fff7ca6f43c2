"""Answers are recorded by those who ask for it, and a chat that writes to no terminal draws nothing into its
text."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowspec.cli import generate
from flowspec.cli.main import main
from flowspec.cli.recorded import check_recording
from flowspec.errors import InputError
from flowspec.runtime.session import RecoveryOptions
from flowspec.watch.recording import read_recording
from tests import warm
from tests.cli.test_commands import flowspec

CHAT = [
    sys.executable,
    "-m",
    "flowspec.cli.main",
    "chat",
    "--local",
    "2",
    "--temperature",
    "0",
    "--no-journal",
]


def test_generate_saves_a_recording_of_its_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "answer.json"
    answer = json.loads(
        flowspec(
            "generate",
            "--json",
            "--local",
            "2",
            "--temperature",
            "0",
            "--record",
            str(path),
            "What is 17 + 25?",
        )
    )
    document = read_recording(path)
    frames = document["frames"]
    text = "".join(text for frame in frames if frame["kind"] == "tokens" for _, text in frame["nodes"])
    assert text == answer["text"]
    assert (document["world"], document["model"], document["method"], document["drafters"]) == (
        "cluster",
        "bundled",
        "continuous",
        ["bundled", "ngram"],
    )
    assert [stage["name"] for stage in document["stages"]] == [stage["name"] for stage in answer["stages"]]
    end = frames[-1]
    assert (end["kind"], end["reason"]) == ("end", "stop")
    assert {**end["statistics"], "head_s": answer["statistics"]["head_s"]} == answer["statistics"]
    assert "What is 17 + 25?" in next(frame["text"] for frame in frames if frame["kind"] == "begin")
    assert main(["top", "--replay", str(path), "--once", "--json"]) == 0
    assert [row["layers"] for row in json.loads(capsys.readouterr().out)["devices"]] == [[0, 4], [4, 8]]


def test_generate_records_what_is_told_of_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, told = tmp_path / "answer.json", "device pi-5 is lost (its connection closed)"
    opened, asked = generate.open_llm, generate.ask
    given: list[RecoveryOptions] = []

    def open_llm(args: Any, options: RecoveryOptions, *rest: Any, **named: Any) -> Any:
        given.append(options)
        return opened(args, options, *rest, **named)

    def ask(llm: Any, question: Any, request: int, show: Callable[[str], None], **named: Any) -> Any:
        def shown(text: str) -> None:
            if given:
                given.pop().on_note(told)
            show(text)

        return asked(llm, question, request, shown, **named)

    monkeypatch.setattr(generate, "open_llm", open_llm)
    monkeypatch.setattr(generate, "ask", ask)
    assert main(["generate", "--local", "1", "--max-new-tokens", "8", "--record", str(path), "hello"]) == 0
    frames = read_recording(path)["frames"]
    assert [frame["text"] for frame in frames if frame["kind"] == "note"] == [told]


def test_a_recording_that_cannot_be_written_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--record", str(tmp_path), "hello"]) == 2
    assert "is a folder" in capsys.readouterr().err
    assert main(["generate", "--record", str(tmp_path / "none" / "a.json"), "hello"]) == 2
    assert "in no folder that can be written" in capsys.readouterr().err
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello\n")
    assert main(["generate", "--record", str(tmp_path / "a.json"), "--prompts", str(prompts)]) == 2
    assert "--record saves one answer" in capsys.readouterr().err
    with pytest.raises(InputError):
        check_recording(tmp_path)


FULL = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
from flowspec.cli.main import main
sys.exit(main())
"""
"""The command where no file can grow beyond 4 KiB, as on a disk that is full."""


@pytest.mark.parametrize("form", [["--json"], []])
def test_an_answer_comes_although_its_recording_cannot_be_written(tmp_path: Path, form: list[str]) -> None:
    place = str(tmp_path / "answer.json")
    asked = ["--local", "2", "--temperature", "0", "--record", place, "What is 17 + 25?"]
    command = [sys.executable, "-c", FULL, "generate", *form, *asked]
    done = warm.run(command, capture_output=True, text=True, timeout=120)
    answer = json.loads(done.stdout)["text"] if form else done.stdout
    assert "42" in answer
    assert "(the answer is whole, but cannot write the recording" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 1
    assert not list(tmp_path.iterdir()), "nothing half-written is left"


def test_a_recording_that_fails_leaves_the_answer_in_the_dialogue(tmp_path: Path) -> None:
    """The path was free as it was named, and is a folder once the answer is there."""
    path = tmp_path / "chat.json"
    with warm.Popen(CHAT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as chat:
        assert chat.stdin is not None
        assert chat.stdout is not None
        chat.stdin.write(f"/record {path}\n")
        chat.stdin.flush()
        while "(the next answer" not in chat.stdout.readline():
            pass
        path.mkdir()
        told, _ = chat.communicate(
            f"What is 2 + 3?\n/save {tmp_path / 'dialogue.json'}\n/quit\n", timeout=120
        )
    assert chat.returncode == 0
    assert "cannot write the recording" in " ".join(told.split())
    messages = json.loads((tmp_path / "dialogue.json").read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["chat.json", "dialogue.json"], (
        "nothing half-written is left"
    )


def test_a_chat_records_the_next_answer_and_draws_nothing_into_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    lines = (
        f"/watch\n/record\n/record {tmp_path}\n/record {path}\nWhat is 2 + 3?\nWhat is 3 + 4?\n/help\n/quit\n"
    )
    done = warm.run(CHAT, input=lines, capture_output=True, text=True, timeout=120, check=True)
    assert "\x1b" not in done.stdout
    assert "/watch draws in a terminal, which this output is not" in " ".join(done.stdout.split())
    assert "expected a file: /record answer.json" in done.stdout
    assert "is a folder" in " ".join(done.stdout.split()), "on lines that wrap, however long the path is"
    assert "/watch          show a live line" in done.stdout
    document = read_recording(path)
    (begin,) = (frame for frame in document["frames"] if frame["kind"] == "begin")
    assert "What is 2 + 3?" in begin["text"], "the next answer, and no other"
