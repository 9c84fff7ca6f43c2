"""How many answers are made at once, how many wait, and who is sent away: first come, first served.

Used in the event loop only, and so without locks. It counts answers: a request for several choices takes as
many places.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque

from flowspec.serve.refusals import ApiError

RETRY_MAX_S = 300
_MEMORY = 0.8
"""How much of the mean of durations is kept when another one comes."""


class RequestQueue:
    """`parallel` answers at once, and `queue` that wait."""

    def __init__(self, parallel: int, queue: int) -> None:
        self.parallel = parallel
        self.queue = queue
        self.running = 0
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self._mean_s: float | None = None
        self._closed: ApiError | None = None

    @property
    def waiting(self) -> int:
        """Answers that wait."""
        return sum(count for future, count in self._waiting if not future.done())

    async def enter(self, count: int) -> None:
        """Waits until there is room for so many answers; each is left by itself. Raises `ApiError` where too
        many wait, or it is closed."""
        if self._closed is not None:
            raise self._closed
        if count > self.parallel:
            text = f"this server makes {self.parallel} answers at once, and {count} choices were asked for"
            raise ApiError(400, f"n: {text}", "n")
        is_full = bool(self._waiting) or self.running + count > self.parallel
        if is_full and self.waiting + count > self.queue:
            retry_s = self.retry_after_s()
            text = "as many requests are being answered, and wait, as this server takes; try again in "
            text += f"{retry_s} s"
            retry = {"Retry-After": str(retry_s)}
            raise ApiError(429, text, headers=retry)
        future = asyncio.get_running_loop().create_future()
        entry = (future, count)
        self._waiting.append(entry)
        self._let_in()
        try:
            await future
        except asyncio.CancelledError:
            # let in at the moment in which it went away
            if future.done() and not future.cancelled() and future.exception() is None:
                self.running -= count
            with contextlib.suppress(ValueError):
                self._waiting.remove(entry)
            self._let_in()
            raise
        if self._closed is not None:  # let in at the moment in which it was closed
            self.running -= count
            raise self._closed

    def close(self, error: ApiError) -> None:
        """Lets nobody in any more: who waits, and whoever comes later, gets the error. Those who are in leave
        as ever."""
        self._closed = error
        while self._waiting:
            future, _ = self._waiting.popleft()
            if not future.done():
                future.set_exception(error)

    def leave(self, spent_s: float) -> None:
        """An answer is over, after so long."""
        self.running -= 1
        self._mean_s = spent_s if self._mean_s is None else _MEMORY * self._mean_s + (1 - _MEMORY) * spent_s
        self._let_in()

    def retry_after_s(self) -> int:
        """When half of those that wait will be answered, going by how long answers took of late; whole
        seconds, at least one."""
        rounds = max(1.0, self.waiting / self.parallel)
        return min(RETRY_MAX_S, max(1, math.ceil((self._mean_s or 0.0) * rounds / 2)))

    def _let_in(self) -> None:
        while self._waiting and self.running + self._waiting[0][1] <= self.parallel:
            future, count = self._waiting.popleft()
            if not future.done():
                self.running += count
                future.set_result(None)
