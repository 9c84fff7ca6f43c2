"""What long work shows at a terminal: how far it is, and its tables."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

LINE_EVERY_S = 60.0
"""How often progress is told where no terminal shows a bar."""
Step = Callable[[str], None]
"""Called once for each piece of work that is done, with what comes next."""


@contextlib.contextmanager
def progress(text: str, total: int) -> Iterator[Step]:
    """On standard error, a bar where that is a terminal, else now and then a line."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(text, total=total)
        done, told_s = 0, time.monotonic()

        def step(name: str) -> None:
            nonlocal done, told_s
            done += 1
            bar.update(task, advance=1, description=name)
            if bar.disable and time.monotonic() - told_s >= LINE_EVERY_S:
                told_s = time.monotonic()
                print(f"{name} ({done} of {total})", file=sys.stderr, flush=True)

        yield step


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A title and its table, whose first column is text and whose others are numbers."""
    print(f"\n{title}")
    table = Table(box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_text(value) for value in row))
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
