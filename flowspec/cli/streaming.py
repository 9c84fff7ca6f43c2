"""An answer that streams into a terminal: broken between words, a live line under it, and above it what is
told meanwhile."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import threading
from collections.abc import Callable, Iterator
from os import terminal_size
from typing import Any, TextIO

from rich.cells import cell_len

from flowspec.cli.terminal import end_line, fit_for, show
from flowspec.cli.terminal import terminal_size as current_size

EVERY_S = 0.25
ROWS_MIN = 6
"""A lower terminal has no room for a live line."""
TAB = "    "
CLEAR_BELOW = "\x1b[J"
BELOW = "\x1bD\x1b[1A\x1b7\x1b[1B\r{}\x1b8"
"""Something on the line below (the screen scrolls where there is none): column and text stay."""
LIVE = "\x1b[?7l\x1b[2m{}\x1b[0m\x1b[?7h"
"""A dim line, cut off where the terminal is narrower by now."""


class WordWrap:
    """Takes pieces of text, gives back what can be printed; a word waits until it is known to end.

    `width` is in cells of the terminal, and may change. `line` is what stands on the last line.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.line = ""
        self._held = ""
        """White space, and the beginning of a word."""

    def push(self, text: str, *, is_last: bool = False) -> str:
        """White space at the end is dropped."""
        out = gap = ""
        parts = [part for part in re.findall(r"\s+|\S+", self._held + text) for part in self._fitting(part)]
        last = parts.pop() if parts and not parts[-1].isspace() and not is_last else ""
        for part in parts:
            if part.isspace():
                gap = part
            else:
                out += self._place(gap, part)
                gap = ""
        self._held = gap + last
        return out

    def break_line(self) -> None:
        """What comes next stands at the beginning of a line, behind a line end that somebody else prints."""
        self.line = ""
        self._held = self._held.lstrip(" ")

    def _fitting(self, part: str) -> list[str]:
        """White space, or a word in pieces that fit a line."""
        pieces = [""]
        for character in part:
            if pieces[-1] and not part.isspace() and cell_len(pieces[-1] + character) > self.width:
                pieces.append("")
            pieces[-1] += character
        return pieces

    def _place(self, gap: str, word: str) -> str:
        """A word behind white space, of which line ends stay, and blanks where the line goes on."""
        lines, newline, blanks = gap.rpartition("\n")
        if newline:
            self.line = ""
        if cell_len(self.line + blanks + word) > self.width:
            blanks = "\n" if self.line else ""
            self.line = ""
        self.line += blanks.lstrip("\n") + word
        return lines + newline + blanks + word


class AnswerView(io.TextIOBase):
    """Shows what `show` gets, each piece where the last one ended, until its end; `live()`, if there is one,
    on a line under it; and above it whole lines that are written, as to standard error.

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
        self._begun = ""
        """Of a line that is written."""

    def __enter__(self) -> AnswerView:
        if self._live is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Takes the live line away; the cursor stands below the text."""
        self._stop.set()
        if self._live is not None:
            self._thread.join()
        with self._lock:
            self._draw(self._wrap.push("", is_last=True) + ("\n" if self._wrap.line else ""))

    def show(self, text: str) -> None:
        """Goes on with the text."""
        with self._lock:
            self._wrap.width = self._width()
            if placed := self._wrap.push(text.replace("\t", TAB)):
                self._draw(placed)

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        """Prints whole lines above the one on which the text stands."""
        with self._lock:
            lines, newline, self._begun = (self._begun + text).rpartition("\n")
            if newline and cell_len(self._wrap.line) <= self._width():
                self._draw(f"\r{CLEAR_BELOW}{lines}\n{self._wrap.line}")
            elif newline:  # the terminal is narrower now: that line may stand on several rows
                self._wrap.break_line()
                self._draw(f"\n{lines}\n")
        return len(text)

    def _width(self) -> int:
        """Without the last column: a cursor behind it is not the same for all terminals."""
        return max(1, self._size().columns - 1)

    def _run(self) -> None:
        while not self._stop.wait(EVERY_S):
            with self._lock:
                self._draw("")

    def _draw(self, text: str) -> None:
        """Writes text in the place of the live line, and that below it."""
        if self._is_drawn:
            text = BELOW.format(CLEAR_BELOW) + text
        has_room = not self._stop.is_set() and self._size().lines >= ROWS_MIN
        live = self._live() if self._live is not None and has_room else None
        if live is not None:
            text += BELOW.format(LIVE.format(live))
        self._is_drawn = live is not None
        self._stream.write(text)
        self._stream.flush()


@contextlib.contextmanager
def show_answer(live: Callable[[], str] | None = None) -> Iterator[Callable[[str], None]]:
    """Gives what shows a piece of an answer on standard output: in a terminal its words are whole, with
    `live()` under them, and a pipe gets the text as it is. When it has ended, the cursor is below it."""
    if sys.stdout.isatty():
        with AnswerView(sys.stdout, current_size, live) as view, errors_to(view):
            yield lambda text: view.show(fit_for(sys.stdout, text))
        return
    try:
        yield show
    except BaseException:  # also Ctrl-C: what is printed next begins a line
        end_line()
        raise
    show("\n")


def errors_to(stream: Any) -> contextlib.AbstractContextManager[object]:
    """Has standard error go to a stream, if it is a terminal: then it is the one with the text."""
    return contextlib.redirect_stderr(stream) if sys.stderr.isatty() else contextlib.nullcontext()
