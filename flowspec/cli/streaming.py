"""Text that streams into a terminal: broken between words, and with a live line under it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TextIO

EVERY_S = 0.25
BELOW = "\x1bD\x1b[1A"
"""A line down (the screen scrolls where there is none below) and up again: column and text stay."""
SAVE, RESTORE = "\x1b7", "\x1b8"
DOWN = "\x1b[1B\r"
CLEAR_BELOW = "\x1b[J"
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


class WordWrap:
    """Takes pieces of text, gives back what can be printed; a word waits until it is known to end.

    `width` 0 passes everything on as it is, as for output that is not a terminal.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._column = 0
        self._word = ""
        self._gap = ""

    def push(self, text: str) -> str:
        if not self._width:
            return text
        out = []
        for character in text:
            if character.isspace():
                out.append(self._place())
                self._gap += character
            else:
                out.append(self._break_gap())
                self._word += character
                if len(self._word) >= self._width:
                    out.append(self._place())
        return "".join(out)

    def finish(self) -> str:
        """The last word; white space at the end is dropped."""
        return self._place() if self._width else ""

    def _break_gap(self) -> str:
        """White space before a word: line ends are kept, and the rest waits for the word's length."""
        lines, newline, spaces = self._gap.rpartition("\n")
        if not newline:
            return ""
        self._gap, self._column = spaces, 0
        return lines + newline

    def _place(self) -> str:
        if not self._word:
            return ""
        if self._column and self._column + len(self._gap) + len(self._word) > self._width:
            placed, self._column = "\n" + self._word, len(self._word)
        else:
            placed = self._gap + self._word
            self._column += len(placed)
        self._word, self._gap = "", ""
        return placed


class Strip:
    """Shows `line()` under what `show` prints, from `start` to `stop`; the line must be narrower than the
    terminal.

    It is drawn below the cursor and the cursor put back, so the text above needs to know nothing of it: it
    goes on where it was. One lock orders the text, notes of other threads, and the line's own updates.
    """

    def __init__(self, stream: TextIO, line: Callable[[], str]) -> None:
        self._stream = stream
        self._line = line
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="strip", daemon=True)
        self._is_drawn = False

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Takes the line away; the cursor stands behind the text."""
        self._stop.set()
        self._thread.join()
        with self._lock:
            self._write(self._cleared())

    def show(self, text: str) -> None:
        """Prints text where the last one ended."""
        with self._lock:
            self._write(self._cleared() + text + self._drawn())

    def aside(self, tell: Callable[[], None]) -> None:
        """Has somebody else print whole lines."""
        with self._lock:
            self._write(self._cleared())
            tell()
            self._write(self._drawn())

    def _run(self) -> None:
        while not self._stop.wait(EVERY_S):
            with self._lock:
                self._write(self._cleared() + self._drawn())

    def _cleared(self) -> str:
        text = f"{SAVE}{DOWN}{CLEAR_BELOW}{RESTORE}" if self._is_drawn else ""
        self._is_drawn = False
        return text

    def _drawn(self) -> str:
        if self._stop.is_set():
            return ""
        self._is_drawn = True
        return f"{BELOW}{SAVE}{DOWN}{DIM}{self._line()}{PLAIN}{RESTORE}"

    def _write(self, text: str) -> None:
        if text:
            self._stream.write(text)
            self._stream.flush()
