"""An answer on its way from the head's thread to whoever asked."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from flowspec.errors import FlowSpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """New tokens of an answer, and when they were known."""

    tokens: tuple[int, ...]
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The answer is over; `reason` is `stop`, `length` or `cancelled`. `statistics` is `core.statistics` as it is reported."""

    reason: str
    reused: int
    statistics: dict[str, Any]


@dataclass(slots=True)
class Answer:
    """An answer under way: iterate for its `Tokens`; `end` is set afterwards. `core_s` is the head core's time for it."""

    request: int
    submitted_s: float
    end: End | None = None
    core_s: float = 0.0
    items: queue.SimpleQueue[Tokens | End | FlowSpecError] = field(default_factory=queue.SimpleQueue)

    def __iter__(self) -> Iterator[Tokens]:
        while self.end is None:
            item = self.items.get()
            if isinstance(item, FlowSpecError):
                raise item
            if isinstance(item, End):
                self.end = item
            else:
                yield item
