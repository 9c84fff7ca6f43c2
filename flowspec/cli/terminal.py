"""Standard output and error: what others wrote is made `visible` on a terminal; a pipe gets it as it is."""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO

from rich.console import Console

from flowspec.cli.visible import visible


def fit_for(stream: TextIO, text: str) -> str:
    """Text as it goes to a stream."""
    return visible(text) if stream.isatty() else text


def show(text: str) -> None:
    """A piece of an answer, on standard output."""
    print(fit_for(sys.stdout, text), end="", flush=True)


class PlainConsole(Console):
    """A console that sends no control characters but its own."""

    def print(self, *objects: Any, **options: Any) -> None:
        shown = [visible(each) if isinstance(each, str) and self.is_terminal else each for each in objects]
        super().print(*shown, **options)


class LogFormatter(logging.Formatter):
    """Lines of a log on standard error."""

    def format(self, record: logging.LogRecord) -> str:
        return fit_for(sys.stderr, super().format(record))
