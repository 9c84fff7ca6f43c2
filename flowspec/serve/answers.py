"""The answers to one request on their way from the head's thread to the event loop.

Each answer is followed by a thread of a bounded pool, which turns tokens into text and hands the pieces over;
the loop never waits for the head. When the client goes away the answers are cancelled, and each place at the
gate is free when its answer is over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from flowspec.core.protocol.messages import Sampling
from flowspec.errors import ClusterError, FlowSpecError
from flowspec.model.text import StopStrings, TextStream, Tokenizer
from flowspec.runtime.session import Limits, Session
from flowspec.runtime.token_stream import End, TokenStream
from flowspec.serve.conversations import Conversations
from flowspec.serve.gate import Gate
from flowspec.serve.tokens import Entry, TokenLog

log = logging.getLogger("flowspec.serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One answer that is wanted: a prompt, and how to go on from there; `top_logprobs` as in `Submit`."""

    prompt: tuple[int, ...]
    sampling: Sampling
    limits: Limits
    stops: tuple[str, ...]
    top_logprobs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Text that can be shown, and what there is to tell of its tokens where that was asked for."""

    text: str
    entries: tuple[Entry, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """An answer's end: `stop`, `length` or `cancelled`; `tokens` were made, `reused` of the prompt's were
    there already."""

    reason: str
    tokens: int
    reused: int
    statistics: dict[str, Any]


Event = Piece | Over | FlowSpecError
OnAnswer = Callable[[Question, Over, float | None, float], None]
"""Told of an answer that is over, of when its first token came, and of how long it took, in seconds from the
request."""


class Desk:
    """Where answers are asked for: the session and all that requests share. Its methods belong to the event
    loop."""

    def __init__(
        self,
        session: Session,
        tokenizer: Tokenizer,
        gate: Gate,
        kept: int,
        on_answer: OnAnswer,
        on_failure: Callable[[], None],
    ) -> None:
        head = session.head
        self.session = session
        self.tokenizer = tokenizer
        self.gate = gate
        self.conversations = Conversations(kept, head.new_request, head.forget)
        self.on_answer = on_answer
        self.on_failure = on_failure
        self._threads = ThreadPoolExecutor(gate.parallel, thread_name_prefix="answer")
        self._open: set[Answers] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, questions: Sequence[Question], asked_s: float) -> Answers:
        """Waits for room, and has all questions answered at once; raises `ApiError` where there is no room to
        wait in."""
        await self.gate.enter(len(questions))
        answers = Answers(self, len(questions))
        self._open.add(answers)
        for place, question in enumerate(questions):
            task = asyncio.create_task(answers.attend(place, question, asked_s, self._threads))
            self._tasks.add(task)
            task.add_done_callback(self._attended)
        return answers

    def cancel_all(self) -> None:
        """Ends every answer."""
        for answers in list(self._open):
            answers.cancel()

    async def close(self) -> None:
        """Ends every answer, waits until they are over, and forgets the conversations."""
        self.cancel_all()
        while self._tasks:
            await asyncio.wait(self._tasks)
        for number in self.conversations.idle:
            self.conversations.drop(number)
        self._threads.shutdown()

    def closed(self, answers: Answers) -> None:
        """Nobody reads these any more."""
        self._open.discard(answers)

    def _attended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("an answer failed", exc_info=error)


class Answers:
    """The answers to one request; iterate for `(choice, event)` as they come, each choice up to its `Over` or
    an error."""

    def __init__(self, desk: Desk, count: int) -> None:
        self._desk = desk
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._answers: dict[int, TokenStream] = {}
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
        for answer in self._answers.values():
            self._desk.session.head.cancel(answer)

    def close(self) -> None:
        """Nobody reads them any more; what still runs is cancelled."""
        self.cancel()
        self._desk.closed(self)

    async def attend(
        self, place: int, question: Question, asked_s: float, threads: ThreadPoolExecutor
    ) -> None:
        """Has one question answered, from a conversation to its return."""
        desk, loop, began_s = self._desk, asyncio.get_running_loop(), time.monotonic()
        number = desk.conversations.take(question.prompt)
        follower: Follower | None = None
        event: Event = ClusterError("the server failed")
        try:
            follower = Follower(
                desk,
                question,
                number,
                lambda piece: loop.call_soon_threadsafe(self._events.put_nowait, (place, piece)),
            )
            self._answers[place] = follower.answer
            if self._is_cancelled:
                desk.session.head.cancel(follower.answer)
            event = await loop.run_in_executor(threads, follower.follow)
        except FlowSpecError as error:
            event = error
        finally:
            self._answers.pop(place, None)
            if isinstance(event, Over) and follower is not None:
                desk.conversations.give_back(number, (*question.prompt, *follower.tokens))
                first_s = None if follower.first_s is None else follower.first_s - asked_s
                desk.on_answer(question, event, first_s, time.monotonic() - asked_s)
            else:
                desk.conversations.drop(number)
                desk.on_failure()
            desk.gate.leave(time.monotonic() - began_s)
            self._events.put_nowait((place, event))


class Follower:
    """Submits a question, and follows its answer in a thread; `show` takes the pieces."""

    def __init__(self, desk: Desk, question: Question, request: int, show: Callable[[Piece], object]) -> None:
        self.tokens: list[int] = []
        self.first_s: float | None = None
        self._show = show
        self._stream = TextStream(desk.tokenizer, question.stops)
        self._log = TokenLog(desk.tokenizer, self._stream) if question.top_logprobs >= 0 else None
        self.answer = desk.session.submit(
            question.prompt,
            question.sampling,
            question.limits,
            request=request,
            stop_rule=StopStrings(TextStream(desk.tokenizer, question.stops)) if question.stops else None,
            top_logprobs=question.top_logprobs,
        )

    def follow(self) -> Over:
        """Up to the answer's end."""
        shown = 0
        for batch in self.answer:
            if self.first_s is None:
                self.first_s = batch.at_s
            self.tokens += batch.tokens
            text = (
                self._stream.push(batch.tokens)
                if self._log is None
                else self._log.push(batch.tokens, batch.logprobs)
            )
            shown += len(text)
            self._tell(text, () if self._log is None else self._log.up_to(shown))
        assert self.answer.end is not None
        self._tell(self._stream.finish(), () if self._log is None else self._log.rest())
        return over(self.answer.end, len(self.tokens))

    def _tell(self, text: str, entries: tuple[Entry, ...]) -> None:
        if text or entries:
            self._show(Piece(text=text, entries=entries))


def over(end: End, tokens: int) -> Over:
    return Over(reason=end.reason, tokens=tokens, reused=end.reused, statistics=end.statistics)
