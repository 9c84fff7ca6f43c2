"""What Rich draws for the commands: text without the control characters of others, and how far loading is."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
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


def _take(doing: dict[str, tuple[str, float]], text: str, share: float) -> None:
    """Writes down what a device does, in the form of a `Progress`, until it is ready."""
    device = text.rpartition(":")[0]
    if share < 1:
        doing[device] = text, share
    else:
        doing.pop(device, None)


@contextlib.contextmanager
def _lines(what: str) -> Iterator[ProgressCall]:
    """Tells in lines who is waited for: after a while each step, and now and then that it goes on."""
    doing: dict[str, tuple[str, float]] = {}
    over = threading.Event()

    def watch() -> None:
        began_s = told_s = time.monotonic()
        told: list[str] = []
        while not over.wait(LOOK_S):
            now_s, now = time.monotonic(), list(doing.values())
            texts = [text for text, _ in now]
            is_step = texts != told and now_s - told_s >= LINES_APART_S
            if now_s - began_s < LINE_EVERY_S or not (is_step or now_s - told_s >= LINE_EVERY_S):
                continue
            told_s, told = now_s, texts
            shown = [f"{text}{f' {share:.0%}' if share else ''}" for text, share in now]
            more = [f"and {len(shown) - SHOWN_MAX} more"] if len(shown) > SHOWN_MAX else []
            who = "; ".join([*shown[:SHOWN_MAX], *more]) or NOBODY
            note(f"(still {what} after {now_s - began_s:.0f} s: {who})")

    thread = threading.Thread(target=watch, name="what is waited for", daemon=True)
    thread.start()
    try:
        yield partial(_take, doing)
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
        return
    if not console.is_terminal:
        with _lines("loading") as take:
            yield take
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(BAR_CELLS),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    doing: dict[str, tuple[str, float]] = {}
    tasks: dict[str, TaskID] = {}
    lock = threading.Lock()
    with Progress(*columns, console=console, transient=True) as bar:

        def show(text: str, share: float) -> None:
            with lock:
                _take(doing, text, share)
                shown = dict(doing.values()) or {NOBODY: 0.0}
                for text in tasks.keys() - shown.keys():
                    bar.remove_task(tasks.pop(text))
                for text, share in shown.items():
                    if text not in tasks:  # with a clock of its own: each step begins anew
                        tasks[text] = bar.add_task(text, total=None)
                    bar.update(tasks[text], total=1.0 if share else None, completed=share)

        show("", 1.0)
        yield show


@contextlib.contextmanager
def working(text: str, *, quiet: bool) -> Iterator[None]:
    """Shows what is under way, and for how long, on standard error: at once on a terminal, elsewhere now and
    then in a line."""
    console = Console(stderr=True)
    if not quiet and not console.is_terminal:
        with _lines("at it") as take:
            take(text, 0.0)
            yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet) as bar:
        bar.add_task(text, total=None)
        yield
