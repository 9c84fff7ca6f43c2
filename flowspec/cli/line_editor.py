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
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import DummyHistory, FileHistory, History
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.layout.processors import TabsProcessor
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.patch_stdout import StdoutProxy
from prompt_toolkit.shortcuts import CompleteStyle
from prompt_toolkit.utils import is_dumb_terminal

from flowspec.cli.terminal import TypedInterrupt, note
from flowspec.folders import OWN_BYTES_MAX, read_regular

HISTORY_BYTES_MAX = 1 << 20


class PrivateHistory(FileHistory):
    """Lines from chat to chat, in a file that its owner alone can read. Where it cannot be written, that is
    told once."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        path.chmod(0o600)
        super().__init__(path)
        typed = read_regular(path, OWN_BYTES_MAX)  # as `FileHistory` does, which would wait for a pipe
        if len(typed) > HISTORY_BYTES_MAX:
            path.write_bytes(typed[-HISTORY_BYTES_MAX // 2 :].partition(b"\n\n")[2])
        self._is_broken = False

    def store_string(self, string: str) -> None:
        try:
            if not self._is_broken:
                super().store_string(string)
        except OSError as error:
            self._is_broken = True
            note(f"(what is typed is no longer kept: {error.strerror})")


class CommandCompleter(Completer):
    """Completes commands, and the files of those that take one; `commands` has what each takes."""

    def __init__(self, commands: Mapping[str, str]) -> None:
        self._commands = commands
        self._files = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
        name, space, rest = document.text_before_cursor.partition(" ")
        if space and self._commands.get(name) == "FILE":
            for found in self._files.get_completions(Document(rest), event):
                end = "/" if found.display_text.endswith("/") else ""
                yield Completion(found.text + end, found.start_position, display=found.display)
        elif name.startswith("/") and not space:
            for each, argument in self._commands.items():
                if each.startswith(name):
                    yield Completion(each + (" " if argument else ""), -len(name), display=each)


def history_at(path: Path | None) -> History:
    """The lines typed before; none without a path, or where it cannot be used."""
    try:
        return DummyHistory() if path is None else PrivateHistory(path)
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
    before, quiet = termios.tcgetattr(descriptor), termios.tcgetattr(descriptor)
    quiet[0] &= ~termios.ICRNL  # Enter stays what it is to who reads it
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add(Keys.BracketedPaste)
    def paste(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n".join(event.data.splitlines()))

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
        with contextlib.ExitStack() as stack:
            stack.callback(between_prompts)
            above = stack.enter_context(StdoutProxy())
            if sys.stderr.isatty():
                stack.enter_context(contextlib.redirect_stderr(above))
            return session.prompt()

    with contextlib.ExitStack() as stack:
        stack.callback(end)
        between_prompts()
        stack.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, interrupt))
        session: PromptSession[str] = PromptSession(
            prompt,
            prompt_continuation=" " * len(prompt),
            completer=CommandCompleter(commands),
            complete_style=CompleteStyle.READLINE_LIKE,
            complete_while_typing=False,
            history=history_at(history),
            key_bindings=keys,
            input_processors=[TabsProcessor(char1=" ", char2=" ")],
            enable_suspend=True,
            interrupt_exception=TypedInterrupt,
            output=output,
        )
        yield read
