"""What the checks' and measurements' commands share: flags refused in one line, errors as one line and an
exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from flowspec.cli.options import positive
from flowspec.cli.result import Result
from flowspec.core.protocol.precision import ACTIVATIONS
from flowspec.errors import FlowSpecError
from flowspec.interruption import INTERRUPTED, hear_signals


class Parser(argparse.ArgumentParser):
    """For `python -m lab.checks.NAME` and the like: says what is wrong in one line, and takes no
    abbreviations."""

    def __init__(self, name: str, doc: str | None, **more: Any) -> None:
        super().__init__(
            **more,
            prog=f"python -m {name}",
            description=(doc or "").partition("\n\n")[0],
            allow_abbrev=False,
        )
        self.add_argument("--json", action="store_true", help="print one JSON object")

    def whole(self, flag: str, default: int | None, what: str = "") -> None:
        """A flag for a whole number from 1."""
        text = what if default is None else f"{what} (default: {default})".lstrip()
        self.add_argument(flag, type=positive, default=default, metavar="N", help=text)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def chosen(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """For argparse: names with commas, or `all`."""

    def read(text: str) -> tuple[str, ...]:
        names = tuple(known) if text == "all" else tuple(dict.fromkeys(text.split(",")))
        if not set(names) <= set(known):
            raise argparse.ArgumentTypeError(f"expected all, or some of {','.join(known)}, got {text!r}")
        return names

    return read


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """`--dtype`, of the models that are asked."""
    parser.add_argument(
        "--dtype", choices=sorted(ACTIVATIONS), default="bfloat16", help="precision (default: %(default)s)"
    )


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table whose first column is text and whose others are numbers."""
    result = Result()
    result.table(columns, rows, title=title)
    result.print()


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
