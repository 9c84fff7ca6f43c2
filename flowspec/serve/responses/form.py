"""An answer as the Responses API's documents: a response whole, or as typed events that build it up."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowspec.core.protocol.messages import Sampling
from flowspec.runtime.answer import Answer, Piece
from flowspec.runtime.token_log import TokenLogprob
from flowspec.serve import sse
from flowspec.serve.calls import CallDeltas, thoughts_in
from flowspec.serve.documents import Choice, Usage
from flowspec.serve.fields import json_of
from flowspec.serve.refusals import ApiError
from flowspec.serve.responses.items import new_id
from flowspec.serve.responses.request import ResponseRequest
from flowspec.serve.responses.store import Kept
from flowspec.serve.tokens import chat_logprobs

Keep = Callable[[str, Kept], None]


@dataclass(slots=True)
class _Item:
    """One item of a response's output, at its `place` there, as far as it has come: a message, thoughts, or a
    call of the function `name`."""

    kind: str
    place: int
    id: str
    call_id: str = ""
    name: str = ""
    texts: list[str] = field(default_factory=list)
    entries: list[TokenLogprob] = field(default_factory=list)
    status: str = "in_progress"

    @property
    def text(self) -> str:
        return "".join(self.texts)


class ResponseForm:
    """What one response says of itself; `keep` is given it when it is over, before its client is told.

    Its events are numbered from 0, and each text is the events' pieces put together. A response that is told
    at once is made of the same events, which nobody hears. Space beside calls is no message.
    """

    def __init__(self, model: str, wanted: ResponseRequest, sampling: Sampling, keep: Keep) -> None:
        self._wanted = wanted
        self._keep = keep
        self._id = f"resp_{secrets.token_hex(24)}"
        self._items: list[_Item] = []
        self._calls: dict[int, _Item] = {}
        self._held = Piece(text="")
        """Of the message that has not begun: space, and log-probabilities."""
        self._count = 0
        self._is_cut = False
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
        (choice,) = choices
        assert choice.answer is not None
        calls = CallDeltas(choice.new_id)
        for piece in choice.pieces:
            self.said(0, piece, calls.add(piece.parts))
        self.over(0, choice.answer)
        return self._finished(usage)

    def _finished(self, usage: Usage) -> dict[str, Any]:
        is_cut = self._is_cut
        document = {
            **self._response("incomplete" if is_cut else "completed"),
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [self._document(item) for item in self._items],
            "usage": _usage(usage),
        }
        if self._wanted.is_kept:
            ids = tuple(item.id for item in self._items)
            self._keep(self._id, Kept(json_of(document), self._wanted.items, ids))
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

    def _document(self, item: _Item) -> dict[str, Any]:
        said: dict[str, Any]
        if item.kind == "function_call":
            said = {"call_id": item.call_id, "name": item.name, "arguments": item.text}
        elif item.kind == "reasoning":
            said = {"summary": [], "content": [{"type": "reasoning_text", "text": item.text}]}
        else:
            said = {"role": "assistant", "content": [self._part(item.text, item.entries)]}
        return {"id": item.id, "type": item.kind, "status": item.status, **said}

    def _part(self, text: str, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs(entries)}

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        return chat_logprobs(entries)["content"] if self._has_logprobs else []

    # -------------------------------------------------------------------------------------------- events

    def opening(self, choices: Sequence[Choice]) -> bytes:
        """What a stream begins with."""
        return self._event("response.created", response=self._response("in_progress")) + self._event(
            "response.in_progress", response=self._response("in_progress")
        )

    def said(self, index: int, piece: Piece, calls: Sequence[dict[str, Any]] = ()) -> bytes:
        """What came: thoughts, text, and of calls what a chat's `tool_calls` have."""
        frames = [self._think(thoughts_in(piece.parts)), self._say(piece.text, piece.logprobs)]
        return b"".join((*frames, *(self._call(entry) for entry in calls)))

    def over(self, index: int, answer: Answer) -> bytes:
        """The end of all that is still open; an answer without calls has a message, if an empty one."""
        self._is_cut = answer.finish_reason == "length"
        begun = b"" if self._calls else self._speak()
        status = "incomplete" if self._is_cut else "completed"
        return begun + b"".join(self._close(item, status) for item in self._items)

    def closing(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The whole response, behind all else."""
        document = self._finished(usage)
        return self._event(f"response.{document['status']}", response=document)

    def failed(self, error: ApiError) -> bytes:
        """The end of a response that cannot go on."""
        told = {"code": "server_error", "message": error.message}
        return self._event("response.failed", response={**self._response("failed"), "error": told})

    def _think(self, text: str) -> bytes:
        if not text:
            return b""
        item, begun = self._open("reasoning")
        item.texts.append(text)
        return begun + self._item_event("response.reasoning_text.delta", item, content_index=0, delta=text)

    def _say(self, text: str, entries: Sequence[TokenLogprob]) -> bytes:
        held = self._held
        self._held = Piece(text=held.text + text, logprobs=(*held.logprobs, *entries))
        return self._speak() if self._is_speaking or text.strip() else b""

    @property
    def _is_speaking(self) -> bool:
        return any(item.kind == "message" for item in self._items)

    def _speak(self) -> bytes:
        """What is held of the message, which begins here if it has not."""
        said, self._held = self._held, Piece(text="")
        frames = []
        if not self._is_speaking:
            frames.append(self._close_thoughts())
            item, begun = self._open("message")
            part = self._part("", ())
            frames += [
                begun,
                self._item_event("response.content_part.added", item, content_index=0, part=part),
            ]
        if said.text or said.logprobs:
            item, _ = self._open("message")
            item.texts.append(said.text)
            item.entries += said.logprobs
            told = {"delta": said.text, "logprobs": self._logprobs(said.logprobs)}
            frames.append(self._item_event("response.output_text.delta", item, content_index=0, **told))
        return b"".join(frames)

    def _call(self, entry: dict[str, Any]) -> bytes:
        """A part of a call: its first has an id and a name."""
        function, closed, begun = entry["function"], b"", b""
        if entry["index"] not in self._calls:
            closed = self._close_thoughts() + b"".join(
                self._close(item, "completed") for item in self._calls.values()
            )
            item, begun = self._open("function_call", call_id=entry["id"], name=function["name"])
            self._calls[entry["index"]] = item
        item, arguments = self._calls[entry["index"]], function["arguments"]
        if not arguments:
            return closed + begun
        item.texts.append(arguments)
        delta = self._item_event("response.function_call_arguments.delta", item, delta=arguments)
        return closed + begun + delta

    def _open(self, kind: str, *, call_id: str = "", name: str = "") -> tuple[_Item, bytes]:
        """The item of this kind, thoughts or the message, if it is there and goes on; else a new one, and the
        event that it has begun."""
        for item in self._items:
            if item.kind == kind != "function_call" and item.status == "in_progress":
                return item, b""
        item = _Item(kind, len(self._items), new_id(kind), call_id, name)
        self._items.append(item)
        document = self._document(item)
        if "content" in document:
            document["content"] = []
        return item, self._event("response.output_item.added", output_index=item.place, item=document)

    def _close_thoughts(self) -> bytes:
        return b"".join(self._close(item, "completed") for item in self._items if item.kind == "reasoning")

    def _close(self, item: _Item, status: str) -> bytes:
        """The end of an item; nothing where that was told."""
        if item.status != "in_progress":
            return b""
        item.status = status
        document = self._document(item)
        if item.kind == "function_call":
            ended = self._item_event(
                "response.function_call_arguments.done", item, name=item.name, arguments=item.text
            )
        elif item.kind == "reasoning":
            ended = self._item_event("response.reasoning_text.done", item, content_index=0, text=item.text)
        else:
            (part,) = document["content"]
            ended = self._item_event(
                "response.output_text.done",
                item,
                content_index=0,
                text=item.text,
                logprobs=part["logprobs"],
            ) + self._item_event("response.content_part.done", item, content_index=0, part=part)
        return ended + self._event("response.output_item.done", output_index=item.place, item=document)

    def _item_event(self, kind: str, item: _Item, /, **fields: Any) -> bytes:
        return self._event(kind, item_id=item.id, output_index=item.place, **fields)

    def _event(self, kind: str, /, **fields: Any) -> bytes:
        number, self._count = self._count, self._count + 1
        return sse.event(kind, {"type": kind, "sequence_number": number, **fields})


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.thoughts},
        "total_tokens": usage.prompt + usage.completion,
    }
