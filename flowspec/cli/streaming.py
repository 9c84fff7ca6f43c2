"""An answer that streams into a terminal: broken between words, a live line under it, and above it what is
told meanwhile."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
from collections.abc import Callable, Iterator
from os import terminal_size
from types import TracebackType
from typing import TextIO

from rich.cells import cell_len

from flowspec.cli.terminal import broken, end_line, fit_for, show
from flowspec.cli.terminal import terminal_size as current_size

EVERY_S = 0.25
ROWS_MIN = 6
"""A lower terminal has no room for a live line."""
TAB = "    "
BELOW = "\x1bD\x1b[1A"
"""A line down (the screen scrolls where there is none below) and up again: column and text stay."""
SAVE, RESTORE = "\x1b7", "\x1b8"
DOWN = "\x1b[1B\r"
CLEAR_BELOW = "\x1b[J"
CUT, FOLD = "\x1b[?7l", "\x1b[?7h"
"""What a line does that is longer than the terminal is by now."""
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


class WordWrap:
    """Takes pieces of text, gives back what can be printed; a word waits until it is known to end.

    `width` is in cells of the terminal, and may change. `line` is what stands on the last line.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.line = ""
        self._word = ""
        self._gap = ""

    def push(self, text: str) -> str:
        out = []
        for character in text:
            if character.isspace():
                out.append(self._place())
                self._gap += character
            else:
                out.append(self._break_gap())
                if cell_len(self._word + character) > self.width:
                    out.append(self._place())
                self._word += character
        return "".join(out)

    def finish(self) -> str:
        """The last word; white space at the end is dropped."""
        return self._place()

    def break_line(self) -> None:
        """What comes next stands at the beginning of a line, behind a line end that somebody else prints."""
        self.line = ""
        self._gap = self._gap.lstrip(" ")

    def _break_gap(self) -> str:
        """White space before a word: line ends are kept, and the rest waits for the word's length."""
        lines, newline, spaces = self._gap.rpartition("\n")
        if not newline:
            return ""
        self._gap, self.line = spaces, ""
        return lines + newline

    def _place(self) -> str:
        if not self._word:
            return ""
        placed = self._gap + self._word
        if cell_len(self.line + placed) <= self.width:
            self.line += placed
        else:
            placed = "\n" + self._word if self.line else self._word
            self.line = self._word
        self._word, self._gap = "", ""
        return placed


class AnswerView:
    """Shows what `show` gets, each piece where the last one ended, until its end; and `live()`, if there is
    one, on a line under it.

    The live line is drawn below the cursor and the cursor put back, so the text above needs to know nothing
    of it. A terminal may be resized at any time: nothing here relies on where a row was, and a line of text
    is only written again while it is known to stand on one row. One lock orders the text, what other threads
    tell, and the live line.
    """

    def __init__(
        self, stream: TextIO, size: Callable[[], terminal_size], live: Callable[[], str] | None = None
    ) -> None:
        self._stream = stream
        self._size = size
        self._live = live
        self._wrap = WordWrap(self._width())
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live line", daemon=True)
        self._is_drawn = False

    def __enter__(self) -> AnswerView:
        if self._live is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Takes the live line away; the cursor stands below the text."""
        self._stop.set()
        if self._live is not None:
            self._thread.join()
        with self._lock:
            self._write(self._cleared() + self._wrap.finish() + ("\n" if self._wrap.line else ""))

    def show(self, text: str) -> None:
        """Goes on with the text."""
        with self._lock:
            self._wrap.width = self._width()
            if placed := self._wrap.push(text.replace("\t", TAB)):
                self._write(self._cleared() + placed + self._drawn())

    def above(self, lines: str) -> None:
        """Prints whole lines above the one on which the text stands."""
        with self._lock:
            line = self._wrap.line
            if cell_len(line) <= self._width():
                begin = f"\r{CLEAR_BELOW}"
            else:  # the terminal is narrower now: that line may stand on several rows
                begin, line = "\n", ""
                self._wrap.break_line()
            self._write(self._cleared() + begin + lines + line + self._drawn())

    def _width(self) -> int:
        """Without the last column: a cursor behind it is not the same for all terminals."""
        return max(1, self._size().columns - 1)

    def _run(self) -> None:
        while not self._stop.wait(EVERY_S):
            with self._lock:
                self._write(self._cleared() + self._drawn())

    def _cleared(self) -> str:
        text = f"{BELOW}{SAVE}{DOWN}{CLEAR_BELOW}{RESTORE}" if self._is_drawn else ""
        self._is_drawn = False
        return text

    def _drawn(self) -> str:
        if self._live is None or self._stop.is_set() or self._size().lines < ROWS_MIN:
            return ""
        self._is_drawn = True
        return f"{BELOW}{SAVE}{DOWN}{CUT}{DIM}{self._live()}{PLAIN}{FOLD}{RESTORE}"

    def _write(self, text: str) -> None:
        if text:
            self._stream.write(text)
            self._stream.flush()


class LinesAbove(io.TextIOBase):
    """In the place of a stream that is a terminal: hands on whole lines, broken between words."""

    def __init__(self, write: Callable[[str], object], size: Callable[[], terminal_size]) -> None:
        self._hand_on = write
        self._size = size
        self._begun = ""
        self._lock = threading.Lock()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._lock:
            whole, newline, self._begun = (self._begun + text).rpartition("\n")
            lines = whole.split("\n") if newline else []
        if lines:
            self._hand_on("".join(broken(line, self._size().columns - 1) + "\n" for line in lines))
        return len(text)


@contextlib.contextmanager
def answer_shown(live: Callable[[], str] | None = None) -> Iterator[Callable[[str], None]]:
    """Gives what shows a piece of an answer on standard output: in a terminal its words are whole, with
    `live()` under them, and a pipe gets the text as it is. When it has ended, the cursor is below it."""
    if sys.stdout.isatty():
        with (
            AnswerView(sys.stdout, current_size, live) as view,
            told_above(view.above, current_size),
        ):
            yield lambda text: view.show(fit_for(sys.stdout, text))
        return
    try:
        yield show
    except BaseException:  # also Ctrl-C: what is printed next begins a line
        end_line()
        raise
    show("\n")


def told_above(
    write: Callable[[str], object], size: Callable[[], terminal_size]
) -> contextlib.AbstractContextManager[object]:
    """Has lines on standard error go to `write`, if that is a terminal: then it is the one with the text."""
    if not sys.stderr.isatty():
        return contextlib.nullcontext()
    return contextlib.redirect_stderr(LinesAbove(write, size))
