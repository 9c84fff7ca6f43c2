"""Typing at a chat's prompt: lines are edited, recalled and completed, and what is pasted is one line of the
dialogue, whatever it holds.

From beginning to end the terminal shows nothing of what is typed while no line is asked for: it is kept for
the next line. Ctrl-C drops it, and so does the end, or a shell would run it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import DummyHistory, FileHistory, History
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.layout.processors import TabsProcessor
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.patch_stdout import StdoutProxy
from prompt_toolkit.shortcuts import CompleteStyle
from prompt_toolkit.utils import is_dumb_terminal

from flowspec.cli.streaming import errors_to
from flowspec.cli.terminal import TypedInterrupt, note
from flowspec.folders import OWN_BYTES_MAX, read_regular

HISTORY_BYTES_MAX = 1 << 20
CHILDREN_END_S = 2.0
"""So long a process that is started here may still write after the end."""


class PrivateHistory(FileHistory):
    """Lines from chat to chat, in a file that its owner alone can read. Where it cannot be written, that is
    told once."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        path.chmod(0o600)
        super().__init__(path)
        kept = read_regular(path, OWN_BYTES_MAX)  # as `FileHistory` does, which would wait for a pipe
        if len(kept) > HISTORY_BYTES_MAX:
            path.write_bytes(kept[-HISTORY_BYTES_MAX // 2 :].partition(b"\n\n")[2])
        self._is_kept = True

    def store_string(self, string: str) -> None:
        if not self._is_kept:
            return
        try:
            super().store_string(string)
        except OSError as error:
            self._is_kept = False
            note(f"(what is typed is no longer kept: {error.strerror})")


class CommandCompleter(Completer):
    """Completes commands, and the files of those that take one."""

    def __init__(self, commands: Mapping[str, str]) -> None:
        self._commands = commands
        self._files = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
        name, space, rest = document.text_before_cursor.partition(" ")
        if not name.startswith("/"):
            return
        if not space:
            for each, argument in self._commands.items():
                if each.startswith(name):
                    yield Completion(each + (" " if argument else ""), -len(name), display=each)
        elif self._commands.get(name) == "FILE":
            for found in self._files.get_completions(Document(rest), event):
                end = "/" if found.display_text.endswith("/") else ""
                yield Completion(found.text + end, found.start_position, display=found.display)


def key_bindings() -> KeyBindings:
    """Enter ends what is typed, Alt-Enter begins another line of it, and a paste ends nothing."""
    keys = KeyBindings()

    @keys.add("enter", filter=has_focus(DEFAULT_BUFFER))
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=has_focus(DEFAULT_BUFFER))
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add(Keys.BracketedPaste, filter=has_focus(DEFAULT_BUFFER))
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n".join(event.data.splitlines()))

    return keys


def history_at(path: Path | None) -> History:
    """The lines typed before; none without a path, or where it cannot be used."""
    if path is None:
        return DummyHistory()
    try:
        return PrivateHistory(path)
    except OSError as error:
        note(f"(what is typed is not kept: {path}: {error.strerror})")
        return DummyHistory()


@contextlib.contextmanager
def line_editor(
    prompt: str, commands: Mapping[str, str], history: Path | None
) -> Iterator[Callable[[], str]]:
    """Gives what reads a line from the terminal, which is both standard input and output.

    It raises `EOFError` after Ctrl-D, `TypedInterrupt` after Ctrl-C. `commands` has what each takes.
    """
    output = None  # a dumb terminal knows no control sequences
    if not is_dumb_terminal():
        output = Vt100_Output.from_pty(sys.stdout, term=os.environ.get("TERM"))
        output.enable_cpr = False  # where the cursor is: nothing here needs it, and not all terminals answer
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    quiet = termios.tcgetattr(descriptor)
    quiet[0] &= ~termios.ICRNL  # Enter stays what it is to who reads it
    quiet[3] &= ~(termios.ECHO | termios.ICANON)

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise TypedInterrupt

    def between_prompts() -> None:
        """Hides what is typed, and has the terminal mark what is pasted, which may be during an answer."""
        termios.tcsetattr(descriptor, termios.TCSANOW, quiet)
        if output is not None:
            output.enable_bracketed_paste()
            output.flush()

    def end() -> None:
        if output is not None:
            output.disable_bracketed_paste()
            output.flush()
        termios.tcsetattr(descriptor, termios.TCSAFLUSH, before)

    def read() -> str:
        try:
            with StdoutProxy() as above, errors_to(above):
                return session.prompt()
        finally:
            between_prompts()

    with contextlib.ExitStack() as stack:
        stack.enter_context(note_child_lines())
        stack.callback(end)
        between_prompts()
        stack.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, interrupt))
        session: PromptSession[str] = PromptSession(
            prompt,
            multiline=True,
            completer=CommandCompleter(commands),
            complete_style=CompleteStyle.READLINE_LIKE,
            complete_while_typing=False,
            history=history_at(history),
            key_bindings=key_bindings(),
            input_processors=[TabsProcessor(char1=" ", char2=" ")],
            enable_suspend=True,
            interrupt_exception=TypedInterrupt,
            output=output,
        )
        yield read


@contextlib.contextmanager
def note_child_lines() -> Iterator[None]:
    """Passes on line by line what processes write that are started meanwhile, if standard error is a
    terminal: it stands where this process's own notes do, and not in the middle of what is drawn."""
    before = sys.stderr
    if not before.isatty():
        yield
        return
    descriptor = before.fileno()
    terminal = os.dup(descriptor)
    reading, writing = os.pipe()
    os.dup2(writing, descriptor)
    os.close(writing)

    def pass_on() -> None:
        with open(reading, encoding="utf-8", errors="backslashreplace") as lines:
            for line in lines:
                note(line.rstrip("\n"))

    passing = threading.Thread(target=pass_on, name="lines of children", daemon=True)
    with open(terminal, "w", buffering=1, encoding=before.encoding, errors=before.errors) as sys.stderr:
        passing.start()
        try:
            yield
        finally:
            os.dup2(terminal, descriptor)
            passing.join(CHILDREN_END_S)
            sys.stderr = before
