"""What a command found: one document for programs (`--json`), tables and notes of it for people."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flowspec.cli.terminal import broken_for, fit_for, terminal_size
from flowspec.rounding import rounded

PLAIN_WIDTH = 140
"""Of tables that go to a file or another program, unless `COLUMNS` says it."""
GAP = 2
"""Between the columns of a table."""
Columns = Mapping[str, str | Callable[[Any], Any]]
"""By heading, what is shown of a row: the value of a key, or what a function makes of the row."""


class Result:
    """What a command found: the `document` is its JSON object, notes and tables are shown in the order in
    which they are added."""

    def __init__(self, document: Any = None) -> None:
        self.document = document
        self._parts: list[Text | Table] = []

    def note(self, text: str = "", colour: str = "") -> None:
        """Adds a line, broken between words where it is wider than the terminal; with a colour for its first
        word."""
        note = Text(broken_for(sys.stdout, text))
        note.stylize(colour, 0, len(text.partition(" ")[0]))
        self._parts.append(note)

    def table(
        self, columns: Columns | Sequence[str], rows: Sequence[Any], *, title: str = "", texts: int = 1
    ) -> None:
        """Adds a table; under headings alone rows have the values in their order.

        The first `texts` columns stand at the left, the others, which are numbers, at the right. Where the
        table is wider than the terminal it goes on below, with its first column again.
        """
        if isinstance(columns, Mapping):
            values = columns.values()
            rows = [[each(row) if callable(each) else row[each] for each in values] for row in rows]
        lines = [list(columns), *([_text(value) for value in row] for row in rows)]
        if title:
            self.note(f"\n{title}")
        for number, group in enumerate(_groups(lines, _width())):
            if number:
                self.note()
            part = Table(box=None, pad_edge=False)
            for column in group:
                justify, heading = "left" if column < texts else "right", lines[0][column]
                part.add_column(heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
            for line in lines[1:]:
                part.add_row(*(Text(line[column]) for column in group))
            self._parts.append(part)

    def print(self, *, as_json: bool = False) -> None:
        """Prints the document, in which what is no number is null, else all notes and tables."""
        if as_json:
            document = msgspec.json.decode(msgspec.json.encode(self.document, enc_hook=float))
            print(json.dumps(document), flush=True)
            return
        console = Console(width=_width(), highlight=False, markup=False, emoji=False)
        for part in self._parts:
            with console.capture() as shown:
                console.print(part, soft_wrap=isinstance(part, Text))
            print("\n".join(map(str.rstrip, shown.get().splitlines())))  # rich fills the last column
        sys.stdout.flush()


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return rounded(value) if isinstance(value, float) else fit_for(sys.stdout, str(value))


def _width() -> int:
    is_terminal = sys.stdout.isatty()
    return (terminal_size() if is_terminal else shutil.get_terminal_size((PLAIN_WIDTH, 0))).columns


def _groups(lines: Sequence[Sequence[str]], width: int) -> list[list[int]]:
    """Columns that fit beside the first; one that does not even so gets a table of its own, where its texts
    are broken between words."""
    wide = [max(cell_len(line[column]) for line in lines) for column in range(len(lines[0]))]
    groups, used = [[0]], wide[0]
    for column in range(1, len(wide)):
        if used + GAP + wide[column] > width and len(groups[-1]) > 1:
            groups.append([0])
            used = wide[0]
        groups[-1].append(column)
        used += GAP + wide[column]
    return groups
