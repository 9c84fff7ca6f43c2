"""An answer as the Responses API's documents: a response whole, or as typed events that build it up; and the
items that it answers, page by page."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw

from flowspec.core.protocol.messages import Sampling
from flowspec.runtime.answer import Piece
from flowspec.serve import documents as api
from flowspec.serve.completion_form import Choice, logprob_of, thoughts_in, usage_of
from flowspec.serve.completion_request import CompletionRequest, TextFormat
from flowspec.serve.documents import ApiError, invalid
from flowspec.serve.responses.request import INCLUDABLE, ResponseBody
from flowspec.serve.responses.store import Item, Kept, new_id
from flowspec.validation import Document, Misfit, fit

Kind = Literal["message", "reasoning", "function_call"]
_TEXTS: dict[Kind, Any] = {
    "message": "output_text",
    "reasoning": "reasoning_text",
    "function_call": "function_call_arguments",
}
"""What the text of an item is called by kind."""
_REPEATED = "instructions max_output_tokens max_tool_calls metadata parallel_tool_calls previous_response_id "
_REPEATED += "store tool_choice tools top_logprobs"
"""Fields of a request that its response has as they are."""
_INCLUDED = rf"^({'|'.join(map(re.escape, INCLUDABLE))})\Z"
_TO_100 = r"^(0{0,2}[1-9]|0?[1-9][0-9]|100)\Z"


class ResponseForm:
    """What one response says of itself; `keep` is given it when it is over, before its client is told. One
    that is told at once is made of the same events, which nobody hears. Space beside calls is no message."""

    def __init__(
        self,
        model: str,
        wanted: CompletionRequest[ResponseBody],
        sampling: Sampling,
        keep: Callable[[str, Kept], None],
    ) -> None:
        asked = wanted.body
        self._wanted = wanted
        self._keep = keep
        self._items: list[api.OutputItem] = []
        self._open: dict[Kind, api.OutputItem] = {}  # those that go on, of each kind one at most
        self._texts: dict[Kind, list[str]] = {}  # theirs so far
        self._logprobs: list[api.Logprob] = []
        self._held = Piece(text="")  # of the message that has not begun: space, and log-probabilities
        self._frames: list[bytes] = []
        self._count = 0
        self._response = api.Response(
            id=f"resp_{secrets.token_hex(24)}",
            created_at=int(time.time()),
            model=model,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            reasoning={"effort": wanted.effort, "summary": None},
            text={"format": (asked.text and asked.text.format) or TextFormat()},
            **{name: said for name in _REPEATED.split() if (said := getattr(asked, name)) is not None},
        )

    def whole(self, choices: Sequence[Choice]) -> bytes:
        """The response when it is over; from now on it is kept."""
        (choice,) = choices
        for piece in choice.pieces:
            self.say(choice, piece)
        self.end(choice)
        return self._finished(choice)

    def begin(self, choices: Sequence[Choice]) -> bytes:
        self._tell("response.created", response=self._response)
        self._tell("response.in_progress", response=self._response)
        return self._told()

    def say(self, choice: Choice, piece: Piece) -> bytes:
        if thoughts := thoughts_in(piece.parts):
            if "reasoning" not in self._open:
                self._add("reasoning", summary=[], content=[])
            self._extend("reasoning", thoughts)
        held = self._held
        self._held = Piece(text=held.text + piece.text, logprobs=(*held.logprobs, *piece.logprobs))
        if "message" in self._open or piece.text.strip():
            self._speak()
        for call in choice.calls_in(piece.parts):
            if call.id:
                self._close("reasoning")
                self._close("function_call")
                self._add("function_call", call_id=call.id, name=call.function.name, arguments="")
            if call.function.arguments:
                self._extend("function_call", call.function.arguments)
        return self._told()

    def end(self, choice: Choice) -> bytes:
        """The end of all that is still open; an answer without calls has a message, if an empty one."""
        if "function_call" not in self._open:
            self._speak()
        self._response.status = "incomplete" if choice.answer.finish_reason == "length" else "completed"
        for kind in list(self._open):
            self._close(kind, self._response.status)
        return self._told()

    def finish(self, choices: Sequence[Choice]) -> bytes:
        document = self._finished(*choices)
        self._tell(f"response.{self._response.status}", response=Raw(document))
        return self._told()

    def fail(self, error: ApiError) -> bytes:
        self._response.status = "failed"
        self._response.error = {"code": "server_error", "message": error.message}
        self._tell("response.failed", response=self._response)
        return self._told()

    def _finished(self, choice: Choice) -> bytes:
        found, usage = self._response, usage_of([choice])
        if found.status == "completed":
            found.completed_at = int(time.time())
        else:
            found.incomplete_details = {"reason": "max_output_tokens"}
        found.output = self._items
        found.usage = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {**usage.prompt_tokens_details, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": usage.completion_tokens_details,
            "total_tokens": usage.total_tokens,
        }
        document = msgspec.json.encode(found)
        if found.store:
            ids = tuple(item.id for item in self._items)
            self._keep(found.id, Kept(document, self._wanted.items, ids))
        return document

    def _speak(self) -> None:
        """Tells what is held of the message, which begins here if it has not."""
        held, self._held = self._held, Piece(text="")
        if "message" not in self._open:
            self._close("reasoning")
            self._add("message", role="assistant", content=[])
            part = api.Part("output_text", "", [], [])
            self._tell("response.content_part.added", "message", part=part)
        if held.text or held.logprobs:
            logprobs = [*map(logprob_of, held.logprobs)]
            self._logprobs += logprobs
            self._extend("message", held.text, logprobs=logprobs)

    def _add(self, kind: Kind, **fields: Any) -> None:
        item = api.OutputItem(id=new_id(kind), type=kind, **fields)
        self._items.append(item)
        self._open[kind], self._texts[kind] = item, []
        self._tell("response.output_item.added", output_index=len(self._items) - 1, item=item)

    def _extend(self, kind: Kind, text: str, **more: Any) -> None:
        self._texts[kind].append(text)
        self._tell(f"response.{_TEXTS[kind]}.delta", kind, delta=text, **more)

    def _close(self, kind: Kind, status: api.Status = "completed") -> None:
        """The end of the item of this kind that goes on, if one does."""
        if (item := self._open.get(kind)) is None:
            return
        item.status, text = status, "".join(self._texts[kind])
        done = f"response.{_TEXTS[kind]}.done"
        if kind == "function_call":
            item.arguments = text
            self._tell(done, kind, name=item.name, arguments=text)
        else:
            own: dict[str, Any] = {"logprobs": self._logprobs} if kind == "message" else {}
            part = api.Part(_TEXTS[kind], text, [] if own else UNSET, **own)
            item.content = [part]
            self._tell(done, kind, text=text, **own)
            if own:
                self._tell("response.content_part.done", kind, part=part)
        self._tell("response.output_item.done", output_index=self._items.index(item), item=item)
        del self._open[kind]

    def _tell(self, name: str, of: Kind | None = None, /, **fields: Any) -> None:
        """Tells the stream an event, `of` the item of this kind that goes on."""
        event: dict[str, Any] = {"type": name, "sequence_number": self._count}
        if of is not None:
            item = self._open[of]
            event |= {"item_id": item.id, "output_index": self._items.index(item)}
            event |= {} if of == "function_call" else {"content_index": 0}
        self._frames.append(api.frame(event | fields, name))
        self._count += 1

    def _told(self) -> bytes:
        frames, self._frames = self._frames, []
        return b"".join(frames)


class _Query(Document, frozen=True, kw_only=True):
    limit: Annotated[str, Meta(pattern=_TO_100, description="a whole number from 1 to 100")] = "20"
    order: Annotated[Literal["desc", "asc"], Meta(description="desc or asc")] = "desc"
    after: str | None = None
    include: Annotated[str, Meta(pattern=_INCLUDED, description=f"some of {', '.join(INCLUDABLE)}")] = ""


def page_of(items: Sequence[Item], query: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """The items that a query asks for, its names and values as they came. Raises `ApiError`."""
    pairs = [("include" if name == "include[]" else name, value) for name, value in query]
    try:
        for pair in pairs:  # the last of a name counts, and all are checked
            fit(dict([pair]), _Query)
        asked = fit(dict(pairs), _Query)
    except Misfit as error:
        code = "unknown_parameter" if error.is_unknown else "invalid_value"
        raise ApiError(400, str(error), error.field[:80], code) from None
    ordered = list(items) if asked.order == "asc" else list(reversed(items))
    if asked.after is not None:
        ids = [item["id"] for item in ordered]
        if asked.after not in ids:
            raise invalid("after", "the id of an item in this list", asked.after)
        ordered = ordered[ids.index(asked.after) + 1 :]
    page = ordered[: int(asked.limit)]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    more = {"first_id": first, "last_id": last, "has_more": len(page) < len(ordered)}
    return {"object": "list", "data": page, **more}
