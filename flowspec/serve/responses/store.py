"""Responses that are kept, so that they can be asked for and gone on from: in memory, and only so many; and
the items that they have."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from typing import Any

import msgspec
from msgspec import Struct

from flowspec.serve.documents import ApiError

RESPONSES_MAX = 1024
BYTES_MAX = 64 << 20
"""Of all responses that are kept, each with its whole dialogue, though those of one dialogue have much in
common."""
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
Item = dict[str, Any]


def new_id(kind: str) -> str:
    return f"{_PREFIXES[kind]}_{secrets.token_hex(24)}"


def listed(item: Item) -> Item:
    """An item as a response's are listed: with an id and a state, in parts, without log-probabilities."""
    kind = item.get("type") or "message"
    key, status = item.get("id"), item.get("status")
    found = {
        **{name: value for name, value in item.items() if name != "parsed_arguments"},
        "id": key if isinstance(key, str) and key else new_id(kind),
        "type": kind,
        "status": status if isinstance(status, str) else "completed",
    }
    if kind == "message":
        more: Item = {"type": "input_text"}
        if item["role"] == "assistant":
            more = {"type": "output_text", "annotations": [], "logprobs": []}
        content = item["content"]
        parts = [{"text": content}] if isinstance(content, str) else content
        found["content"] = [
            {name: value for name, value in part.items() if name != "parsed"} | more for part in parts
        ]
    return found


class Kept(Struct, frozen=True):
    """A response as it was given, and the items that it answers: the whole dialogue, without instructions.
    Both are held as the JSON that they are: as objects they would take several times as much memory."""

    document: bytes
    input: bytes
    output_ids: tuple[str, ...] = ()

    @property
    def output(self) -> list[Item]:
        found: list[Item] = msgspec.json.decode(self.document)["output"]
        return found

    @property
    def input_items(self) -> list[Item]:
        return msgspec.json.decode(self.input, type=list[Item])

    @property
    def items(self) -> list[Item]:
        """The dialogue with its answer, as a response that goes on from here answers it."""
        return [*self.input_items, *map(listed, self.output)]

    @property
    def size(self) -> int:
        """Bytes in memory, but for what any response takes."""
        return len(self.document) + len(self.input)


class ResponseStore:
    """The responses that were used last; any thread may call."""

    def __init__(self, responses_max: int = RESPONSES_MAX, bytes_max: int = BYTES_MAX) -> None:
        self._responses_max = responses_max
        self._bytes_max = bytes_max
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def keep(self, name: str, kept: Kept) -> None:
        """Keeps a response under its id; where there are too many, those unused for longest are forgotten."""
        if kept.size > self._bytes_max:
            return
        with self._lock:
            self._kept[name] = kept
            self._bytes += kept.size
            while len(self._kept) > self._responses_max or self._bytes > self._bytes_max:
                self._bytes -= self._kept.popitem(last=False)[1].size

    def find(self, name: str) -> Kept | None:
        """The response of this id, which counts as use."""
        with self._lock:
            if name in self._kept:
                self._kept.move_to_end(name)
            return self._kept.get(name)

    def forget(self, name: str) -> bool:
        """Whether it was there. Responses that went on from it have its dialogue, still."""
        with self._lock:
            found = self._kept.pop(name, None)
            self._bytes -= 0 if found is None else found.size
        return found is not None

    def item(self, name: str) -> Item | None:
        """The item of this id in the output of a response that is kept."""
        with self._lock:
            found = next((each for each in self._kept.values() if name in each.output_ids), None)
        return None if found is None else found.output[found.output_ids.index(name)]

    def get(self, name: str, param: str | None, code: str) -> Kept:
        """The response of this id; raises `ApiError` with these where there is none."""
        if (found := self.find(name)) is not None:
            return found
        text = (
            f"there is no response {name!r:.80} here; this server keeps the last {self._responses_max} in "
            "memory, fewer where they are large, until it ends, and none asked for with store false; send "
            "the whole dialogue as input"
        )
        raise ApiError(404, text, param, code)
