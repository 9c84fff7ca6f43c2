"""What Rich draws: messages with a style, how far loading is, and an answer as it comes, with a live line
under it and what is said meanwhile above. A pipe gets plain lines."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.control import Control
from rich.live import Live
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.segment import ControlType
from rich.table import Column
from rich.text import Text

from flowspec.cli.terminal import broken_for, end_line, note, show, visible
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
CHILDREN_END_S = 2.0
"""So long a process that is started here may still write after the end."""


class PlainConsole(Console):
    """A console whose messages are broken as all of them are, and have no control characters of others."""

    def message(self, text: str = "", style: str = "") -> None:
        self.print(Text(broken_for(self.file, text), style=style), soft_wrap=True)


# ------------------------------------------------------------------------------------------------- waiting


@contextlib.contextmanager
def _waiting(what: str, *, quiet: bool) -> Iterator[ProgressCall]:
    """Shows who is waited for: by device what it does, how far it is with that, and since when; on standard
    error, by bars on a terminal, elsewhere in lines."""
    console = Console(stderr=True)
    is_drawn = console.is_terminal and not quiet
    columns = (
        TextColumn("{task.description}", markup=False, table_column=Column()),
        *(BarColumn(BAR_CELLS), TaskProgressColumn(), TimeElapsedColumn()),
    )
    steps: dict[str, tuple[TaskID, str]] = {}

    def progress(text: str, share: float) -> None:
        device = text.rpartition(":")[0] or text
        task, before = steps.pop(device, (None, ""))
        if share < 1:
            if task is None:
                task = bar.add_task(text, total=None)
            elif text != before:
                bar.reset(task, description=text)
            bar.update(task, total=1.0 if share else None, completed=share)
            steps[device] = task, text
        elif task is not None:
            bar.remove_task(task)
        bar.update(nobody, visible=not steps)

    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(Progress(*columns, console=console, transient=True, disable=not is_drawn))
        nobody = bar.add_task(NOBODY, total=None)
        if not quiet and not is_drawn:
            over = threading.Event()
            thread = threading.Thread(target=_tell_steps, args=(what, bar, over), daemon=True)
            thread.start()
            stack.callback(thread.join)
            stack.callback(over.set)
        yield progress


def _tell_steps(what: str, bar: Progress, over: threading.Event) -> None:
    """Tells in lines who is waited for: after a while each step, and now and then that it goes on."""
    began_s = told_s = time.monotonic()
    told: list[str] = []
    while not over.wait(LOOK_S):
        now_s, tasks = time.monotonic(), [task for task in bar.tasks if task.visible]
        texts = [task.description for task in tasks]
        if now_s - told_s < (LINES_APART_S if told and texts != told else LINE_EVERY_S):
            continue
        told_s, told = now_s, texts
        shown = [each.description + (f" {each.percentage:.0f}%" if each.completed else "") for each in tasks]
        more = [f"and {len(shown) - SHOWN_MAX} more"] if len(shown) > SHOWN_MAX else []
        note(f"(still {what} after {now_s - began_s:.0f} s: {'; '.join([*shown[:SHOWN_MAX], *more])})")


def loading_bar(*, quiet: bool) -> contextlib.AbstractContextManager[ProgressCall]:
    """Shows who is waited for, and how far they have come with their layers."""
    return _waiting("loading", quiet=quiet)


@contextlib.contextmanager
def working(text: str, *, quiet: bool) -> Iterator[None]:
    """Shows what is under way, and for how long."""
    with _waiting("at it", quiet=quiet) as waiting:
        waiting(text, 0.0)
        yield


# ------------------------------------------------------------------------------------------------- answers


class AnswerView(RenderHook):
    """Shows an answer in a terminal: rows that are whole are printed, and the last one is drawn anew with
    each piece, `status()` on a line under it. What is written to standard error is printed above both."""

    def __init__(self, console: Console, status: Callable[[], str] | None = None) -> None:
        self._console = console
        self._status = status
        self._text = ""
        """Of the row that is not whole, with white space behind it."""
        self._drawn: list[int] = []
        """Cells of each row that is drawn."""
        self._live = Live(
            self,
            console=console,
            auto_refresh=status is not None,
            redirect_stdout=False,
            redirect_stderr=sys.stderr.isatty(),
        )

    def __enter__(self) -> AnswerView:
        self._console.push_render_hook(self)
        self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        """Takes the live line away; the cursor stands below the text."""
        self._status = None
        self._live.transient = not self._text.strip()
        self._live.stop()
        self._console.pop_render_hook()

    def show(self, text: str) -> None:
        """Goes on with the text."""
        self._text += visible(text)
        *whole, row = self._rows()
        if whole:
            self._text = row.plain + self._text[len(self._text.rstrip()) :]
            self._console.print(Text("\n").join(whole))
        else:
            self._live.refresh()

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Clears rows above those that `Live` clears: a terminal that is narrower by now has broken them."""
        extra = sum(max(0, cells - 1) // self._console.width for cells in self._drawn)
        return [Control(*[(ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)] * extra), *renderables]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = self._rows()
        if self._status is not None:
            status = Text(self._status(), style="dim")
            status.truncate(console.width - 1)
            rows.append(status)
        self._drawn = [row.cell_len for row in rows]
        yield Text("\n").join(rows)

    def _rows(self) -> list[Text]:
        """The text in rows without the last column: terminals differ in what a full row does."""
        width = max(1, self._console.width - 1)
        return list(Text(self._text.rstrip()).wrap(self._console, width, tab_size=4))


@contextlib.contextmanager
def show_answer(
    status: Callable[[], str] | None = None, *, quiet: bool = False
) -> Iterator[Callable[[str], None]]:
    """Gives what shows a piece of an answer on standard output: in a terminal its words are whole, with
    `status()` under them, and a pipe gets the text as it is. When it has ended, the cursor is below it."""
    if quiet:
        yield lambda text: None
        return
    fixed = ("COLUMNS", "LINES")  # which do not follow a resize
    console = Console(_environ={name: text for name, text in os.environ.items() if name not in fixed})
    if sys.stdout.isatty() and console.is_interactive:
        with AnswerView(console, status) as view:
            yield view.show
        return
    try:
        yield show
    except BaseException:  # also Ctrl-C: what is printed next begins a line
        end_line()
        raise
    show("\n")


@contextlib.contextmanager
def note_child_lines() -> Iterator[None]:
    """Passes on line by line what processes write that are started meanwhile, if standard error is a
    terminal: it stands where this process's own notes do, and not in the middle of what is drawn."""
    before = sys.stderr
    if not before.isatty():
        yield
        return
    descriptor = before.fileno()
    terminal = os.dup(descriptor)
    reading, writing = os.pipe()
    os.dup2(writing, descriptor)
    os.close(writing)

    def pass_on() -> None:
        with open(reading, encoding="utf-8", errors="backslashreplace") as lines:
            for line in lines:
                note(line.rstrip("\n"))

    passing = threading.Thread(target=pass_on, name="lines of children", daemon=True)
    with open(terminal, "w", buffering=1, encoding=before.encoding, errors=before.errors) as sys.stderr:
        passing.start()
        try:
            yield
        finally:
            os.dup2(terminal, descriptor)
            passing.join(CHILDREN_END_S)
            sys.stderr = before
