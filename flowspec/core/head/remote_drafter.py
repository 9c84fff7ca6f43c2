"""A drafter on a device of its own, as the head sees it: what it is asked, what of its answers counts, and
what a loss makes void.

The head's core asks (`Draft`, `SendToDrafter`) and is told (`Drafted`, `DrafterLost`, `DrafterRecovered`);
the device is asked (`Expand`, `Release`) and answers (`Proposed`). That device is a pipeline of one, which
`core.cluster.forming` forms and watches: `PipelineReformed` and `PipelineLost` are its words. Events in,
commands out, as with the other cores.

- It is lost until its pipeline is there, and again when that is lost, with the job that it was at.
- The head and whoever holds the connection hear of each other a moment later. What the head asked before it
  has heard that a lost drafter is back is for one that is gone: so the head posts each `DrafterRecovered`
  back before any work for it, and what comes before that is dropped.
- Proposals are believed if they answer the job that it is at, with token ids that the target has. Whoever
  proposes anything else is lost (`BreakPipeline`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from flowspec.core.cluster.membership import Tick
from flowspec.core.head.events import (
    Draft,
    Drafted,
    DrafterLost,
    DrafterRecovered,
    PipelineLost,
    PipelineReformed,
    SendToDrafter,
)
from flowspec.core.protocol.messages import Expand, Proposed, Release

RULES = {
    "there": "a drafter's device is there, and the head is told",
    "gone": "a drafter's device is gone, and the head is told",
    "job lost": "a drafter is lost with a job that it was at",
    "for one that is gone": "what the head asked before it heard of a loss, or of a return, is dropped",
    "not asked for": "a drafter proposes what it was not asked for, and is lost",
    "no token": "a drafter proposes a token id that the target lacks, and is lost",
    "given up": "a drafter cannot be had in this session any more",
}
"""What is decided here, by name; `RemoteDrafterCore.fired` counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """No other pipeline of its device could do better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakPipeline:
    """The drafter said what cannot be: its pipeline is broken. `text` says what was expected and what
    came."""

    text: str


RemoteDrafterEvent = (
    Draft | SendToDrafter | DrafterRecovered | Proposed | PipelineReformed | PipelineLost | GivenUp
)
RemoteDrafterCommand = Expand | Release | Drafted | DrafterLost | DrafterRecovered | BreakPipeline


class RemoteDrafterCore:
    """See the module. It is the head's drafter `number`, for a target with so many token ids."""

    def __init__(self, number: int, vocabulary: int) -> None:
        self.number = number
        self.vocabulary = vocabulary
        self.is_there = False
        self.fired: Counter[str] = Counter()
        self._is_over = False
        self._behind = 0
        self._job: int | None = None
        self._sent_s = 0.0
        self._done = 0

    def tick(self, now_s: float) -> Tick:
        """How its pipeline stands: the job that it is at is what is in flight there."""
        return Tick(flight_s=0.0 if self._job is None else now_s - self._sent_s, tokens=self._done)

    def validate(self) -> None:
        assert self._job is None or self.is_there, "a drafter that is lost is at a job"
        assert self._behind >= 0, "the head has heard of more returns than there were"
        assert not (self.is_there and self._is_over), "a drafter that was given up is there"

    def handle(self, event: RemoteDrafterEvent, now_s: float) -> list[RemoteDrafterCommand]:
        """The only mutator. The times of `Drafted` are those of the head's clock."""
        if isinstance(event, Proposed):
            return [self._proposed(event, now_s)] if self.is_there else []
        if isinstance(event, DrafterRecovered):
            self._behind -= 1
        elif isinstance(event, PipelineReformed):
            assert not self._is_over, "a drafter that was given up is there"
            self.fired["there"] += 1
            self.is_there = True
            self._behind += 1
            return [DrafterRecovered(drafter=self.number, cache_slots=event.rooms[0].slots)]
        elif isinstance(event, PipelineLost | GivenUp):
            if isinstance(event, GivenUp):
                self.fired["given up"] += 1
                self._is_over = True
            return self._lose()
        elif self._behind or not self.is_there:
            self.fired["for one that is gone"] += 1
        elif isinstance(event, Draft):
            assert self._job is None, f"job {event.job} is asked for, and job {self._job} is under way"
            self._job, self._sent_s = event.job, now_s
            return [Expand(segment=event.segment, width=event.width)]
        else:
            assert isinstance(event.message, Release), "who wants features is in the head's process"
            return [event.message]
        return []

    def _lose(self) -> list[RemoteDrafterCommand]:
        self.fired["job lost"] += self._job is not None
        self._job = None
        if not self.is_there:
            return []
        self.fired["gone"] += 1
        self.is_there = False
        return [DrafterLost(drafter=self.number)]

    def _proposed(self, answer: Proposed, now_s: float) -> RemoteDrafterCommand:
        if answer.job != self._job:
            self.fired["not asked for"] += 1
            return BreakPipeline(text=f"expected proposals of job {self._job}, got those of {answer.job}")
        most = max((token for proposal in answer.proposals for token in proposal.tokens), default=0)
        if most >= self.vocabulary:
            self.fired["no token"] += 1
            return BreakPipeline(text=f"expected token ids below {self.vocabulary}, got {most}")
        self._job = None
        self._done += 1
        started_s = max(self._sent_s, now_s - answer.compute_s)  # by its own clock it may say anything
        return Drafted(
            drafter=self.number,
            job=answer.job,
            proposals=answer.proposals,
            started_s=started_s,
            ended_s=now_s,
        )
