"""What the head is told and what it asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from flowspec.core.head.statistics import Statistics
from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import (
    Commit,
    Features,
    Hop,
    Logprobs,
    Open,
    Proposal,
    Release,
    Sampling,
    Segment,
    Verified,
)
from flowspec.core.stage.slots import UNBOUNDED, CacheRoom


class StopRule(Protocol):
    """Says after which of the new tokens a request must stop; pure."""

    def stops_at(self, tokens: Sequence[int]) -> bool:
        """Whether the answer ends with the last of `tokens`, all the new tokens so far."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """A prompt to answer. A known request id is a conversation: its longest common prefix is reused.

    `answered` are the answer's first tokens where an earlier head got that far: they count, and are not
    emitted again. `top_logprobs` is that of `Open`. `answer` tells a conversation's answers apart for those
    who cancel them.
    """

    request: int
    prompt: tuple[int, ...]
    new_tokens_max: int
    sampling: Sampling
    stop_ids: frozenset[int]
    stop_rule: StopRule | None = None
    answered: tuple[int, ...] = ()
    top_logprobs: int = -1
    answer: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Ends an answer; one that is over already ends no later one of the same conversation."""

    request: int
    answer: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """A conversation is over: its cache may go at every stage."""

    request: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedArrived:
    verified: Verified


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """A `Draft` is done: a proposal for every node that was to be expanded and still lives in the drafter's
    view.

    A drafter that knows better by now may add proposals for nodes that it was asked about before.
    """

    job: int
    proposals: tuple[Proposal, ...]
    started_s: float
    ended_s: float
    drafter: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterLost:
    """A model beside the target is not to be had any more; no `Drafted` of it will come."""

    drafter: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterRecovered:
    """A lost one is to be had again, holds nothing, and has memory for `cache_slots`."""

    drafter: int
    cache_slots: int = limits.ID_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerFired:
    """The instant of the last `SetTimer` has come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineLost:
    """The stages are given up, with all they hold and all that is in flight; nothing of them is told any
    more.

    The device that this is about had been silent for `silent_s` (0: its connection closed, or it said so
    itself).
    """

    silent_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineReformed:
    """A new pipeline of `stage_count` stages, which hold nothing, takes the place of the lost one.

    They have this room for caches; those `capturing` send features.
    """

    stage_count: int
    rooms: tuple[CacheRoom, ...] = (UNBOUNDED,)
    capturing: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FeaturesArrived:
    """Stage number `stage` sent what it captured of nodes; `rows` has a handle for each."""

    stage: int
    features: Features
    rows: tuple[Any, ...] = field(repr=False)


HeadEvent = (
    Submit
    | Cancel
    | Forget
    | VerifiedArrived
    | FeaturesArrived
    | Drafted
    | DrafterLost
    | DrafterRecovered
    | TimerFired
    | PipelineLost
    | PipelineReformed
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SendToStages:
    """To every stage, on the control connections."""

    message: Open | Commit | Release


@dataclass(frozen=True, slots=True, kw_only=True)
class SendToFirstStage:
    """To the first stage, on the data connection."""

    segment: Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """Run these nodes through a drafter and propose up to `width` children for each root or uncommitted one.

    A drafter is a tree-cached model like a stage: the segment carries Opens and Commits, and rows flagged
    `committed` only fill its cache. Each has one job at a time; `Drafted` is the answer.
    """

    job: int
    segment: Segment
    width: int
    drafter: int = 0

    @property
    def context(self) -> int:
        """How many earlier tokens the rows see, as in `RunLayers`."""
        return sum(min(part.positions, default=0) for part in self.segment.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyFeatures:
    """The target's features of `nodes` of a request are those of the `source_nodes` of another, which stand
    behind the same text: rows that were copied do not come back with any."""

    request: int
    nodes: tuple[int, ...]
    source: int
    source_nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeFeatures:
    """The target's features of nodes of a request: of each the parts that the stages captured, in pipeline
    order."""

    request: int
    epoch: int
    nodes: tuple[int, ...]
    rows: tuple[tuple[Any, ...], ...] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SendToDrafter:
    """To a drafter, in order with its jobs; features are for those alone whose traits say so, which are in
    the head's process."""

    message: Release | CopyFeatures | TakeFeatures
    drafter: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SetTimer:
    """Ask for `TimerFired` at this instant; replaces an earlier one that has not fired."""

    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Emit:
    """New tokens of an answer; `logprobs` are one for each if they are wanted, else none."""

    request: int
    tokens: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """`reason` is `stop`, `length` or `cancelled`; `reused` prompt tokens were still cached."""

    request: int
    reason: str
    reused: int
    statistics: Statistics = field(compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentTimed:
    """A segment of `rows` nodes, sent at `sent_s`, came back; `hops` are what the stages spent on it, in
    pipeline order.

    Its rows saw `context` earlier tokens, as in `RunLayers`.
    """

    segment: int
    rows: int
    sent_s: float
    hops: tuple[Hop, ...]
    context: int = 0


HeadCommand = (
    SendToStages | SendToFirstStage | Draft | SendToDrafter | SetTimer | Emit | Finished | SegmentTimed
)
