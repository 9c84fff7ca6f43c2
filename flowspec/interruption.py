"""How a command ends that is told to: by Ctrl-C, or by SIGTERM or SIGHUP, which then mean the same."""

from __future__ import annotations

import signal
from types import FrameType

INTERRUPTED = 130
"""Exit status after Ctrl-C."""


def hear_signals() -> None:
    """SIGTERM and SIGHUP raise `KeyboardInterrupt` from now on, so everything that was started is stopped."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
