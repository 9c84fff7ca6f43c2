"""How FlowSpec starts Python anew, with the modules that this process has, wherever it stands; what such a
child says, and how it ended."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import IO, Any

import msgspec

SILENT_S = 1.0
END_S = 5.0
"""How long a child may take to end after it has closed its output."""
ERROR_CHARS_MAX = 300
"""Of what a child that failed said last."""


def python_module(module: str, *arguments: str) -> list[str]:
    """The command that runs a module as `python -m` does, but finds all modules where this process finds
    them.

    `python -m` looks into the working folder first, where a folder named `flowspec` (a clone, say) would hide
    the package. The option against that, `-P`, came with Python 3.11.
    """
    path = [os.path.abspath(folder) for folder in sys.path]
    run = (  # sys is in the interpreter; anything else could be a file of the working folder
        f"import sys; sys.path[:] = {path!r}; import runpy; "
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    return [sys.executable, "-c", run, *arguments]


def words(child: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """What a child says in lines of JSON, until it has ended; an empty word whenever it was silent for
    `SILENT_S`."""
    assert child.stdout is not None
    descriptor, text = child.stdout.fileno(), b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while True:
            if not selector.select(SILENT_S):
                yield {}
                continue
            chunk = os.read(descriptor, 65536)
            if not chunk:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(END_S)
                return
            *lines, text = (text + chunk).split(b"\n")
            for line in lines:
                with contextlib.suppress(msgspec.DecodeError):  # a library's own
                    yield msgspec.json.decode(line, type=dict[str, Any])


NOT_OF_THIS_PROCESSOR = "ran an instruction that this processor does not have"


def ending(status: int, errors: IO[bytes] | None = None) -> str:
    """How a process ended, with its last line of `errors` where it failed by itself."""
    if status < 0:
        number = signal.Signals(-status)
        killed = ", as where memory runs out" if number is signal.SIGKILL else ""
        return NOT_OF_THIS_PROCESSOR if number is signal.SIGILL else f"ended by {number.name}{killed}"
    lines: list[str] = []
    if status and errors is not None:
        errors.seek(0)
        lines = errors.read()[-10_000:].decode("utf-8", "replace").strip().splitlines()
    said = "".join(letter for letter in lines[-1] if letter.isprintable())[:ERROR_CHARS_MAX] if lines else ""
    return f"ended with status {status}{said and ': '}{said}"
