"""Answers as the API's documents, whole or in chunks, in the form of chats or of completions."""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from flowspec.model.reply.parts import Part, new_call_id
from flowspec.plan.placement import ClusterPlan
from flowspec.runtime.answer import Answer, Piece
from flowspec.runtime.question import Question
from flowspec.runtime.token_log import TokenLogprob, TopLogprob
from flowspec.serve import documents as api
from flowspec.serve.completion_request import CompletionRequest
from flowspec.serve.documents import ApiError
from flowspec.version import __version__


def fingerprint_of(plan: ClusterPlan, arithmetic: str, grammars: str = "") -> str:
    """`system_fingerprint`: of all that an answer depends on beside the request. `grammars` is what obeys
    them, and its version."""
    parts = (plan.fingerprint, plan.dtype, plan.cache, arithmetic, plan.context, grammars, __version__)
    text = " ".join(map(str, parts))
    return f"fp_{hashlib.sha256(text.encode()).hexdigest()[:16]}"


@dataclass(slots=True)
class Choice:
    """One answer as far as it has come, and the whole `answer` once it is over. `index` is its place in the
    request, `prompt` its prompt's; `new_id` makes ids for calls. Its text begins with what is `echoed`."""

    question: Question
    index: int = 0
    prompt: int = 0
    new_id: Callable[[], str] = new_call_id
    echoed: str = ""
    pieces: list[Piece] = field(default_factory=list)
    answer: Answer = field(init=False, repr=False)
    _calls: int = 0

    def add(self, event: Piece | Answer) -> None:
        if isinstance(event, Answer):
            self.answer = event
        else:
            self.pieces.append(event)

    def calls_in(self, parts: Sequence[Part]) -> list[api.Call]:
        """What came of calls, as a chunk has it, with at most one entry for each call."""
        found: dict[int, api.Call] = {}
        for part in parts:
            if part.kind == "name":
                index, function = self._calls, api.Function("", part.text)
                found[index] = api.Call(index=index, id=self.new_id(), type="function", function=function)
                self._calls += 1
            elif part.kind == "arguments":
                index = self._calls - 1
                call = found.setdefault(index, api.Call(index=index, function=api.Function("")))
                call.function.arguments += part.text
        return list(found.values())


def thoughts_in(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if part.kind == "thought")


def usage_of(choices: Sequence[Choice]) -> api.Usage:
    """Tokens of answers that are over; a prompt counts once, however many choices it has, and its cached
    tokens as its first choice found them."""
    answers = [choice.answer for choice in choices]
    first = {choice.prompt: choice.answer for choice in reversed(choices)}.values()
    prompt, completion = sum(each.prompt_tokens for each in first), sum(each.new_tokens for each in answers)
    return api.Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details={"cached_tokens": sum(each.reused_tokens for each in first)},
        completion_tokens_details={"reasoning_tokens": sum(each.thought_tokens for each in answers)},
    )


class CompletionForm:
    """What all documents of one request's answers have in common, in the form of chats or of completions."""

    def __init__(self, model: str, fingerprint: str, wanted: CompletionRequest[Any]) -> None:
        self._wanted = wanted
        options = wanted.body.stream_options
        self._includes_usage = bool(options and options.include_usage)
        self._is_chat = is_chat = isinstance(wanted.prompts[0], list)
        self._head = api.Completion(
            id=f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            created=int(time.time()),
            model=model,
            system_fingerprint=fingerprint,
            object="chat.completion" if is_chat else "text_completion",
        )
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        self._chunk_head = replace(self._head, object=kind, usage=None if self._includes_usage else UNSET)

    def whole(self, choices: Sequence[Choice]) -> bytes:
        found = []
        for choice in choices:
            piece = Piece(
                text=choice.echoed + "".join(piece.text for piece in choice.pieces),
                parts=tuple(part for piece in choice.pieces for part in piece.parts),
                logprobs=tuple(entry for piece in choice.pieces for entry in piece.logprobs),
            )
            message = self._message(choice, piece)
            message.role, message.refusal = "assistant", None
            message.content = piece.text if piece.text.strip() or not message.tool_calls else None
            for call in message.tool_calls or ():
                call.index = UNSET
            told = self._choice(choice, message, piece.logprobs, choice.answer)
            told.message, told.delta = told.delta, UNSET
            found.append(told)
        return msgspec.json.encode(replace(self._head, choices=found, usage=usage_of(choices)))

    def begin(self, choices: Sequence[Choice]) -> bytes:
        """What a stream begins with: a chat's choices say who speaks, a completion's what is echoed."""
        begun = [each for each in choices if self._is_chat or each.echoed]
        said = [self._chunk(each, api.Message(role="assistant", content=each.echoed)) for each in begun]
        return b"".join(said)

    def say(self, choice: Choice, piece: Piece) -> bytes:
        return self._chunk(choice, self._message(choice, piece), piece.logprobs)

    def end(self, choice: Choice) -> bytes:
        return self._chunk(choice, api.Message(), None, choice.answer)

    def finish(self, choices: Sequence[Choice]) -> bytes:
        if not self._includes_usage:
            return api.DONE
        return api.frame(replace(self._chunk_head, usage=usage_of(choices))) + api.DONE

    def fail(self, error: ApiError) -> bytes:
        return api.frame(error.document)

    def _message(self, choice: Choice, piece: Piece) -> api.Message:
        return api.Message(
            content=piece.text if piece.text or not piece.parts else UNSET,
            reasoning_content=thoughts_in(piece.parts) or UNSET,
            tool_calls=choice.calls_in(piece.parts) or UNSET,
        )

    def _chunk(self, *of: Any) -> bytes:
        return api.frame(replace(self._chunk_head, choices=[self._choice(*of)]))

    def _choice(
        self, choice: Choice, said: api.Message, entries: Any = None, answer: Answer | None = None
    ) -> api.Choice:
        """What was said, with its tokens where it has any, and why it ended where there is an answer."""
        has_logprobs = self._wanted.params.logprobs is not None and entries is not None
        reason = None if answer is None else answer.finish_reason
        if answer is not None and answer.calls and reason == "stop":
            reason = "tool_calls"
        return api.Choice(
            index=choice.index,
            delta=said if self._is_chat else UNSET,
            text=UNSET if self._is_chat else said.content or "",
            logprobs=self._logprobs(entries) if has_logprobs else None,
            finish_reason=reason,
        )

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> api.Logprobs:
        if self._is_chat:
            return api.Logprobs(content=[*map(logprob_of, entries)], refusal=None)
        return api.Logprobs(
            tokens=[token_name(entry.content) for entry in entries],
            token_logprobs=[entry.logprob for entry in entries],
            top_logprobs=[  # the token itself is among the likeliest, as in the API
                {token_name(each.content): each.logprob for each in entry.top}
                | {token_name(entry.content): entry.logprob}
                for entry in entries
            ],
            text_offset=[entry.offset for entry in entries],
        )


def token_name(content: bytes) -> str:
    """A token as text; one that is only a part of a character as `bytes:\\\\xe2\\\\x80`."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + re.sub("..", r"\\x\g<0>", content.hex())


def logprob_of(entry: TokenLogprob | TopLogprob) -> api.Logprob:
    """A token with its log-probability; one that was chosen also with the likeliest in its place."""
    top = [logprob_of(other) for other in entry.top] if isinstance(entry, TokenLogprob) else UNSET
    return api.Logprob(token_name(entry.content), entry.logprob, list(entry.content), top)
