"""A small terminal: just the control sequences that the live line uses, with a line that wraps only at its
next character, as terminals do."""

from __future__ import annotations

import re

SEQUENCE = re.compile(r"\x1b(?:\[(\d*)([ABCJKm])|([D78]))")


class Terminal:
    """`rows` show what is on the screen; what scrolled out of it is in `past`."""

    def __init__(self, columns: int, lines: int) -> None:
        self.columns, self.lines = columns, lines
        self.rows = [""] * lines
        self.past: list[str] = []
        self.row = self.column = 0
        self._saved = (0, 0)

    def write(self, text: str) -> int:
        at = 0
        while at < len(text):
            if text[at] == "\x1b":
                match = SEQUENCE.match(text, at)
                assert match is not None, f"an unknown sequence: {text[at : at + 8]!r}"
                self._control(*match.groups())
                at = match.end()
            else:
                self._character(text[at])
                at += 1
        return len(text)

    def flush(self) -> None:
        pass

    @property
    def whole(self) -> list[str]:
        """All lines with something on them."""
        return [row.rstrip() for row in (*self.past, *self.rows) if row.strip()]

    def _character(self, letter: str) -> None:
        if letter == "\n":
            self.column = 0
            self._down()
        elif letter == "\r":
            self.column = 0
        else:
            assert letter.isprintable(), f"{letter!r} is printed"
            if self.column == self.columns:
                self.column = 0
                self._down()
            row = self.rows[self.row].ljust(self.column)
            self.rows[self.row] = row[: self.column] + letter + row[self.column + 1 :]
            self.column += 1

    def _down(self) -> None:
        if self.row == self.lines - 1:
            self.past.append(self.rows.pop(0))
            self.rows.append("")
        else:
            self.row += 1

    def _control(self, count: str | None, name: str | None, single: str | None) -> None:
        number = int(count or 1)
        if single == "D":
            self._down()
        elif single == "7":
            self._saved = (self.row, self.column)
        elif single == "8":
            self.row, self.column = self._saved
        elif name == "A":
            self.row = max(0, self.row - number)
        elif name == "B":
            self.row = min(self.lines - 1, self.row + number)
        elif name == "J":
            self.rows[self.row] = self.rows[self.row][: self.column]
            for below in range(self.row + 1, self.lines):
                self.rows[below] = ""
