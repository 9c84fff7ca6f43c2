"""Breaks streaming text between words at the width of the terminal."""

from __future__ import annotations


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
