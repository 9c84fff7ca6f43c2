"""The answers to one request on their way to the event loop.

When the client goes away the answers are cancelled, and each place at the gate is free when its answer is
over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence

from flowspec.errors import ClusterError, FlowSpecError
from flowspec.llm import LLM
from flowspec.runtime.answer import Answer, AnswerStream, AsyncAnswerStream, Piece
from flowspec.runtime.question import Question
from flowspec.serve.request_queue import RequestQueue

log = logging.getLogger("flowspec.serve")

Event = Piece | Answer | FlowSpecError
OnAnswer = Callable[[Answer, float | None, float], None]
"""Told of an answer that is over, of when its first token came, and of how long it took, in seconds from the
request."""


class AnswerDispatcher:
    """Where answers are asked for: the model and all that requests share. Its methods belong to the event
    loop."""

    def __init__(
        self, llm: LLM, gate: RequestQueue, on_answer: OnAnswer, on_failure: Callable[[], None]
    ) -> None:
        self.llm = llm
        self.gate = gate
        self.on_answer = on_answer
        self.on_failure = on_failure
        self._open: set[Answers] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, questions: Sequence[Question], asked_s: float) -> Answers:
        """Waits for room, and has all questions answered at once; raises `ApiError` where there is no room to
        wait in."""
        await self.gate.enter(len(questions))
        answers = Answers(self, len(questions))
        self._open.add(answers)
        for place, question in enumerate(questions):
            task = asyncio.create_task(answers.attend(place, question, asked_s))
            self._tasks.add(task)
            task.add_done_callback(self._attended)
        return answers

    def cancel_all(self) -> None:
        """Ends every answer."""
        for answers in list(self._open):
            answers.cancel()

    async def close(self) -> None:
        """Ends every answer, and waits until they are over."""
        self.cancel_all()
        while self._tasks:
            await asyncio.wait(self._tasks)

    def closed(self, answers: Answers) -> None:
        """Nobody reads these any more."""
        self._open.discard(answers)

    def _attended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("an answer failed", exc_info=error)


class Answers:
    """The answers to one request; iterate for `(choice, event)` as they come, each choice up to its `Answer`
    or an error."""

    def __init__(self, dispatcher: AnswerDispatcher, count: int) -> None:
        self._dispatcher = dispatcher
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._streams: dict[int, AnswerStream] = {}
        self._left = count
        self._is_cancelled = False

    async def events(self, beat_s: float) -> AsyncIterator[tuple[int, Event] | None]:
        """What happens, and None whenever nothing did for so long."""
        getting: asyncio.Future[tuple[int, Event]] | None = None
        try:
            while self._left:
                getting = getting or asyncio.ensure_future(self._events.get())
                done, _ = await asyncio.wait([getting], timeout=beat_s)
                if not done:
                    yield None
                    continue
                place, event = getting.result()
                getting = None
                self._left -= not isinstance(event, Piece)
                yield place, event
        finally:
            if getting is not None:
                getting.cancel()

    def cancel(self) -> None:
        """Has the head end them; their events still come."""
        self._is_cancelled = True
        for stream in self._streams.values():
            stream.cancel()

    def close(self) -> None:
        """Nobody reads them any more; what still runs is cancelled."""
        self.cancel()
        self._dispatcher.closed(self)

    async def attend(self, place: int, question: Question, asked_s: float) -> None:
        """Has one question answered."""
        dispatcher, began_s = self._dispatcher, time.monotonic()
        event: Event = ClusterError("the server failed")
        try:
            stream = self._streams[place] = dispatcher.llm.submit(question)
            if self._is_cancelled:
                stream.cancel()
            reading = AsyncAnswerStream(stream)
            async for piece in reading:
                if piece.text or piece.parts or piece.logprobs:
                    self._events.put_nowait((place, piece))
            event = await reading.answer()
            first_s = stream.submitted_s + event.timing.first_s - asked_s if event.token_ids else None
            dispatcher.on_answer(event, first_s, time.monotonic() - asked_s)
        except FlowSpecError as error:
            event = error
        finally:
            self._streams.pop(place, None)
            if not isinstance(event, Answer):
                dispatcher.on_failure()
            dispatcher.gate.leave(time.monotonic() - began_s)
            self._events.put_nowait((place, event))
