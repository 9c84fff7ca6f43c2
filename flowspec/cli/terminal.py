"""Standard output and error: what others wrote is made `visible` on a terminal; a pipe gets it as it is."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from flowspec.cli.visible import visible


def fit_for(stream: TextIO, text: str) -> str:
    """Text as it goes to a stream."""
    return visible(text) if stream.isatty() else text


def show(text: str) -> None:
    """A piece of an answer, on standard output."""
    print(fit_for(sys.stdout, text), end="", flush=True)


def note(text: str) -> None:
    """A line beside the answer, on standard error."""
    print(fit_for(sys.stderr, text), file=sys.stderr, flush=True)


class LogFormatter(logging.Formatter):
    """Lines of a log on standard error."""

    def format(self, record: logging.LogRecord) -> str:
        return fit_for(sys.stderr, super().format(record))
