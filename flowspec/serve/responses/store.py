"""Responses that are kept, so that they can be asked for and gone on from: in memory, and only so many."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from flowspec.serve.refusals import ApiError
from flowspec.serve.responses.items import Message

RESPONSES_MAX = 1024
BYTES_MAX = 64 << 20
"""Of all responses that are kept, as JSON, each with its whole dialogue, though those of one dialogue share
what they have in common."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A response as it was given, and the dialogue with its answer, without instructions; their sizes in
    bytes, as JSON."""

    document: dict[str, Any]
    dialogue: tuple[Message, ...]
    document_bytes: int
    dialogue_bytes: int

    @property
    def output(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.document.get("output", [])
        return found

    @property
    def size(self) -> int:
        return self.document_bytes + self.dialogue_bytes


class ResponseStore:
    """The responses that were used last; any thread may call."""

    def __init__(self, responses_max: int = RESPONSES_MAX, bytes_max: int = BYTES_MAX) -> None:
        self._responses_max = responses_max
        self._bytes_max = bytes_max
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._items: dict[str, dict[str, Any]] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def keep(self, name: str, kept: Kept) -> None:
        """Keeps a response under its id, and forgets those that were not used for the longest time where
        there are too many. One that is too large alone is not kept."""
        with self._lock:
            if kept.size > self._bytes_max:
                return
            self._kept[name] = kept
            self._bytes += kept.size
            self._items |= {item["id"]: item for item in kept.output}
            while len(self._kept) > self._responses_max or self._bytes > self._bytes_max:
                self._drop(next(iter(self._kept)))

    def find(self, name: str) -> Kept | None:
        """The response of this id, which counts as use."""
        with self._lock:
            found = self._kept.get(name)
            if found is not None:
                self._kept.move_to_end(name)
            return found

    def forget(self, name: str) -> bool:
        """Whether it was there. Responses that went on from it have its dialogue, still."""
        with self._lock:
            return self._drop(name)

    def item(self, name: str) -> dict[str, Any] | None:
        """The item of this id, of a response that is kept."""
        with self._lock:
            return self._items.get(name)

    def _drop(self, name: str) -> bool:
        found = self._kept.pop(name, None)
        if found is None:
            return False
        self._bytes -= found.size
        for item in found.output:
            del self._items[item["id"]]
        return True

    def missing(self, name: str, param: str | None, code: str) -> ApiError:
        """What is said of an id that nothing is kept under."""
        return ApiError(
            404,
            f"there is no response {name!r:.80} here; this server keeps the last {self._responses_max} in "
            "memory, fewer where they are large, until it ends, and none asked for with store false; send "
            "the whole dialogue as input",
            param,
            code,
        )
