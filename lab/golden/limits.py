"""A round that ends: after so long at the latest, and when it is told to, with what it started ended, too."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raises `TimeoutError` after so long, and `SystemExit` at SIGTERM, so that what is open is closed."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"a round has not ended within {seconds} s")

    def told(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {
        number: signal.signal(number, act) for number, act in ((signal.SIGALRM, late), (signal.SIGTERM, told))
    }
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        for number, act in before.items():
            signal.signal(number, act)
