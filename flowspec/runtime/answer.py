"""An answer as text: its pieces as they come, and the whole at its end.

An `AnswerStream` is read by one thread; `AsyncAnswerStream` reads one for an event loop. Whether anybody
reads or not, the head goes on with the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from flowspec.core.protocol.messages import Logprobs
from flowspec.errors import ClusterError, InputError
from flowspec.model.grammar import is_whole
from flowspec.model.reply.parts import Part, ToolCall, calls_in
from flowspec.model.text import TextStream, Tokenizer
from flowspec.runtime.question import Question
from flowspec.runtime.session import Session
from flowspec.runtime.token_log import TokenLog, TokenLogprob
from flowspec.runtime.token_stream import Timing, Tokens


class Keep(Protocol):
    """Takes what comes of an answer, to have it when this process is no more."""

    def tokens(self, tokens: Sequence[int]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of an answer: text that can be shown (whole characters, nothing of a stop text), and the tokens
    that came.

    Text may wait for tokens that follow, so `text` is not always that of `token_ids`. `logprobs` are of the
    tokens whose text is shown, if they are wanted. `parts` are thoughts and calls, where the question has a
    form.
    """

    text: str
    parts: tuple[Part, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A finished answer.

    `text`: without special tokens, cut before a stop text; empty for a model without a tokenizer.
    `token_ids`: all new tokens, also those of a stop text; a stop token is not among them.
    `finish_reason`: `stop` (a stop token or text), `length` (`max_new_tokens` or the context) or `cancelled`.
    `prompt_tokens`: length of the prompt in tokens; `reused_tokens`: how many of them the devices still had
    of an earlier answer. `resumed_tokens`: the first so many of `token_ids` are of an interrupted answer.
    `logprobs`: one for each of `token_ids`, None where none were wanted.
    `thoughts` and `calls`: what there is beside the text, where the question has a form; `thought_tokens`
    counts the tokens of thoughts, with the marks around them.
    `seed`: that it was drawn with (without meaning at temperature 0).
    `timing`: seconds from the question (`first_s`, `last_s`, `ended_s`), `decode_s`, `tokens_per_s`.
    `statistics`: what the pipeline did (docs/methods.md has the terms).
    `arithmetic`: what it was computed with.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    reused_tokens: int = 0
    resumed_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    thoughts: str = ""
    calls: tuple[ToolCall, ...] = ()
    thought_tokens: int = 0
    seed: int = 0
    timing: Timing
    statistics: dict[str, Any]
    arithmetic: str = ""

    @property
    def new_tokens(self) -> int:
        """How many tokens it has."""
        return len(self.token_ids)


OnOver = Callable[[tuple[int, ...] | None], None]
"""Told once that an answer is over: the conversation holds these tokens of it now; None: it is of no use any
more. May be called by any thread, and at any moment."""


class AnswerStream:
    """An answer under way: iterate for its `Piece`s. `LLM.stream` makes one.

    Iterating raises `InputError` for a prompt that cannot be answered, and `ClusterError` where the devices
    cannot go on. One thread reads it; `cancel` and `close` may be called by any. An answer that nobody holds
    any more is cancelled.
    """

    def __init__(
        self,
        session: Session,
        question: Question,
        tokenizer: Tokenizer | None,
        *,
        request: int,
        keep: Keep | None = None,
        on_over: OnOver = lambda held: None,
    ) -> None:
        """Submits the question as a turn of the conversation `request`; `keep` gets new tokens before they
        are shown. Raises `InputError` for token ids that the model does not have."""
        self._is_over = True  # until it is submitted
        self._session = session
        self._question = question
        self._keep = keep
        self._on_over = on_over
        self._answer: Answer | None = None
        self._error: Exception | None = None
        self._shown = 0
        self._timing = Timing(new_tokens=list(question.answered), resumed=len(question.answered))
        self._resumed = question.answered
        self._parts: list[Part] = []
        rule = None
        self._text: TextStream | None = None
        if tokenizer is not None:
            self._text = TextStream(tokenizer, question.stops, question.form)
            if question.stops or (question.form is not None and question.form.is_single):
                rule = TextStream(tokenizer, question.stops, question.form)
        self._log = TokenLog(tokenizer, self._text) if question.top_logprobs >= 0 else None
        self._tokens = session.submit(
            question.prompt,
            question.sampling,
            question.limits,
            request=request,
            stop_rule=rule,
            answered=question.answered,
            top_logprobs=question.top_logprobs,
        )
        self._is_over = False

    @property
    def submitted_s(self) -> float:
        """When it was asked, in seconds of the monotonic clock."""
        return self._tokens.submitted_s

    def __iter__(self) -> AnswerStream:
        return self

    def __next__(self) -> Piece:
        if self._is_over:
            raise StopIteration
        try:
            if self._resumed:
                taken, self._resumed = self._resumed, ()
                return self._piece(taken)
            batch = next(iter(self._tokens), None)
            if batch is not None:
                return self._take(batch)
            piece = self._finish()
        except Exception as error:  # whatever it is, the answer has ended, and says so whenever it is asked
            self._error = error
            self._end(None)
            raise
        if piece is None:
            raise StopIteration
        return piece

    def answer(self) -> Answer:
        """The whole answer, at its end: what was not read yet is read now. Raises as iterating does, and
        `ClusterError` for an answer that was closed."""
        for _ in self:
            pass
        if self._answer is None:
            raise self._error or ClusterError("the answer was closed before its end")
        return self._answer

    def cancel(self) -> None:
        """Has the answer end soon, with what there is and the reason `cancelled`; its last pieces still come.
        One that is over stays as it is."""
        if not self._is_over and not self._session.head.is_closed:
            self._session.head.cancel(self._tokens)

    def close(self) -> None:
        """Ends the answer, of which nothing is read any more."""
        if not self._is_over:
            self.cancel()
            self._end(None)

    def __enter__(self) -> AnswerStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _take(self, batch: Tokens) -> Piece:
        self._timing.add(batch.tokens, batch.at_s - self._tokens.submitted_s)
        if self._keep is not None:
            self._keep.tokens(batch.tokens)
        return self._piece(batch.tokens, batch.logprobs)

    def _piece(self, tokens: tuple[int, ...], logprobs: Sequence[Logprobs] = ()) -> Piece:
        if self._log is not None:
            text = self._log.push(tokens, logprobs)
        else:
            text = "" if self._text is None else self._text.push(tokens)
        self._shown += len(text)
        told = () if self._log is None else self._log.up_to(self._shown)
        return Piece(text=text, parts=self._taken(), token_ids=tokens, logprobs=told)

    def _taken(self) -> tuple[Part, ...]:
        found = () if self._text is None else self._text.take_parts()
        self._parts += found
        return found

    def _finish(self) -> Piece | None:
        """The answer is whole; what of its text or tokens was held back, if there is any."""
        end, question, text = self._tokens.end, self._question, self._text
        assert end is not None
        self._check_whole(end.reason)
        self._timing.ended_s = time.monotonic() - self._tokens.submitted_s
        last = "" if text is None else text.finish()
        piece = Piece(text=last, parts=self._taken(), logprobs=() if self._log is None else self._log.rest())
        self._answer = Answer(
            text="" if text is None else text.text,
            token_ids=tuple(self._timing.new_tokens),
            finish_reason=end.reason,
            prompt_tokens=len(question.prompt),
            reused_tokens=end.reused,
            resumed_tokens=self._timing.resumed,
            logprobs=None if self._log is None else tuple(self._log.entries),
            thoughts="".join(part.text for part in self._parts if part.kind == "thought"),
            calls=tuple(calls_in(self._parts)),
            thought_tokens=0 if text is None else text.thought_tokens,
            seed=question.sampling.seed,
            timing=self._timing,
            statistics=end.statistics,
            arithmetic=self._session.head.arithmetic,
        )
        self._end(self._answer.token_ids)
        return piece if piece.text or piece.parts or piece.logprobs else None

    def _check_whole(self, reason: str) -> None:
        """Raises `InputError` for an answer that a grammar binds and that ended before the grammar lets
        it."""
        grammar, tokens = self._question.sampling.grammar, self._session.head.plan.tokens
        is_stopped = self._text is not None and self._text.is_stopped
        if reason != "stop" or grammar is None or tokens is None or is_stopped:
            return
        last = self._timing.new_tokens[-1:]
        if last and self._question.limits.stop_ids.difference(grammar.ends).issuperset(last):
            return  # it ended at a token of text, as was asked
        if not is_whole(grammar, tokens, self._timing.new_tokens):
            raise InputError(
                f"the answer cannot go on: {grammar.kind} is too complex for the limits that it is obeyed "
                "with, or the model has no tokens for what is due; make it simpler"
            )

    def _end(self, held: tuple[int, ...] | None) -> None:
        self._is_over = True
        self._on_over(held)


class AsyncAnswerStream:
    """An `AnswerStream` for an event loop: `async for` its pieces, then `await answer()`. `LLM.astream` makes
    one.

    A thread of its own reads the answer, and the loop never waits for it.
    """

    def __init__(self, stream: AnswerStream) -> None:
        self._stream = stream
        self._events: asyncio.Queue[Piece | None] = asyncio.Queue()
        self._failed: list[Exception] = []
        reading = (stream, asyncio.get_running_loop(), self._events, self._failed)
        threading.Thread(target=_read, args=reading, name="answer", daemon=True).start()

    def __aiter__(self) -> AsyncAnswerStream:
        return self

    async def __anext__(self) -> Piece:
        piece = await self._events.get()
        if piece is not None:
            return piece
        self._events.put_nowait(None)  # whoever asks again is told again
        if self._failed:
            raise self._failed[0]
        raise StopAsyncIteration

    async def answer(self) -> Answer:
        """As `AnswerStream.answer`."""
        async for _ in self:
            pass
        return self._stream.answer()

    def cancel(self) -> None:
        """As `AnswerStream.cancel`."""
        self._stream.cancel()

    def __del__(self) -> None:
        self._stream.cancel()


def _read(
    stream: AnswerStream,
    loop: asyncio.AbstractEventLoop,
    events: asyncio.Queue[Piece | None],
    failed: list[Exception],
) -> None:
    """Reads an answer to its end, and hands the pieces over to the loop, or the error."""
    try:
        for piece in stream:
            loop.call_soon_threadsafe(events.put_nowait, piece)
    except Exception as error:  # noqa: BLE001 - the top of a thread: it is raised again in the event loop
        failed.append(error)
    with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
        loop.call_soon_threadsafe(events.put_nowait, None)
