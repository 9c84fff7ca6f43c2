"""What long work shows at a terminal: how far it is."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterator
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress

LINE_EVERY_S = 60.0
"""How often progress is told where no terminal shows a bar."""
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
