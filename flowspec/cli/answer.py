"""One answer at the terminal: streams its text, lets Ctrl-C stop it, and gathers what there is to report."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Protocol

from flowspec.core.protocol.messages import Sampling
from flowspec.model.text import StopStrings, TextStream, Tokenizer
from flowspec.plan.memory import mib
from flowspec.runtime.session import Limits, Session
from flowspec.runtime.token_stream import Timing, TokenStream, timed

Changes = tuple[tuple[int, str], ...]
"""Other arithmetics than the one that an answer began with, each with the number of tokens before it."""


class Keep(Protocol):
    """Takes what comes of an answer, to have it when this process is no more."""

    def tokens(self, tokens: Sequence[int]) -> None: ...

    def arithmetic(self, name: str) -> None:
        """With which the tokens after this are computed."""


def from_head(stage: dict[str, Any]) -> str:
    """What the head had to send a stage of its weights, as a part of a line; nothing if that was nothing."""
    return f" ({mib(stage['received_bytes'])} of them just sent)" if stage["received_bytes"] else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt and how to answer it; without a tokenizer the answer is shown as token ids.

    Of it `answered` is known already, which began with an `arithmetic` and went on with those of its
    `changes`.
    """

    prompt: Sequence[int]
    request: int
    sampling: Sampling
    limits: Limits
    tokenizer: Tokenizer | None
    stops: Sequence[str]
    answered: tuple[int, ...] = ()
    arithmetic: str = ""
    changes: Changes = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A finished answer; `is_interrupted` says that Ctrl-C ended it. It began with an `arithmetic`."""

    text: str | None
    timing: Timing
    reason: str
    reused: int
    statistics: dict[str, Any]
    is_interrupted: bool
    arithmetic: str
    changes: Changes = ()

    @property
    def computed(self) -> str:
        """What it was computed with, in one line."""
        changes = "".join(f", from token {token + 1} on {name}" for token, name in self.changes)
        return f"arithmetic {self.arithmetic}{changes}"

    @property
    def figures(self) -> str:
        """Speed, and how the answer ended where that is not of itself, in one line."""
        count = f"{len(self.timing.new_tokens)} tokens" + (
            f" ({self.timing.resumed} taken over)" if self.timing.resumed else ""
        )
        ending = {"length": ", cut at its longest", "cancelled": ", stopped"}.get(self.reason, "")
        return (
            f"{count}, {self.timing.tokens_per_s:.1f} tokens/s, first after {self.timing.first_s:.2f} "
            f"s{ending}"
        )


@contextlib.contextmanager
def cancelled_by_ctrl_c(session: Session, answer: TokenStream) -> Iterator[threading.Event]:
    """Ctrl-C cancels the answer, which then ends by itself; a second one interrupts, should the cluster not
    answer."""
    interruption = threading.Event()

    def cancel(number: int, frame: FrameType | None) -> None:
        if interruption.is_set():
            raise KeyboardInterrupt
        interruption.set()
        session.head.cancel(answer)

    before = signal.signal(signal.SIGINT, cancel)
    try:
        yield interruption
    finally:
        signal.signal(signal.SIGINT, before)


def ask(
    session: Session, question: Question, show: Callable[[str], None], keep: Keep | None = None
) -> Outcome:
    """Runs a question to its end and shows the text as it comes; Ctrl-C cancels the answer and keeps what is
    there.

    `keep` gets new tokens before they are shown.
    """
    asked = Asked(session, question, keep)
    with cancelled_by_ctrl_c(session, asked.answer) as interruption:
        outcome = asked.follow(show)
    return replace(outcome, is_interrupted=interruption.is_set())


class Asked:
    """A question under way: submitted when made, followed to its end by one thread."""

    def __init__(self, session: Session, question: Question, keep: Keep | None = None) -> None:
        tokenizer = question.tokenizer
        self._answered = question.answered
        self._keep = keep
        self._question = question
        self._stream = None if tokenizer is None else TextStream(tokenizer, question.stops)
        rule = (
            StopStrings(TextStream(tokenizer, question.stops))
            if tokenizer is not None and question.stops
            else None
        )
        self.answer = session.submit(
            question.prompt,
            question.sampling,
            question.limits,
            request=question.request,
            stop_rule=rule,
            answered=question.answered,
        )

    def follow(self, show: Callable[[str], None]) -> Outcome:
        """Shows the text as it comes, up to the answer's end; what was answered before comes first."""
        timing, stream = Timing(new_tokens=list(self._answered), resumed=len(self._answered)), self._stream

        def push(tokens: Sequence[int]) -> None:
            show("".join(f"{token} " for token in tokens) if stream is None else stream.push(tokens))

        push(self._answered)
        for tokens in timed(self.answer, timing):
            if self._keep is not None:
                if self.answer.changes:
                    self._keep.arithmetic(self.answer.changes[-1].arithmetic)
                self._keep.tokens(tokens)
            push(tokens)
        assert self.answer.end is not None
        if stream is not None:
            show(stream.finish())
        end, question = self.answer.end, self._question
        return Outcome(
            text=None if stream is None else stream.text,
            timing=timing,
            reason=end.reason,
            reused=end.reused,
            statistics=end.statistics,
            is_interrupted=False,
            arithmetic=question.arithmetic or self.answer.arithmetic,
            changes=(*question.changes, *((each.token, each.arithmetic) for each in self.answer.changes)),
        )


def drafter_lines(session: Session) -> list[str]:
    """A line for each drafter that runs on a device of its own."""
    return [
        f"{each['device']}: drafter {each['name']}, {mib(each['weight_bytes'])} of weights{from_head(each)}, "
        f"process {each['pid']} at {each['address']}" + ("" if each["is_there"] else " (lost)")
        for each in session.drafters_report()
        if each["address"]
    ]


def changes_document(changes: Changes) -> list[dict[str, Any]]:
    """As `--json` prints them; `token` is the number of tokens before the change."""
    return [{"token": token, "arithmetic": name} for token, name in changes]


def record(session: Session, question: Question, outcome: Outcome) -> dict[str, Any]:
    """An answer as `--json` prints it."""
    sampling, timing, plan = question.sampling, outcome.timing, session.head.plan
    return {
        "token_ids": timing.new_tokens,
        "text": outcome.text,
        "finish_reason": outcome.reason,
        "prompt_tokens": len(question.prompt),
        "reused_tokens": outcome.reused,
        "new_tokens": len(timing.new_tokens),
        "resumed": timing.resumed,
        "time_to_first_token_s": round(timing.first_s, 6),
        "decode_s": round(timing.decode_s, 6),
        "tokens_per_s": round(timing.tokens_per_s, 3),
        "method": session.decoding.method,
        "drafter": session.drafter,
        "world": "cluster",
        "model": plan.model,
        "dtype": plan.dtype,
        "arithmetic": outcome.arithmetic,
        "arithmetic_changes": changes_document(outcome.changes),
        "context": plan.context,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "statistics": outcome.statistics,
        "stages": session.stages_report(),
        "drafters": session.drafters_report(),
        "expertise": session.expertise_report(),
        "plan": None if session.chosen is None else session.chosen.report(),
    }
