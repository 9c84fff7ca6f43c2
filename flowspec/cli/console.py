"""What Rich draws for the commands: text without the control characters of others, and how far loading is."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flowspec.cli.terminal import broken_for, note, visible
from flowspec.runtime.pipeline_connections import Progress as ProgressCall

LINE_EVERY_S = 15.0
"""For so long nothing more is told in lines, ..."""
LINES_APART_S = 2.0
"""... then each step, no more often than this."""
LOOK_S = 0.5
SHOWN_MAX = 3
"""Of those that are waited for, in a line."""
BAR_CELLS = 20
NOBODY = "getting the devices ready"
"""What is shown while no device is heard of, or all of those are ready."""


class PlainConsole(Console):
    """A console that sends no control characters but its own."""

    def print(self, *objects: Any, **options: Any) -> None:
        shown = [visible(each) if isinstance(each, str) and self.is_terminal else each for each in objects]
        super().print(*shown, **options)

    def message(self, text: str, style: str = "") -> None:
        """A message, broken as all of them are: never inside a path or a command to copy."""
        super().print(Text(broken_for(self.file, text), style=style), soft_wrap=True)


class Waiting:
    """Who is waited for, as a `Progress`: by device what it does, how far it is with that, and since when."""

    def __init__(self) -> None:
        self.steps: dict[str, tuple[str, float, float]] = {}
        self(NOBODY, 0.0)

    def __call__(self, text: str, share: float) -> None:
        device = text.rpartition(":")[0] or text
        if share < 1:
            before, _, since_s = self.steps.get(device, ("", 0.0, 0.0))
            self.steps[device] = text, share, since_s if before == text else time.monotonic()
        else:
            self.steps.pop(device, None)
        if len(self.steps) > 1:
            self.steps.pop(NOBODY, None)
        elif not self.steps:
            self(NOBODY, 0.0)

    def rows(self) -> Table:
        """A bar for each."""
        table = Table.grid(padding=(0, 1))
        for text, share, since_s in list(self.steps.values()):
            bar = ProgressBar(total=1.0 if share else None, completed=share, width=BAR_CELLS)
            percent = Text(f"{share:>4.0%}" if share else "", "progress.percentage")
            since = timedelta(seconds=int(time.monotonic() - since_s))
            table.add_row(Text(text), bar, percent, Text(str(since), "progress.elapsed"))
        return table


@contextlib.contextmanager
def _lines(what: str) -> Iterator[Waiting]:
    """Tells in lines who is waited for: after a while each step, and now and then that it goes on."""
    waiting, over = Waiting(), threading.Event()

    def watch() -> None:
        began_s = told_s = time.monotonic()
        told: list[str] = []
        while not over.wait(LOOK_S):
            now_s, steps = time.monotonic(), list(waiting.steps.values())
            texts = [text for text, *_ in steps]
            is_step = texts != told and now_s - told_s >= LINES_APART_S
            if now_s - began_s < LINE_EVERY_S or not (is_step or now_s - told_s >= LINE_EVERY_S):
                continue
            told_s, told = now_s, texts
            shown = [f"{text}{f' {share:.0%}' if share else ''}" for text, share, _ in steps]
            more = [f"and {len(shown) - SHOWN_MAX} more"] if len(shown) > SHOWN_MAX else []
            note(f"(still {what} after {now_s - began_s:.0f} s: {'; '.join([*shown[:SHOWN_MAX], *more])})")

    thread = threading.Thread(target=watch, name="what is waited for", daemon=True)
    thread.start()
    try:
        yield waiting
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def loading_bar(*, quiet: bool) -> Iterator[ProgressCall]:
    """Shows who is waited for, and how far they have come with their layers, on standard error: by bars on a
    terminal, elsewhere in lines."""
    console = Console(stderr=True)
    if quiet:
        yield lambda text, share: None
    elif not console.is_terminal:
        with _lines("loading") as waiting:
            yield waiting
    else:
        waiting = Waiting()
        with Live(get_renderable=waiting.rows, console=console, transient=True, refresh_per_second=10):
            yield waiting


@contextlib.contextmanager
def working(text: str, *, quiet: bool) -> Iterator[None]:
    """Shows what is under way, and for how long, on standard error: at once on a terminal, elsewhere now and
    then in a line."""
    console = Console(stderr=True)
    if not quiet and not console.is_terminal:
        with _lines("at it") as waiting:
            waiting(text, 0.0)
            yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet) as bar:
        bar.add_task(text, total=None)
        yield
