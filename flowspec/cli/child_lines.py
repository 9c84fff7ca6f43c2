"""What local processes write on standard error: passed on line by line, so that it stands where this
process's own notes do, and not in the middle of what is drawn."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

from flowspec.cli.terminal import note

ENDS_S = 2.0
"""So long one who is started here may still write after the end."""


@contextlib.contextmanager
def child_lines_noted() -> Iterator[None]:
    """Holds for processes that are started meanwhile, if standard error is a terminal."""
    before = sys.stderr
    if not before.isatty():
        yield
        return
    descriptor = before.fileno()
    terminal = os.dup(descriptor)
    reading, writing = os.pipe()
    os.dup2(writing, descriptor)
    os.close(writing)
    passing = threading.Thread(target=_pass_on, args=(reading,), name="lines of children", daemon=True)
    with open(terminal, "w", buffering=1, encoding=before.encoding, errors=before.errors) as sys.stderr:
        passing.start()
        try:
            yield
        finally:
            os.dup2(terminal, descriptor)
            passing.join(ENDS_S)
            sys.stderr = before


def _pass_on(reading: int) -> None:
    with open(reading, encoding="utf-8", errors="backslashreplace") as lines:
        for line in lines:
            note(line.rstrip("\n"))
