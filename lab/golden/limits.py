"""A round that ends: after so long at the latest."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises `TimeoutError` in the main thread after so long, wherever it waits."""

    def end(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"a round has not ended within {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
