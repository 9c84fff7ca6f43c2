"""No text of a model, a device or a journal does anything to a terminal; a pipe gets it as it is."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from flowspec.cli.answer import note_hub
from flowspec.cli.console import PlainConsole, loading_bar
from flowspec.cli.result import Result
from flowspec.cli.terminal import LogHandler, broken, note, tell, visible
from flowspec.runtime.journal.file import Journal
from tests import warm
from tests.cli.journals import ENTRY, setting
from tests.cli.pseudo_terminal import shown
from tests.cli.running import real

CLIPBOARD = "\x1b]52;c;aGk=\x07"
EVIL = f"{CLIPBOARD}\x1b]0;title\x1b\\\x9b31mred\u202etxt\u2066.\u2069\x7f\b\r\x85over\x00"
SAFE = r"\x1b]52;c;aGk=\x07\x1b]0;title\x1b\\x9b31mred\u202etxt\u2066.\u2069\x7f\x08\r\x85over\x00"
FINE = "Ümläute, 中文, עברית, 😀\ttab\nline\r\n"
SPEAKS = f"""
import sys
import termios
from flowspec.model import text
text.Tokenizer.token_bytes = lambda self, token: {EVIL!r}.encode()
from flowspec.cli.main import main
sys.exit(main())
"""
"""The command with a model that says nothing else."""


def test_control_characters_are_shown_and_letters_stay() -> None:
    assert visible(EVIL) == SAFE
    assert visible(FINE) == FINE


GENERATE = ["generate", "--local", "1", "--drafter", "ngram", "--max-new-tokens", "5", "--ignore-eos", "Hi"]
CHAT = ["chat", "--local", "1", "--drafter", "ngram", "--max-new-tokens", "5", "--no-journal"]


@pytest.mark.parametrize("command", [GENERATE, CHAT], ids=["generate", "chat"])
def test_a_models_text_does_nothing_to_a_terminal(command: list[str]) -> None:
    found = "".join(shown(*command, code=SPEAKS, stdin="Hi\n/quit\n"))
    assert r"\x1b]52;c;aGk=\x07" in found
    for sequence in (CLIPBOARD, "\x1b]0;", "\x9b", "\u202e", "\x07", "\x7f"):
        assert sequence not in found


def test_a_pipe_gets_the_text_as_it_is() -> None:
    assert warm.run([sys.executable, "-c", SPEAKS, *GENERATE], capture_output=True).stdout.startswith(
        EVIL.encode() * 5
    )  # fmt: skip


def test_what_a_journal_and_a_log_say_does_nothing_either(tmp_path: Path) -> None:
    path = tmp_path / "answer"
    with Journal.start(path, setting(), print) as begun:
        begun.ask(ENTRY)
        begun.tokens([60])
        begun.end("stop", EVIL)
    found = "".join(shown("generate", "--resume", str(path)))
    assert "\x1b" not in found
    assert "title" in found
    wrong = " ".join(shown("generate", "--resume", str(tmp_path / f"no{CLIPBOARD}ne"), status=2))
    assert "\x1b" not in wrong
    assert "expected a journal" in wrong


def test_logs_and_consoles_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = logging.LogRecord("it", logging.WARNING, "", 0, "%s said %s", ("peer", CLIPBOARD), None)
    handler = LogHandler()
    handler.emit(record)
    assert capsys.readouterr().err == f"peer said {CLIPBOARD}\n", "a file gets it as it is"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    handler.emit(record)
    assert capsys.readouterr().err == "peer said \\x1b]52;c;aGk=\\x07\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    PlainConsole(force_terminal=True).message(f"he said {CLIPBOARD}", "dim")
    assert "\x1b]" not in capsys.readouterr().out


def test_messages_are_broken_between_words_to_the_terminals_width() -> None:
    """Not inside a path, an address or a command to copy; what goes on is indented."""
    path = "/home/somebody/models/" + "long/" * 8 + "model.toml"
    lines = broken(f"flowspec chat: expected a cluster file, got {path}, which is none", 60).split("\n")
    assert lines == ["flowspec chat: expected a cluster file, got", f"  {path},", "  which is none"]
    assert broken("中文 中文 中文 ab", 10) == "中文 中文\n  中文 ab"
    assert broken("  table   of   two\nlines", 20) == "  table   of   two\nlines", "what fits stays as it is"


@pytest.mark.parametrize("end", [", or ask", " and ask", "; then ask", ""])
def test_a_command_to_copy_stays_on_one_line(end: str) -> None:
    for command in ('flowspec generate "What is 17 + 25?"', "launch/boards start a.toml", "pip install h11"):
        text = f"(nothing listens on that machine; to mend it: {command}{end})"
        for width in range(len(command) + 4, 100):
            lines = broken(text, width).split("\n")
            assert any(command in line for line in lines), lines
            assert all(len(line) <= width for line in lines)


def test_columns_is_obeyed_where_no_terminal_has_a_width(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for columns in ("40", ""):
        monkeypatch.setenv("COLUMNS", columns)
        result = Result()
        result.table(("device", "what"), [("one", 6 * "word ")] * 2)
        result.table(("device", "what", "why"), [("one", 6 * "word ", 6 * "word ")])
        result.note("finding: " + " ".join(18 * ["word"]))
        result.print()
        tell("finding: " + " ".join(18 * ["word"]))
        longest = max(map(len, capsys.readouterr().out.splitlines()))
        assert (longest <= 40) == bool(columns)
        note("finding: " + " ".join(18 * ["word"]))
        assert capsys.readouterr().err.count("\n") == 1


def test_loading_is_told_in_lines_where_no_terminal_shows_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("flowspec.cli.console.LINE_EVERY_S", 0.0)
    monkeypatch.setattr("flowspec.cli.console.LOOK_S", 0.01)
    with loading_bar(quiet=False) as progress:
        progress("pi-1: reading", 0.1)
        told = ""
        while "pi-1: reading 10%" not in told:
            told += capsys.readouterr().err


def test_who_waits_for_the_hub_is_told_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here: dict[str, dict[str, int]] = {}
    monkeypatch.setattr("flowspec.model.hub.cached_sizes", here.get)
    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: False)
    note_hub("owner/name/file.gguf")
    assert capsys.readouterr().err.startswith("(asking the hub for owner/name/file.gguf;")
    here["owner/name"] = {"file.gguf": 1}
    for name in (
        "owner/name/file.gguf",
        "ngram",
        str(tmp_path),
        "/no/such.gguf",
        "./no/such",
        "~/no",
        "a/b/c",
    ):
        note_hub(name)
    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: True)
    note_hub("owner/other")
    assert capsys.readouterr().err == ""


def test_a_note_stands_on_a_line_of_its_own_and_nothing_is_blank() -> None:
    script = (
        "from flowspec.cli.terminal import note, show\n"
        "note('(first)')\nshow('some')\nnote('(lost)')\nshow(' text')\nshow('\\n')\nnote('(last)')\n"
    )
    command = [sys.executable, "-c", script]
    both = warm.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert both.stdout == "(first)\nsome\n(lost)\n text\n(last)\n"
    apart = real(code=script)
    assert (apart.out, apart.err) == ("some text\n", "(first)\n(lost)\n(last)\n")
