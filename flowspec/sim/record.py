"""What is written down of a run in virtual time: answers with the instants of their tokens, and a digest of
everything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from flowspec.core.head.events import Drafted, Finished, HeadEvent, Submit
from flowspec.core.protocol.messages import Logprobs
from flowspec.core.stage.events import LayersDone, StageEvent

HEAD = -1
"""The head's place; stages are 0, 1, ..."""


@dataclass(slots=True)
class SimulatedAnswer:
    """One answer of a request: its new tokens, when the head knew each, and their log-probabilities if they
    were wanted."""

    submit: Submit
    submitted_s: float
    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    end: Finished | None = None
    ended_s: float = float("nan")

    @property
    def text(self) -> list[int]:
        """The whole answer: what another head began, and the rest."""
        return [*self.submit.answered, *self.tokens]


class Digest:
    """A hash over every event: when, where, and the bytes of its frames or its own content. Equal runs have
    equal digests."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=16)

    def add(
        self, now_s: float, place: int, event: HeadEvent | StageEvent, frames: Sequence[bytes | memoryview]
    ) -> None:
        self._hash.update(
            f"{now_s!r} {place} {type(event).__name__} {'' if frames else _content(event)}".encode()
        )
        for frame in frames:
            self._hash.update(frame)

    def hex(self) -> str:
        return self._hash.hexdigest()


def _content(event: HeadEvent | StageEvent) -> str:
    """What an event that came in no frame says; nothing whose `repr` differs between processes."""
    if isinstance(event, LayersDone):
        return f"{event.job} {event.rows} {event.next_tokens}"
    if isinstance(event, Drafted):
        return f"{event.job} {event.proposals}"
    if isinstance(event, Submit):
        return f"{event.request} {event.prompt} {event.new_tokens_max} {event.sampling}"
    return str(getattr(event, "request", ""))
