"""A chat in a terminal: what is typed, pasted, recalled and dropped, and what is to be seen while it
answers."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowspec.cli import chat
from flowspec.core.cluster.membership import WAITING
from flowspec.watch.state import WatchState
from tests.cli.running import Run
from tests.cli.terminal import Terminal, Window

STORY = "Tell me a long story about a dragon."
FIGURES = "tokens/s, first after"


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "flowspec"


def answers(count: int) -> object:
    return lambda screen: screen.text.count(FIGURES) == count


def said(path: Path) -> list[tuple[str, str]]:
    return [(each["role"], each["content"]) for each in json.loads(path.read_text())["messages"]]


def echoes(window: Window) -> bool:
    return bool(termios.tcgetattr(window.ours)[3] & termios.ECHO)


def at_prompt(screen: Terminal) -> bool:
    return screen.rows[screen.cursor.y] == "you>"


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose name fits a line of the terminal, whatever else pytest runs."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_lines_are_edited_pasted_completed_recalled_and_dropped(state: Path, short: Path) -> None:
    chat = ["chat", "--local", "1", "--drafter", "ngram", "--max-new-tokens", "8"]
    dialogue = short / "dialogue.json"
    (short / "stories").mkdir()
    with Window(*chat) as window:
        window.until("you>")
        window.paste("What is\n2 + 3?\n")
        window.until(lambda screen: screen.rows[screen.cursor.y] == "     2 + 3?")
        window.type("\r")
        window.until(answers(1))
        window.type("Is it\x1b\rfive")
        window.until(lambda screen: screen.rows[screen.cursor.y] == "     five")
        window.type("\r")
        window.until(answers(2))
        window.type("to be dropped\x03")
        window.until("(/quit or Ctrl-D leaves)")
        window.type(f"/sa\t{dialogue.parent}/dia")
        window.until("/dia")
        window.type("logue.json\r")
        window.until("(saved 4 messages")
        window.type("\x1b[A")
        window.until(lambda screen: screen.text.count(f"/save {dialogue}"[:70]) == 2)
        window.type("\x15/re\t")
        window.until(lambda screen: screen.rows[screen.cursor.y] == "you> /re" and "/record" in screen.text)
        window.type(f"\x15/save {dialogue.parent}/st\t")
        window.until(f"{dialogue.parent}/stories/")
        window.type("\x15/quit\r")
        assert window.ended() == 0
        assert echoes(window)
    assert [text for role, text in said(dialogue) if role == "user"] == ["What is\n2 + 3?", "Is it\nfive"]
    history = state / "history"
    assert history.stat().st_mode & 0o777 == 0o600
    before = history.read_text()
    assert "+What is\n+2 + 3?\n" in before
    with Window(*chat, columns=120, lines=40) as window:
        window.until("you>")
        window.type("\x1b[A")
        window.until("/quit")
        os.kill(window.process.pid, signal.SIGTERM)
        assert window.ended() == 130
        assert echoes(window)
    assert history.read_text() == before


def test_what_is_typed_during_an_answer_waits_and_ctrl_c_drops_it(state: Path) -> None:
    with Window("chat", "--local", "1", "--no-journal", "--max-new-tokens", "120") as window:
        window.until("you>")
        window.type(STORY + "\r")
        window.until("Once")
        assert not echoes(window)
        window.paste("What is\n2 + 3?")
        window.until(answers(1))
        window.until("you> What is 2 + 3?")
        assert window.screen.text.count("What is") == 1, "it is shown at the prompt alone"
        window.type("\r")
        window.until(answers(2))
        window.type(STORY + "\r")
        window.until(lambda screen: screen.text.count("nce upon") == 2)
        window.type("to be dropped\x03")
        window.until(lambda screen: answers(3)(screen) and at_prompt(screen))  # type: ignore[operator]
        assert "to be dropped" not in window.screen.text
        window.type("\x04")
        assert window.ended() == 0
    assert not (state / "history").exists()


@pytest.mark.usefixtures("state")
def test_a_lost_device_logs_and_resizing_leave_the_answer_whole(tmp_path: Path) -> None:
    dialogue, recording = tmp_path / "dialogue.json", tmp_path / "recording.json"
    with Window("chat", "--local", "2", "-v") as window:
        window.until("you>")
        window.type(f"/record {recording}\r")
        window.until("is recorded in")
        for typed, told in (("no", "got no"), ("off", "under answers: off"), ("", "under answers: on")):
            window.type(f"/watch {typed}\r")
            window.until(told)
        row = next(row for row in window.screen.whole if "local-0  layers 0 to 3" in row)
        window.type(STORY + "\r")
        window.until("busy ")
        os.kill(int(row.split()[-1]), signal.SIGKILL)
        window.until("(going on with 1 device)")
        window.resize(50, 20)
        window.until(answers(1))
        window.type("half a")
        window.resize(80, 24)
        window.type(" line")
        window.until("you> half a line")
        window.type(f"\x15/save {dialogue}\r")
        window.until("(saved")
        whole = window.screen.whole
        window.type("/quit\r")
        assert window.ended() == 0
    assert not any("tokens/s  tree" in row for row in whole), "the live line has gone"
    assert any(row.startswith("(device local-0 is lost") for row in whole)
    notes = [
        frame["text"] for frame in json.loads(recording.read_text())["frames"] if frame["kind"] == "note"
    ]
    assert notes[0].startswith("device local-0 is lost")
    assert "going on with 1 device" in notes
    (_, text) = said(dialogue)[-1]
    shown = iter(" ".join(whole).partition(STORY)[2].split())
    assert [word for word in text.split() if word not in shown] == [], "each behind the one before"


def test_a_chat_that_waits_for_devices_says_how_to_stop_waiting(capsys: pytest.CaptureFixture[str]) -> None:
    chat.show_note(f"no device is left{WAITING}, as long as it takes; start its daemon again")
    chat.show_note("device a is lost")
    waiting, lost = capsys.readouterr().err.splitlines()
    assert waiting.endswith("as long as it takes; start its daemon again; Ctrl-C gives the answer up)")
    assert lost == "(device a is lost)"


@pytest.mark.usefixtures("shared")
def test_a_question_that_cannot_be_answered_fails_a_chat_that_nobody_types(run: Run) -> None:
    long = "What is 2 + 3? " * 300
    chat = ("chat", "--local=1", "--drafter=ngram", "--no-journal", "--max-new-tokens=8")
    ended = run(*chat, stdin=f"{long}\nWhat is 1 + 2?\n", status=1)
    assert "--context if the model allows more" in ended.words
    assert FIGURES in ended.out, "and the next one is answered"


def test_the_live_line_tells_how_busy_stages_are_and_what_is_lost() -> None:
    present = WatchState()
    present.stages = [{"name": name, "layers": [0, 1]} for name in "ab"]
    assert chat.live_line(None, chat.BARS) == ""
    assert chat.live_line(present, chat.BARS) == "busy ▁▁  0.0 tokens/s  0 guesses alive  0.0 tokens a step"
    shares = [0.0, 0.5, 0.999, 1.0]
    present.figures = {"t": 1.0, "kind": "figures", "busy": shares, "tokens_per_s": 3.5, "S": 1.25}
    assert chat.live_line(present, chat.BARS).startswith("busy ▁▅██  3.5 tokens/s")
    assert chat.live_line(present, chat.DIGITS).startswith("busy 0599  3.5 tokens/s")
    present.take({"t": 2.0, "kind": "lost", "silent_s": 1.0})
    assert "another is being formed" in chat.live_line(present, chat.BARS)
    present.take({"t": 3.0, "kind": "failed", "text": "no device\x1b[2J\nis left"})
    assert chat.live_line(present, chat.BARS).startswith(r"(it failed: no device\x1b[2J is left;")
