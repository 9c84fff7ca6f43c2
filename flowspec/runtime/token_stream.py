"""The tokens of an answer on their way from the head's thread to whoever asked, and when they came."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowspec.core.protocol.messages import Logprobs
from flowspec.errors import FlowSpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """New tokens of an answer, and when they were known; `logprobs` are one for each if they are wanted, else
    none."""

    tokens: tuple[int, ...]
    at_s: float
    logprobs: tuple[Logprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The answer is over; `reason` is `stop`, `length` or `cancelled`. `statistics` is `core.head.statistics`
    as it is reported."""

    reason: str
    reused: int
    statistics: dict[str, Any]


Item = Tokens | End | FlowSpecError


@dataclass(slots=True)
class TokenStream:
    """The tokens of an answer under way: iterate for its `Tokens`; `end` is set afterwards.

    `core_s` is the core's time for it. `number` tells it from others of the same conversation. One that
    `is_bound` has a grammar.
    """

    request: int
    submitted_s: float
    number: int = 0
    end: End | None = None
    core_s: float = 0.0
    is_bound: bool = False
    items: queue.SimpleQueue[Item] = field(default_factory=queue.SimpleQueue)

    def __iter__(self) -> Iterator[Tokens]:
        while self.end is None:
            item = self.items.get()
            if isinstance(item, FlowSpecError):
                raise item
            if isinstance(item, End):
                self.end = item
            else:
                yield item


@dataclass(slots=True)
class Timing:
    """When an answer's tokens came and it ended, in seconds from its submission; the first `resumed` of them
    were there before."""

    first_s: float = 0.0
    last_s: float = 0.0
    ended_s: float = 0.0
    new_tokens: list[int] = field(default_factory=list)
    resumed: int = 0

    def add(self, tokens: Sequence[int], after_s: float) -> None:
        if len(self.new_tokens) == self.resumed:
            self.first_s = after_s
        self.last_s = after_s
        self.new_tokens += tokens

    @property
    def decode_s(self) -> float:
        """From the first to the last token."""
        return self.last_s - self.first_s

    @property
    def tokens_per_s(self) -> float:
        """`(new_tokens - 1) / decode_s` of those that were computed; 0 for answers too short to tell."""
        return (len(self.new_tokens) - self.resumed - 1) / self.decode_s if self.decode_s > 0 else 0.0


def timed(stream: TokenStream, timing: Timing) -> Iterator[tuple[int, ...]]:
    """The tokens of an answer as they come, noting their times."""
    for batch in stream:
        timing.add(batch.tokens, batch.at_s - stream.submitted_s)
        yield batch.tokens
