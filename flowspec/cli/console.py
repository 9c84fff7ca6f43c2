"""What Rich draws for the commands: text without the control characters of others, and how far loading is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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


class PlainConsole(Console):
    """A console that sends no control characters but its own."""

    def print(self, *objects: Any, **options: Any) -> None:
        shown = [visible(each) if isinstance(each, str) and self.is_terminal else each for each in objects]
        super().print(*shown, **options)

    def message(self, text: str, style: str = "") -> None:
        """A message, broken as all of them are: never inside a path or a command to copy."""
        super().print(Text(broken_for(self.file, text), style=style), soft_wrap=True)


@contextlib.contextmanager
def loading_bar(*, quiet: bool, is_logged: bool = False) -> Iterator[ProgressCall]:
    """Shows how far the devices have come with their layers, on standard error while it is a terminal.

    Elsewhere, if it `is_logged`, a line tells each step once."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        told: set[str] = set()

        def tell(text: str, share: float) -> None:
            if text not in told:
                told.add(text)
                note(f"({text})")

        if is_logged and not quiet:
            tell(STARTING, 0)
            yield tell
        else:
            yield lambda text, share: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        tasks: dict[str, TaskID] = {"": progress.add_task("starting", total=None)}

        def show(text: str, share: float) -> None:
            if "" in tasks:
                progress.remove_task(tasks.pop(""))
            device = text.rpartition(":")[0]
            if device not in tasks:
                tasks[device] = progress.add_task(text, total=1.0)
            progress.update(tasks[device], description=text, completed=share)

        yield show


@contextlib.contextmanager
def working(text: str, *, quiet: bool) -> Iterator[None]:
    """Shows what is under way, and for how long, on standard error while it is a terminal."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        bar.add_task(text, total=None)
        yield
