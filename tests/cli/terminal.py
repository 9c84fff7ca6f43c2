"""A terminal for tests: a screen (pyte's) that can be resized as real ones are, and a command that runs in
it."""

from __future__ import annotations

import fcntl
import os
import struct
import sys
import termios
import threading
from collections.abc import Callable
from types import TracebackType

import psutil
import pyte
from pyte.screens import Char

from tests import warm

WAIT_S = 90.0
IN_TERMINAL = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from flowspec.cli.main import main
sys.exit(main())
"""
"""The command in a session whose terminal is its standard input: it hears Ctrl-C and resizing."""


class Terminal(pyte.Screen):
    """A screen, and in `past` what scrolled out of it. A narrower one reflows its lines, as most terminals
    do."""

    def __init__(self, columns: int, lines: int) -> None:
        self.past: list[dict[int, Char]] = []
        self._is_drawing = False
        super().__init__(columns, lines)
        self.set_mode(pyte.modes.LNM)  # as the kernel does: a line end begins a line
        self._stream = pyte.Stream(self)

    def write(self, text: str) -> int:
        self._stream.feed(text)
        return len(text)

    def flush(self) -> None:
        pass

    @property
    def rows(self) -> list[str]:
        return [row.rstrip() for row in self.display]

    @property
    def whole(self) -> list[str]:
        """All rows with something on them, those that scrolled out, too."""
        past = ["".join(row[at].data for at in range(max(row, default=-1) + 1)).rstrip() for row in self.past]
        return [row for row in (*past, *self.rows) if row]

    @property
    def text(self) -> str:
        """All of it, as words with one space between."""
        return " ".join(" ".join(self.whole).split())

    def draw(self, data: str) -> None:
        self._is_drawing = True
        super().draw(data)
        self._is_drawing = False

    def linefeed(self) -> None:
        self.buffer[self.cursor.y].goes_on = self._is_drawing
        super().linefeed()

    def index(self) -> None:
        if self.cursor.y == self.lines - 1:
            self.past.append(self.buffer[0])
        super().index()

    def resize(self, lines: int | None = None, columns: int | None = None) -> None:
        lines, columns = lines or self.lines, columns or self.columns
        here = len(self.past) + self.cursor.y
        rows = [*self.past, *(self.buffer[at] for at in range(self.lines))]
        while len(rows) > here + 1 and not rows[-1]:
            rows.pop()
        texts: list[list[Char]] = [[]]
        for number, row in enumerate(rows):
            if number == here:
                cursor = (len(texts) - 1, len(texts[-1]) + self.cursor.x)
            texts[-1] += [row[at] for at in range(max(row, default=-1) + 1)]
            if not getattr(row, "goes_on", False):
                while texts[-1] and texts[-1][-1].data == " ":
                    texts[-1].pop()
                texts.append([])
        laid = []
        for number, text in enumerate(texts[:-1] if not texts[-1] else texts):
            if number == cursor[0]:
                y, x = divmod(cursor[1], columns)
                if y and not x:  # it stays behind the last letter of a full row
                    y, x = y - 1, columns
                y += len(laid)
            for begin in range(0, max(len(text), 1), columns):
                row = type(self.buffer[0])(self.default_char)
                row.update(enumerate(text[begin : begin + columns]))
                row.goes_on = begin + columns < len(text)
                laid.append(row)
        out = max(0, max(len(laid), y + 1) - lines)
        self.past = laid[:out]
        self.cursor.y, self.cursor.x = y - out, x
        self.buffer.clear()
        self.buffer.update(enumerate(laid[out:]))
        self.lines, self.columns = lines, columns


class Window:
    """A `flowspec` command in a terminal, and a person before it."""

    def __init__(
        self,
        *arguments: str,
        columns: int = 80,
        lines: int = 24,
    ) -> None:
        self.screen = Terminal(columns, lines)
        self.ours, theirs = os.openpty()
        self._size(columns, lines)
        streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
        known = {"TERM": "xterm-256color", "LANG": "C.UTF-8", "COLUMNS": "", "LINES": ""}
        self.process = warm.Popen(
            [sys.executable, "-c", IN_TERMINAL, *arguments],
            env={**os.environ, **known},
            start_new_session=True,
            **streams,
        )
        os.close(theirs)
        self._changed = threading.Condition()
        self._has_ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Window:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            family = psutil.Process(self.process.pid).children(recursive=True)
            self.process.kill()
            psutil.wait_procs(family, timeout=20)
        self.process.wait(timeout=20)
        self._reader.join(timeout=20)
        os.close(self.ours)

    def type(self, text: str) -> None:
        os.write(self.ours, text.encode())

    def paste(self, text: str) -> None:
        """As a terminal does that was asked to mark what is pasted: its line ends are those of Enter."""
        self.type("\x1b[200~" + text.replace("\n", "\r") + "\x1b[201~")

    def resize(self, columns: int, lines: int) -> None:
        with self._changed:
            self.screen.resize(lines, columns)
            self._size(columns, lines)

    def until(self, what: str | Callable[[Terminal], object]) -> None:
        """Waits until a text, or something else, is to be seen."""

        def is_there() -> bool:
            return bool(what in self.screen.text if isinstance(what, str) else what(self.screen))

        with self._changed:
            self._changed.wait_for(lambda: is_there() or self._has_ended, WAIT_S)
            assert is_there(), f"waited for {what!r}, saw\n" + "\n".join(self.screen.whole)

    def ended(self) -> int:
        """Waits for the end; the exit status."""
        status = self.process.wait(timeout=WAIT_S)
        self._reader.join(timeout=WAIT_S)
        return status

    def _size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def _read(self) -> None:
        decode = pyte.ByteStream(self.screen)
        while True:
            try:
                found = os.read(self.ours, 65536)
            except OSError:  # the other end is closed
                found = b""
            with self._changed:
                decode.feed(found)
                self._has_ended = not found
                self._changed.notify_all()
                if not found:
                    return
