"""An answer as the Responses API's documents: a response whole, or as typed events that build it up."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from flowspec.core.protocol.messages import Sampling
from flowspec.runtime.answer import Answer, Piece
from flowspec.runtime.token_log import TokenLogprob
from flowspec.serve import sse
from flowspec.serve.documents import Choice, Usage
from flowspec.serve.refusals import ApiError
from flowspec.serve.responses.request import ResponseRequest
from flowspec.serve.responses.store import Kept
from flowspec.serve.tokens import chat_logprobs

Keep = Callable[[str, Kept], None]


class ResponseForm:
    """What one response says of itself; `keep` is given it when it is over, before its client is told.

    Its events are numbered from 0, and each text is the events' pieces put together.
    """

    def __init__(self, model: str, wanted: ResponseRequest, sampling: Sampling, keep: Keep) -> None:
        self._wanted = wanted
        self._keep = keep
        self._id = f"resp_{secrets.token_hex(24)}"
        self._message_id = f"msg_{secrets.token_hex(24)}"
        self._choice = Choice(0)
        self._count = 0
        self._has_logprobs = wanted.params.logprobs is not None
        self._head: dict[str, Any] = {
            "id": self._id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "background": False,
            "service_tier": "default",
            "truncation": "disabled",
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            **wanted.said,
        }

    # --------------------------------------------------------------------------------------------- whole

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """The response when it is over; from now on it is kept."""
        answer = choices[0].answer
        assert answer is not None
        is_cut = answer.finish_reason == "length"
        document = {
            **self._response("incomplete" if is_cut else "completed"),
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [self._message(choices[0])],
            "usage": _usage(usage),
        }
        if self._wanted.is_kept:
            said = {"role": "assistant", "content": "".join(choices[0].text)}
            size = self._wanted.dialogue_bytes + len(json.dumps(document["output"]))
            self._keep(self._id, Kept(document, (*self._wanted.dialogue, said), size))
        return document

    def _response(self, status: str) -> dict[str, Any]:
        """What it is before anything is said."""
        return {
            **self._head,
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
        }

    def _message(self, choice: Choice) -> dict[str, Any]:
        is_cut = choice.answer is not None and choice.answer.finish_reason == "length"
        return {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "status": "incomplete" if is_cut else "completed",
            "content": [self._part("".join(choice.text), choice.entries)],
        }

    def _part(self, text: str, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs(entries)}

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        return chat_logprobs(entries)["content"] if self._has_logprobs else []

    # -------------------------------------------------------------------------------------------- events

    def opening(self, count: int) -> bytes:
        """What a stream begins with."""
        return self._event("response.created", response=self._response("in_progress")) + self._event(
            "response.in_progress", response=self._response("in_progress")
        )

    def said(self, index: int, piece: Piece) -> bytes:
        """A piece of the text."""
        begun = b"" if self._choice.text else self._begin_message()
        self._choice.add(piece)
        return begun + self._text_event(
            "response.output_text.delta", delta=piece.text, logprobs=self._logprobs(piece.logprobs)
        )

    def over(self, index: int, answer: Answer) -> bytes:
        """The end of the text, also of one that never began."""
        begun = b"" if self._choice.text else self._begin_message()
        self._choice.add(answer)
        message = self._message(self._choice)
        part = message["content"][0]
        return b"".join(
            (
                begun,
                self._text_event("response.output_text.done", text=part["text"], logprobs=part["logprobs"]),
                self._text_event("response.content_part.done", part=part),
                self._event("response.output_item.done", output_index=0, item=message),
            )
        )

    def closing(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The whole response, behind all else."""
        document = self.whole([self._choice], usage)
        return self._event(f"response.{document['status']}", response=document)

    def failed(self, error: ApiError) -> bytes:
        """The end of a response that cannot go on."""
        told = {"code": "server_error", "message": error.message}
        return self._event("response.failed", response={**self._response("failed"), "error": told})

    def _begin_message(self) -> bytes:
        item = {**self._message(self._choice), "status": "in_progress", "content": []}
        return self._event("response.output_item.added", output_index=0, item=item) + self._text_event(
            "response.content_part.added", part=self._part("", ())
        )

    def _text_event(self, name: str, **fields: Any) -> bytes:
        return self._event(name, item_id=self._message_id, output_index=0, content_index=0, **fields)

    def _event(self, name: str, **fields: Any) -> bytes:
        number, self._count = self._count, self._count + 1
        return sse.event(name, {"type": name, "sequence_number": number, **fields})


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt + usage.completion,
    }
