"""No text of a model, a device or a journal does anything to a terminal; a pipe gets it as it is."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from flowspec.cli.console import STARTING, PlainConsole, Waiting, loading_bar
from flowspec.cli.opening import tell_of_hub
from flowspec.cli.terminal import LogHandler, broken
from flowspec.cli.visible import visible
from flowspec.core.protocol.messages import Sampling
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.runtime.journal.file import Journal
from flowspec.runtime.journal.lines import Entry, Setting
from tests import warm

CLIPBOARD = "\x1b]52;c;aGk=\x07"
EVIL = f"{CLIPBOARD}\x1b]0;title\x1b\\\x9b31mred\u202etxt\u2066.\u2069\x7f\b\r\x85over\x00"
SAFE = r"\x1b]52;c;aGk=\x07\x1b]0;title\x1b\\x9b31mred\u202etxt\u2066.\u2069\x7f\x08\r\x85over\x00"
FINE = "Ümläute, 中文, עברית, 😀\ttab\nline\r\n"
SPEAKS = f"""
import sys
import termios
from flowspec.model import text
text.Tokenizer.decode = lambda self, tokens: "".join({EVIL!r} for token in tokens)
from flowspec.cli.main import main
sys.exit(main())
"""
"""The command with a model that says nothing else."""


def test_control_characters_are_shown_and_letters_stay() -> None:
    assert visible(EVIL) == SAFE
    assert visible(FINE) == FINE


def seen(command: list[str], stdin: str = "") -> str:
    """What a command writes to a terminal."""
    ours, theirs = os.openpty()
    environment = {**os.environ, "TERM": "dumb"}
    try:
        pipes = {"stdin": subprocess.PIPE, "stdout": theirs, "stderr": theirs}
        with warm.Popen([sys.executable, *command], env=environment, text=True, **pipes) as process:
            os.close(theirs)
            assert process.stdin is not None
            process.stdin.write(stdin)
            process.stdin.close()
            found = b""
            with contextlib.suppress(OSError):  # it has ended
                while chunk := os.read(ours, 65536):
                    found += chunk
    finally:
        os.close(ours)
    return found.decode()


GENERATE = ["generate", "--local", "1", "--drafter", "ngram", "--max-new-tokens", "5", "--ignore-eos", "Hi"]
CHAT = ["chat", "--local", "1", "--drafter", "ngram", "--max-new-tokens", "5", "--no-journal"]


@pytest.mark.parametrize("command", [GENERATE, CHAT], ids=["generate", "chat"])
def test_a_models_text_does_nothing_to_a_terminal(command: list[str]) -> None:
    found = seen(["-c", SPEAKS, *command], "Hi\n/quit\n")
    assert r"\x1b]52;c;aGk=\x07" in found
    for sequence in (CLIPBOARD, "\x1b]0;", "\x9b", "\u202e", "\x07", "\x7f"):
        assert sequence not in found


def test_a_pipe_gets_the_text_as_it_is() -> None:
    done = warm.run([sys.executable, "-c", SPEAKS, *GENERATE], capture_output=True, timeout=120, check=True)
    assert done.stdout.startswith(EVIL.encode() * 5)


def test_what_a_journal_and_a_log_say_does_nothing_either(tmp_path: Path) -> None:
    path = tmp_path / "answer"
    setting = Setting(
        command="generate",
        model=BUNDLED,
        fingerprint=ModelFiles(BUNDLED).fingerprint(),
        dtype="float32",
        context=100,
    )
    with Journal.start(path, setting, print) as begun:
        begun.ask(Entry(prompt=(1, 5, 9), sampling=Sampling(), new_tokens_max=4, stop_ids=frozenset([2])))
        begun.tokens([60])
        begun.end("stop", EVIL)
    found = seen(["-m", "flowspec.cli.main", "generate", "--resume", str(path)])
    assert "\x1b" not in found
    assert "title" in found
    wrong = seen(["-m", "flowspec.cli.main", "generate", "--resume", str(tmp_path / f"no{CLIPBOARD}ne")])
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
    PlainConsole(force_terminal=True, no_color=True, width=80).print(f"[dim]he said {CLIPBOARD}[/]")
    assert "\x1b]" not in capsys.readouterr().out


def test_messages_are_broken_between_words_to_the_terminals_width() -> None:
    """Not inside a path, an address or a command to copy; what goes on is indented."""
    path = "/home/somebody/models/" + "long/" * 8 + "model.toml"
    lines = broken(f"flowspec chat: expected a cluster file, got {path}, which is none", 60).split("\n")
    assert lines == ["flowspec chat: expected a cluster file, got", f"  {path},", "  which is none"]
    assert broken("中文 中文 中文 ab", 10) == "中文 中文\n  中文 ab"
    assert broken("  table   of   two\nlines", 20) == "  table   of   two\nlines", "what fits stays as it is"


@pytest.mark.parametrize(
    "command",
    [
        "flowspec daemon --host 192.168.1.21 --port 7700",
        'flowspec generate "What is 17 + 25?"',
        "launch/boards start my-cluster.toml",
        "pip install starlette",
        "flowspec keygen --cluster my-cluster.toml",
    ],
)
@pytest.mark.parametrize("end", [", or ask", " and ask", "; then ask", ""])
def test_a_command_to_copy_stays_on_one_line(command: str, end: str) -> None:
    for width in range(len(command) + 4, 100):
        lines = broken(f"(nothing listens on that machine; to mend it: {command}{end})", width).split("\n")
        assert any(command in line for line in lines), lines
        assert all(len(line) <= width for line in lines)


def test_loading_is_told_in_lines_where_no_terminal_shows_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("flowspec.cli.console.LINE_EVERY_S", 0.0)
    monkeypatch.setattr("flowspec.cli.console.LOOK_S", 0.01)
    for is_logged in (True, False):
        with loading_bar(quiet=False, is_logged=is_logged) as progress:
            progress("pi-1: reading", 0.1)
            told = ""
            while "pi-1: reading 10%" not in told:
                told += capsys.readouterr().err
        assert (f"({STARTING})" in told) == is_logged
    capsys.readouterr()
    with loading_bar(quiet=True, is_logged=True) as progress:
        progress("pi-1: reading", 0.1)
    assert capsys.readouterr().err == ""


def test_lines_name_who_is_waited_for_at_each_step_and_now_and_then() -> None:
    waiting = Waiting(100.0)
    waiting.take("one: loading", 0.5)
    assert waiting.line(114.9) == "", "who waits for so short a time need not be told"
    assert waiting.line(115.0) == "(still loading after 15 s: one: loading 50%)"
    waiting.take("one: loading", 0.7)
    assert waiting.line(129.0) == ""
    assert waiting.line(130.0) == "(still loading after 30 s: one: loading 70%)"
    waiting.take("two: trying kernels, once", 0.0)
    waiting.take("one: ready", 1.0)
    assert waiting.line(131.0) == "", "several steps at once are one line"
    assert waiting.line(132.0) == "(still loading after 32 s: two: trying kernels, once)"
    waiting.take("two: ready", 1.0)
    assert waiting.line(134.0) == "(still loading after 34 s: starting)"
    for number in range(5):
        waiting.take(f"pi-{number}: loading", 0.25)
    assert waiting.line(137.0) == (
        "(still loading after 37 s: pi-0: loading 25%; pi-1: loading 25%; pi-2: loading 25%; and 2 more)"
    )


def test_a_bar_shows_those_that_are_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[Progress] = []
    monkeypatch.setattr(Console, "is_terminal", True)
    monkeypatch.setattr(
        "flowspec.cli.console.Progress",
        lambda *columns, **options: bars.append(Progress(disable=True)) or bars[0],
    )

    def rows() -> list[tuple[str, float | None, float]]:
        return [(task.description, task.total, task.completed) for task in bars[0].tasks]

    with loading_bar(quiet=False) as progress:
        assert rows() == [("starting", None, 0.0)]
        progress("one: trying kernels, once", 0.0)
        assert rows() == [("one: trying kernels, once", None, 0.0)], "no share of what is not known"
        progress("two: loading", 0.5)
        progress("one: ready", 1.0)
        assert rows() == [("two: loading", 1.0, 0.5)]
        progress("two: ready", 1.0)
        assert rows() == [("starting", None, 0.0)]


NO_HUB_IDS = ("/no/such.gguf", "/no/such", "./no/such", "~/no", "../such", "a/b/c", "a b/c")


def test_who_waits_for_the_hub_is_told_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("flowspec.model.hub.hub_cache", lambda: tmp_path)
    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: False)
    tell_of_hub("owner/name/file.gguf")
    assert capsys.readouterr().err.startswith("(asking the hub for owner/name/file.gguf;")
    (tmp_path / "models--owner--name").mkdir()
    for name in ("owner/name/file.gguf", "bundled", "ngram", str(tmp_path), *NO_HUB_IDS):
        tell_of_hub(name)
    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: True)
    tell_of_hub("owner/other")
    assert capsys.readouterr().err == ""


def test_a_message_of_a_chat_is_broken_but_not_inside_a_command() -> None:
    command = "flowspec keygen --cluster a-folder/with/a/long/name/cluster.toml --device pi-4"
    ours, theirs = os.openpty()
    try:
        with os.fdopen(theirs, "w") as stream:
            console = PlainConsole(file=stream, force_terminal=True, color_system=None, width=80)
            console.message(f"the device pi-4 has no key of its own here yet: {command}", "red")
            stream.flush()
            lines = os.read(ours, 4096).decode().splitlines()
    finally:
        os.close(ours)
    assert [line.strip() for line in lines] == ["the device pi-4 has no key of its own here yet:", command]


def test_a_note_stands_on_a_line_of_its_own_and_nothing_is_blank(tmp_path: Path) -> None:
    script = (
        "from flowspec.cli.terminal import note, show\n"
        "note('(first)')\nshow('some')\nnote('(lost)')\nshow(' text')\nshow('\\n')\nnote('(last)')\n"
    )
    both = warm.run(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert both.stdout == "(first)\nsome\n(lost)\n text\n(last)\n"
    apart = warm.run(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert (apart.stdout, apart.stderr) == ("some text\n", "(first)\n(lost)\n(last)\n")


def test_a_terminal_gets_the_words_of_an_answer_whole() -> None:
    flags = ["generate", "Tell me a long story about a cat", "--local=1", "--temperature=0"]
    found = seen(["-m", "flowspec.cli.main", *flags]).replace("\r\n", "\n")
    plain = warm.run(
        [sys.executable, "-m", "flowspec.cli.main", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    words, shown = plain.stdout.split(), found.split()
    assert shown[: len(words)] == words
    assert max(map(len, plain.stdout.splitlines())) > 80, "it has to be broken"
    assert max(map(len, found.splitlines()[:3])) < 80


def test_what_a_script_shows_is_broken_between_words() -> None:
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    text = "pi-1: FAILED: the daemon ended: without keys this daemon does not listen\n"
    command = [sys.executable, "-m", "flowspec.cli.terminal"]
    subprocess.run(command, input=text.encode(), stdout=theirs, timeout=60, check=True)
    os.close(theirs)
    shown = os.read(ours, 4096).decode()
    os.close(ours)
    assert shown.splitlines() == [
        "pi-1: FAILED: the daemon ended: without",
        "  keys this daemon does not listen",
    ]
