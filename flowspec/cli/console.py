"""What Rich draws for the commands: text without the control characters of others, and how far loading is."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
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

from flowspec.cli.terminal import broken_for, note
from flowspec.cli.visible import visible
from flowspec.runtime.pipeline_connections import Progress as ProgressCall

STARTING = "starting; loading the model takes a while"
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
    """Who is waited for, as while a model is loaded: whatever does something and is not ready. Knows no
    clock."""

    def __init__(self, began_s: float, what: str = "loading") -> None:
        self._what = what
        self.doing: dict[str, tuple[str, float]] = {}
        self._began_s = self._told_s = began_s
        self._told: list[str] = []

    def take(self, text: str, share: float) -> None:
        """As a `Progress`."""
        device = text.rpartition(":")[0]
        if share < 1:
            self.doing[device] = text, share
        else:
            self.doing.pop(device, None)

    def line(self, now_s: float) -> str:
        """What is to be told now where no bar shows it, or nothing: after a while each step, and now and
        then that it goes on."""
        texts = [text for text, _ in self.doing.values()]
        since_s = now_s - self._told_s
        is_new = texts != self._told and since_s >= LINES_APART_S
        if now_s - self._began_s < LINE_EVERY_S or not (is_new or since_s >= LINE_EVERY_S):
            return ""
        self._told_s, self._told = now_s, texts
        shown = [f"{text}{f' {share:.0%}' if share else ''}" for text, share in self.doing.values()]
        more = [f"and {len(shown) - SHOWN_MAX} more"] if len(shown) > SHOWN_MAX else []
        who = "; ".join([*shown[:SHOWN_MAX], *more]) or NOBODY
        return f"(still {self._what} after {now_s - self._began_s:.0f} s: {who})"


@contextlib.contextmanager
def _lines(what: str, before: Callable[[], None] = lambda: None) -> Iterator[ProgressCall]:
    """Tells in lines who is waited for, by a thread of its own, and calls `before` first."""
    waiting, lock, over = Waiting(time.monotonic(), what), threading.Lock(), threading.Event()

    def watch() -> None:
        while not over.wait(LOOK_S):
            with lock:
                line = waiting.line(time.monotonic())
            if line:
                before()
                note(line)

    def take(text: str, share: float) -> None:
        with lock:
            waiting.take(text, share)

    thread = threading.Thread(target=watch, name="what is waited for", daemon=True)
    thread.start()
    try:
        yield take
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def loading_bar(
    *, quiet: bool, is_logged: bool = False, before: Callable[[], None] = lambda: None
) -> Iterator[ProgressCall]:
    """Shows who is waited for, and how far they have come with their layers, on standard error: by bars on a
    terminal, elsewhere in lines, after one that it begins if it `is_logged`, and after what `before` tells.
    """
    console = Console(stderr=True)
    if quiet:
        yield lambda text, share: None
        return
    if not console.is_terminal:
        if is_logged:
            note(f"({STARTING})")
        with _lines("loading", before) as take:
            yield take
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(BAR_CELLS),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        waiting, lock, over = Waiting(time.monotonic()), threading.Lock(), threading.Event()
        tasks: dict[str, TaskID] = {}

        def draw() -> None:
            shown = dict(waiting.doing.values()) or {NOBODY: 0.0}
            for text in tasks.keys() - shown.keys():
                bar.remove_task(tasks.pop(text))
            for text, share in shown.items():
                if text not in tasks:  # with a clock of its own: each step begins anew
                    tasks[text] = bar.add_task(text, total=None)
                bar.update(tasks[text], total=1.0 if share else None, completed=share)

        def show(text: str, share: float) -> None:
            with lock:
                waiting.take(text, share)
                if not over.is_set():
                    draw()

        draw()
        try:
            yield show
        finally:
            over.set()


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
