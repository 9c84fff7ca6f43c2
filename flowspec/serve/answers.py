"""The answers to one request on their way to the event loop.

When the client goes away the answers are cancelled, and each place at the gate is free when its answer is
over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence

from flowspec.errors import ClusterError, FlowSpecError
from flowspec.llm import LLM
from flowspec.runtime.answer import Answer, AnswerStream, AsyncAnswerStream, Piece
from flowspec.serve.completion_form import Choice
from flowspec.serve.metrics import Metrics
from flowspec.serve.refusals import STOPPING, ApiError, of_error
from flowspec.serve.request_queue import RequestQueue

log = logging.getLogger("flowspec.serve")

Event = tuple[Choice, Piece | Answer]
"""What came of a choice, its `Answer` at last."""


class Answers:
    """The answers to one request, which wait for room first; `task` makes them."""

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
        """Has one question answered."""
        began_s = time.monotonic()
        event: Event | ApiError
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
            event = of_error(STOPPING) if answer.finish_reason == "cancelled" else (choice, answer)
        except Exception as error:
            if not isinstance(error, FlowSpecError):
                log.exception("an answer failed")
                error = ClusterError("the server failed")
            self._metrics.failed()
            event = of_error(error)
        finally:
            self._gate.leave(time.monotonic() - began_s)
        self._events.put_nowait(event)
