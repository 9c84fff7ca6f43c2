"""Answers as the API's documents, whole or in chunks, in the form of chats or of completions."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowspec.model.reply.parts import new_call_id
from flowspec.plan.placement import ClusterPlan
from flowspec.runtime.answer import Answer, Piece
from flowspec.runtime.token_log import TokenLogprob
from flowspec.serve import sse
from flowspec.serve.calls import call_document, thoughts_in
from flowspec.serve.refusals import ApiError
from flowspec.serve.tokens import chat_logprobs, completion_logprobs
from flowspec.version import __version__


def fingerprint_of(plan: ClusterPlan, arithmetic: str, grammars: str = "") -> str:
    """`system_fingerprint`: of all that an answer depends on beside the request, so never of how many devices
    there are. `grammars` is what obeys them, and its version."""
    parts = (plan.fingerprint, plan.dtype, plan.cache, arithmetic, plan.context, grammars, __version__)
    text = " ".join(map(str, parts))
    return f"fp_{hashlib.sha256(text.encode()).hexdigest()[:16]}"


@dataclass(slots=True)
class Choice:
    """One answer as far as it has come; `prompt` is its prompt's place in the request, `new_id` makes ids for
    calls, and its text begins with what is `echoed`."""

    prompt: int
    new_id: Callable[[], str] = new_call_id
    echoed: str = ""
    pieces: list[Piece] = field(default_factory=list)
    answer: Answer | None = None

    def add(self, event: Piece | Answer) -> None:
        if isinstance(event, Answer):
            self.answer = event
        else:
            self.pieces.append(event)

    @property
    def text(self) -> str:
        return self.echoed + "".join(piece.text for piece in self.pieces)

    @property
    def entries(self) -> list[TokenLogprob]:
        return [entry for piece in self.pieces for entry in piece.logprobs]

    @property
    def message(self) -> dict[str, Any]:
        """What the assistant said, as a chat has it; no text where that beside calls is nothing but space."""
        assert self.answer is not None
        text, calls = self.text, [call_document(call, self.new_id()) for call in self.answer.calls]
        found: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self.answer.thoughts:
            found["reasoning_content"] = self.answer.thoughts
        if calls:
            found |= {"content": text if text.strip() else None, "tool_calls": calls}
        return found


def finish_reason(answer: Answer) -> str:
    """Why an answer ended, as the API says it."""
    return "tool_calls" if answer.calls and answer.finish_reason == "stop" else answer.finish_reason


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request's prompts, of all choices, of the prompts those that were there already, and of
    the choices those of thoughts."""

    prompt: int
    completion: int
    cached: int
    thoughts: int = 0

    @property
    def document(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.thoughts},
        }


def usage_of(prompts: Sequence[int], choices: Sequence[Choice]) -> Usage:
    """`prompts` are their lengths; a prompt counts once, however many choices it has, and its cached tokens
    as its first choice found them."""
    finished = [(choice.prompt, choice.answer) for choice in choices if choice.answer is not None]
    first = {prompt: answer.reused_tokens for prompt, answer in reversed(finished)}
    return Usage(
        prompt=sum(prompts),
        completion=sum(answer.new_tokens for _, answer in finished),
        cached=sum(first.values()),
        thoughts=sum(answer.thought_tokens for _, answer in finished),
    )


class Form:
    """What all documents of one answer have in common; `is_chat` says which of the two forms they have.

    With `has_usage` each chunk has the field, which is null in all but the last, as in the API.
    """

    def __init__(
        self, model: str, fingerprint: str, *, is_chat: bool, has_logprobs: bool, has_usage: bool = False
    ) -> None:
        self.is_chat = is_chat
        self._more: dict[str, Any] = {"usage": None} if has_usage else {}
        self.has_logprobs = has_logprobs
        self._head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def opening(self, choices: Sequence[Choice]) -> bytes:
        """What a stream begins with: for each choice of a chat, and of a completion that echoes."""
        return b"".join(
            sse.data(self.begin(index, choice.echoed))
            for index, choice in enumerate(choices)
            if self.is_chat or choice.echoed
        )

    def said(self, index: int, piece: Piece, calls: Sequence[dict[str, Any]]) -> bytes:
        """What came of a choice in a stream, of calls as a chat's `tool_calls` have it."""
        return sse.data(self.piece(index, piece, calls))

    def over(self, index: int, answer: Answer) -> bytes:
        """A choice's end in a stream."""
        return sse.data(self.end(index, answer))

    def closing(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """What a stream ends with when all choices are over."""
        return (sse.data(self.usage(usage)) if self._more else b"") + sse.DONE

    def failed(self, error: ApiError) -> bytes:
        """What a stream ends with that cannot go on."""
        return sse.data(error.document)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """All choices at once."""
        kind = "chat.completion" if self.is_chat else "text_completion"
        found = [self._choice(index, choice) for index, choice in enumerate(choices)]
        return {**self._head, "object": kind, "choices": found, "usage": usage.document}

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        assert choice.answer is not None
        said = {"message": choice.message} if self.is_chat else {"text": choice.text}
        return {
            "index": index,
            **said,
            "logprobs": self._logprobs(choice.entries),
            "finish_reason": finish_reason(choice.answer),
        }

    def begin(self, index: int, echoed: str = "") -> dict[str, Any]:
        """The first chunk of a choice: a chat's says who speaks, a completion's has what is `echoed`."""
        said: dict[str, Any] = (
            {"delta": {"role": "assistant", "content": ""}} if self.is_chat else {"text": echoed}
        )
        return self._chunk(index, said, None, None)

    def piece(self, index: int, piece: Piece, calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """A chunk with text, thoughts and what there is of `calls`."""
        if not self.is_chat:
            return self._chunk(index, {"text": piece.text}, self._logprobs(piece.logprobs), None)
        delta: dict[str, Any] = {"content": piece.text} if piece.text or not piece.parts else {}
        if thoughts := thoughts_in(piece.parts):
            delta["reasoning_content"] = thoughts
        if calls:
            delta["tool_calls"] = list(calls)
        return self._chunk(index, {"delta": delta}, self._logprobs(piece.logprobs), None)

    def end(self, index: int, answer: Answer) -> dict[str, Any]:
        """A choice's last chunk."""
        said: dict[str, Any] = {"delta": {}} if self.is_chat else {"text": ""}
        return self._chunk(index, said, None, finish_reason(answer))

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The chunk behind all choices."""
        return {**self._head, "object": self._kind, "choices": [], "usage": usage.document}

    @property
    def _kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _chunk(
        self, index: int, said: dict[str, Any], logprobs: dict[str, Any] | None, reason: str | None
    ) -> dict[str, Any]:
        choice = {"index": index, **said, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head, "object": self._kind, "choices": [choice], **self._more}

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self.has_logprobs:
            return None
        return chat_logprobs(entries) if self.is_chat else completion_logprobs(entries)
