"""What long work shows at a terminal: how far it is, and its tables."""

from __future__ import annotations

import contextlib
import math
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress
from rich.table import Table
from rich.text import Text

LINE_EVERY_S = 60.0
"""How often progress is told where no terminal shows a bar."""
PLAIN_WIDTH = 140
"""Of tables that go to a file or another program, unless `COLUMNS` says it."""
GAP = 2
"""Columns between those of a table."""
UNITS = ((1, "s"), (60, "min"), (3600, "h"))
"""Of the time that is left."""
NAME_CHARS = 36
"""Of what is under way, beside the bar in 80 columns."""


class Step(Protocol):
    """Called when so much work is done, with what comes next; without a name that stays as it was."""

    def __call__(self, name: str, count: int = 1, /) -> None: ...


@contextlib.contextmanager
def progress(text: str, total: int, done: int = 0, *, quiet: bool = False) -> Iterator[Step]:
    """On standard error, a bar where that is a terminal, else now and then a line; nothing at all if
    `quiet`."""
    console = Console(stderr=True)
    is_shown = console.is_terminal and not quiet
    columns = "{task.description}", BarColumn(bar_width=None), MofNCompleteColumn(), "{task.fields[left]}"
    with Progress(*columns, console=console, transient=True, expand=True, disable=not is_shown) as bar:
        task = bar.add_task(text, total=total, completed=done, left="")
        name, began = text, done
        started_s = told_s = time.monotonic()

        def step(next_name: str, count: int = 1) -> None:
            nonlocal done, name, told_s
            done += count
            name = next_name or name
            now_s = time.monotonic()
            left = ""
            if done > began:
                left_s = (now_s - started_s) * (total - done) / (done - began)
                size, unit = next((each for each in UNITS if left_s < 90 * each[0]), UNITS[-1])
                left = f"about {math.ceil(left_s / size)} {unit} left"
            short = name if len(name) <= NAME_CHARS else name[: NAME_CHARS - 3] + "..."
            bar.update(task, advance=count, description=short, left=left)
            if not is_shown and not quiet and now_s - told_s >= LINE_EVERY_S:
                told_s = now_s
                far = ", ".join(filter(None, (f"{done} of {total}", left)))
                print(f"{name} ({far})", file=sys.stderr, flush=True)

        yield step


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A title and its table, whose first column is text and whose others are numbers."""
    print(f"\n{title}")
    show_table(columns, [[_text(value) for value in row] for row in rows], numbers_from=1)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def show_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, numbers_from: int | None = None
) -> None:
    """A table of others' texts, as they are; numbers stand at the right.

    Where it is wider than the terminal it goes on below, with its first column again: no word is broken.
    """
    width = None if sys.stdout.isatty() else shutil.get_terminal_size((PLAIN_WIDTH, 0)).columns
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    for index, group in enumerate(_groups([columns, *rows], console.width)):
        table = Table(box=None, pad_edge=False)
        for column in group:
            is_number = numbers_from is not None and column >= numbers_from
            table.add_column(columns[column], justify="right" if is_number else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(row[column]) for column in group))
        if index:
            console.print()
        with console.capture() as shown:
            console.print(table)
        print("\n".join(map(str.rstrip, shown.get().splitlines())))  # rich fills the last column


def _groups(rows: Sequence[Sequence[str]], width: int) -> list[list[int]]:
    """Columns that fit beside the first; one that does not even so gets a table of its own, where its texts
    are broken between words."""
    wide = [max(cell_len(row[column]) for row in rows) for column in range(len(rows[0]))]
    groups, used = [[0]], wide[0]
    for column in range(1, len(wide)):
        if used + GAP + wide[column] > width and len(groups[-1]) > 1:
            groups.append([0])
            used = wide[0]
        groups[-1].append(column)
        used += GAP + wide[column]
    return groups
