"""A bound for a model's chat template, which is a program of somebody else's.

transformers runs it in Jinja's sandbox: it reaches no files and no Python objects, and one `range` has 100000
items at most. Loops in loops, which would take days, are ended here: the clock is looked at before each of
the template's lines. A single operation that makes a text of gigabytes (`'x' * 10 ** 10`) is not seen before
it is done.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

SECONDS_MAX = 20.0
"""A dialogue of 400 turns takes some hundredths of one."""
Trace = Callable[[FrameType, str, Any], Any]
_FILE = "<template>"
"""What Jinja calls the code that it makes of a template."""


class EndlessError(Exception):
    """A template ran for too long."""


@contextlib.contextmanager
def bounded_time(seconds: float = SECONDS_MAX) -> Iterator[None]:
    """Raises `EndlessError` in a template that runs for longer within; a debugger's own tracing stands still
    meanwhile."""
    deadline_s = time.monotonic() + seconds

    def on_line(frame: FrameType, event: str, value: Any) -> Trace:
        if time.monotonic() > deadline_s:
            raise EndlessError(f"it was not done within {seconds:g} s")
        return on_line

    def on_call(frame: FrameType, event: str, value: Any) -> Trace | None:
        return on_line if frame.f_code.co_filename == _FILE else None

    old = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield
    finally:
        sys.settrace(old)
