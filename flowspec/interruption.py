"""How a command ends that is told to: by Ctrl-C, or by SIGTERM or SIGHUP, which then mean the same."""

from __future__ import annotations

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
        main = threading.main_thread().ident
        assert main is not None
        # Not here, where it would be dropped once more; and a real one, which ends what the thread waits in.
        again = threading.Timer(AGAIN_S, signal.pthread_kill, (main, signal.SIGTERM))
        again.daemon = True
        again.start()
    else:
        tell(dropped)
