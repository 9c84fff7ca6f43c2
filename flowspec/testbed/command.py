"""What the testbed's commands share: flags refused in one line, errors as one line and an exit status,
progress, tables."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from flowspec.core.precision import ACTIVATIONS
from flowspec.errors import FlowSpecError
from flowspec.interruption import INTERRUPTED, hear_signals

LINE_EVERY_S = 60.0
"""How often progress is told where no terminal shows a bar."""
Step = Callable[[str], None]
"""Called once for each piece of work that is done, with what comes next."""


class Parser(argparse.ArgumentParser):
    """For `python -m flowspec.testbed.NAME`: says what is wrong in one line, and takes no abbreviations."""

    def __init__(self, name: str, doc: str | None) -> None:
        super().__init__(
            prog=f"python -m flowspec.testbed.{name}",
            description=(doc or "").partition("\n\n")[0],
            allow_abbrev=False,
        )
        self.add_argument("--json", action="store_true", help="print one JSON object")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def whole(text: str) -> int:
    """A whole number from 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text!r}")
    return int(text)


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """`--dtype`, of the models that are asked."""
    parser.add_argument(
        "--dtype", choices=sorted(ACTIVATIONS), default="bfloat16", help="precision (default: %(default)s)"
    )


def wholes(text: str) -> tuple[int, ...]:
    """`8,16,32`, for argparse."""
    return tuple(whole(part) for part in text.split(","))


def reals(text: str) -> tuple[float, ...]:
    """`0,0.7,1`, for argparse."""
    try:
        return tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected numbers with commas, such as 0,0.7,1, got {text!r}"
        ) from None


def chosen(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """For argparse: names with commas, or `all`."""

    def read(text: str) -> tuple[str, ...]:
        names = tuple(known) if text == "all" else tuple(dict.fromkeys(text.split(",")))
        if not set(names) <= set(known):
            raise argparse.ArgumentTypeError(f"expected all, or some of {','.join(known)}, got {text!r}")
        return names

    return read


def run_command(
    parser: Parser, command: Callable[[argparse.Namespace], int], argv: Sequence[str] | None
) -> int:
    """Runs a command; what a person can put right is told in one line."""
    args = parser.parse_args(argv)
    hear_signals()
    try:
        return command(args)
    except FlowSpecError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return INTERRUPTED


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
