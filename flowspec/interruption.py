"""How a command ends that is told to: by Ctrl-C, or by SIGTERM or SIGHUP, which then mean the same."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

INTERRUPTED = 130
"""Exit status after Ctrl-C."""
AGAIN_S = 0.05


def hear_signals() -> None:
    """SIGTERM and SIGHUP raise `KeyboardInterrupt` from now on, so everything that was started is stopped.

    One that comes in the middle of a destructor, of which Python drops what it raises, comes again.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    hook = sys.unraisablehook
    if getattr(hook, "func", None) is not _unraisable:
        sys.unraisablehook = partial(_unraisable, hook)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _unraisable(tell: Callable[[Any], Any], dropped: Any) -> None:
    """`sys.unraisablehook`, which tells of all else as `tell` does."""
    if issubclass(dropped.exc_type, KeyboardInterrupt):
        again = threading.Timer(AGAIN_S, _thread.interrupt_main)  # here it would be dropped once more
        again.daemon = True
        again.start()
    else:
        tell(dropped)
