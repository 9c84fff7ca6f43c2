"""Responses that are kept, so that they can be asked for and gone on from: in memory, and only so many."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from flowspec.serve.refusals import ApiError
from flowspec.serve.responses.items import Item, listed

RESPONSES_MAX = 1024
BYTES_MAX = 64 << 20
"""Of all responses that are kept, each with its whole dialogue, though those of one dialogue have much in
common."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A response as it was given, and the items that it answers: the whole dialogue, without instructions.

    Both are held as the JSON that they are (as objects they would take several times as much memory) and read
    when somebody asks. `output_ids` are those of the items of the response's output.
    """

    document: bytes
    input: bytes
    output_ids: tuple[str, ...] = ()

    @property
    def response(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.document)
        return found

    @property
    def input_items(self) -> list[Item]:
        found: list[Item] = json.loads(self.input)
        return found

    @property
    def items(self) -> list[Item]:
        """The dialogue with its answer, as a response that goes on from here answers it."""
        return [*self.input_items, *(listed(item) for item in self.response["output"])]

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
        self._owners: dict[str, str] = {}
        """By the ids of items, the responses that have them in their output."""
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
            self._owners |= dict.fromkeys(kept.output_ids, name)
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

    def item(self, name: str) -> Item | None:
        """The item of this id in the output of a response that is kept."""
        with self._lock:
            found = self._kept.get(self._owners.get(name, ""))
        return (
            None if found is None else next(each for each in found.response["output"] if each["id"] == name)
        )

    def _drop(self, name: str) -> bool:
        found = self._kept.pop(name, None)
        if found is None:
            return False
        self._bytes -= found.size
        for item in found.output_ids:
            del self._owners[item]
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
