"""The answers to one request on their way to the event loop, and the queue in which they wait for room."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence

from flowspec.errors import ClusterError, FlowSpecError
from flowspec.llm import LLM
from flowspec.runtime.answer import Answer, AnswerStream, AsyncAnswerStream, Piece
from flowspec.serve.completion_form import Choice
from flowspec.serve.documents import STOPPING, ApiError, of_error
from flowspec.serve.metrics import Metrics

Event = tuple[Choice, Piece | Answer]  # what came of a choice, its `Answer` at last
RETRY_MAX_S = 300
_MEMORY = 0.8  # how much of the mean of durations is kept when another one comes
log = logging.getLogger("flowspec.serve")


class RequestQueue:
    """How many answers are made at once, how many wait, and who is sent away: first come, first served. A
    request for several choices takes as many places. Used in the event loop only, and so without locks."""

    def __init__(self, parallel: int, queue: int) -> None:
        self.parallel = parallel
        self.queue = queue
        self.running = 0
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self._mean_s: float | None = None
        self._closed: ApiError | None = None

    @property
    def waiting(self) -> int:
        return sum(count for future, count in self._waiting if not future.done())

    def loads(self) -> tuple[int, int]:
        return self.running, self.waiting

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
            # when half of those that wait will be answered, going by how long answers took of late
            wait_s = (self._mean_s or 0.0) * max(1.0, self.waiting / self.parallel) / 2
            retry_s = min(RETRY_MAX_S, max(1, math.ceil(wait_s)))
            text = "as many requests are being answered, and wait, as this server takes; try again in "
            raise ApiError(429, f"{text}{retry_s} s", headers={"Retry-After": str(retry_s)})
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((future, count))
        self._let_in()
        try:
            await future
        except asyncio.CancelledError:
            # let in at the moment in which it went away
            if future.done() and not future.cancelled() and future.exception() is None:
                self.running -= count
            with contextlib.suppress(ValueError):
                self._waiting.remove((future, count))
            self._let_in()
            raise
        if self._closed is not None:  # let in at the moment in which it was closed
            self.running -= count
            raise self._closed

    def close(self, error: ApiError) -> None:
        """Lets nobody in any more: who waits, and whoever comes later, gets the error."""
        self._closed = error
        while self._waiting:
            future, _ = self._waiting.popleft()
            if not future.done():
                future.set_exception(error)

    def leave(self, spent_s: float) -> None:
        self.running -= 1
        self._mean_s = spent_s if self._mean_s is None else _MEMORY * self._mean_s + (1 - _MEMORY) * spent_s
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting and self.running + self._waiting[0][1] <= self.parallel:
            future, count = self._waiting.popleft()
            if not future.done():
                self.running += count
                future.set_result(None)


class Answers:
    """The answers to one request, which `task` makes; each place in the queue is free when its answer is
    over. When the client goes away they are cancelled."""

    def __init__(
        self, llm: LLM, gate: RequestQueue, metrics: Metrics, choices: Sequence[Choice], asked_s: float
    ) -> None:
        self._llm = llm
        self._gate = gate
        self._metrics = metrics
        self._choices = choices
        self._asked_s = asked_s
        self._events: asyncio.Queue[Event | ApiError | None] = asyncio.Queue()
        self._streams: list[AnswerStream] = []
        self._is_waiting = True
        self._is_cancelled = False
        self.task = asyncio.create_task(self._attend_all())

    async def events(self, beat_s: float) -> AsyncIterator[Event | None]:
        """What happens, and None whenever nothing did for so long. Raises `ApiError` where there is no room
        to wait in, and for an answer that failed, or that the server's end cut off."""
        left = len(self._choices)
        while left:
            beat = asyncio.get_running_loop().call_later(beat_s, self._events.put_nowait, None)
            try:
                event = await self._events.get()
            finally:
                beat.cancel()
            if isinstance(event, ApiError):
                raise event
            left -= event is not None and isinstance(event[1], Answer)
            yield event

    def cancel(self) -> None:
        """Has the head end them; their events still come."""
        self._is_cancelled = True
        for stream in self._streams:
            stream.cancel()

    def close(self) -> None:
        """Nobody reads them any more; what still runs is cancelled."""
        self.cancel()
        if self._is_waiting:
            self.task.cancel()

    async def _attend_all(self) -> None:
        try:
            await self._gate.enter(len(self._choices))
        except ApiError as error:
            self._events.put_nowait(error)
            return
        self._is_waiting = False
        await asyncio.gather(*map(self._attend, self._choices))

    async def _attend(self, choice: Choice) -> None:
        began_s = time.monotonic()
        try:
            stream = self._llm.submit(choice.question)
            self._streams.append(stream)
            if self._is_cancelled:
                stream.cancel()
            reading = AsyncAnswerStream(stream)
            async for piece in reading:
                if piece.text or piece.parts or piece.logprobs:
                    self._events.put_nowait((choice, piece))
            answer = await reading.answer()
            first_s = stream.submitted_s + answer.timing.first_s - self._asked_s if answer.token_ids else None
            self._metrics.answered(answer, first_s, time.monotonic() - self._asked_s)
            is_cut = answer.finish_reason == "cancelled"
            event: Event | ApiError = of_error(STOPPING) if is_cut else (choice, answer)
        except Exception as error:
            if not isinstance(error, FlowSpecError):
                log.exception("an answer failed")
                error = ClusterError("the server failed")
            self._metrics.failed()
            event = of_error(error)
        finally:
            self._gate.leave(time.monotonic() - began_s)
        self._events.put_nowait(event)
