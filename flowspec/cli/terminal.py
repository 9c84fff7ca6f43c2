"""Standard output and error: what others wrote is made `visible` on a terminal; a pipe gets it as it is."""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO

from flowspec.cli.visible import visible


class TypedInterrupt(KeyboardInterrupt):
    """Ctrl-C where no answer comes that it would stop."""


def terminal_size() -> os.terminal_size:
    """Of the terminal that standard output is, as it is now: `COLUMNS` does not follow a resize."""
    found = os.get_terminal_size(sys.stdout.fileno())
    return os.terminal_size((found.columns or 80, found.lines or 24))


def fit_for(stream: TextIO, text: str) -> str:
    """Text as it goes to a stream."""
    return visible(text) if stream.isatty() else text


def show(text: str) -> None:
    """A piece of an answer, on standard output."""
    print(fit_for(sys.stdout, text), end="", flush=True)


def note(text: str) -> None:
    """A line beside the answer, on standard error."""
    print(fit_for(sys.stderr, text), file=sys.stderr, flush=True)


class LogHandler(logging.Handler):
    """Lines of a log on what standard error is at the time: a chat puts another in its place while it
    draws."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            note(self.format(record))
        except Exception:  # noqa: BLE001 - as every handler does
            self.handleError(record)
