"""What the cores are told and what they ask for. Tensors are opaque handles; nothing here knows their
type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from flowspec.core.head.statistics import Statistics
from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import (
    Commit,
    Hop,
    Logprobs,
    Open,
    Proposal,
    Release,
    Sampling,
    Segment,
    Verified,
)

# ------------------------------------------------------------------------------------------ a stage's events


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentArrived:
    """`payload_bytes` is what the payload takes while the segment waits."""

    segment: Segment
    payload: Any
    received_s: float
    payload_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlArrived:
    message: Open | Commit | Release


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersDone:
    """A job ended: `rows` (of the job) survived; `payload` is `[len(rows), width]`, on the last stage their
    features if asked for.

    `next_tokens` are the last stage's, -1 where none was asked for; `logprobs` are theirs, None where none
    was asked for (empty: nobody did).
    """

    job: int
    rows: tuple[int, ...]
    payload: Any
    next_tokens: tuple[int, ...]
    started_s: float
    ended_s: float
    logprobs: tuple[Logprobs | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerEnded:
    """The job that runs began its first layer, or ended one, at `at_s`; it runs on."""

    job: int
    at_s: float


StageEvent = SegmentArrived | ControlArrived | LayerEnded | LayersDone

# ---------------------------------------------------------------------------------------- a stage's commands


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobPart:
    """The rows of one request in a job: where they go in its cache and what they may see."""

    request: int
    slots: npt.NDArray[np.int64]  # [rows]
    tokens: npt.NDArray[np.int64]  # [rows]
    positions: npt.NDArray[np.int64]  # [rows]
    key_positions: npt.NDArray[np.int32]  # [high]
    visible: npt.NDArray[np.bool_]  # [rows, high]
    sampled: npt.NDArray[np.bool_]  # [rows]: whose next token is asked for (on the last stage)
    sampling: Sampling
    top_logprobs: int = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunLayers:
    """Run this stage's layers on rows `rows` of `payload` (on the first stage: on the tokens)."""

    job: int
    parts: tuple[JobPart, ...]
    payload: Any
    rows: tuple[int, ...]

    @property
    def context(self) -> int:
        """How many earlier tokens the rows see: those of its requests together. Keys and values of these are
        read."""
        return sum(int(part.positions.min()) for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trim:
    """These rows of the running job are dead: drop them at the next layer boundary."""

    job: int
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCache:
    request: int
    slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearSlots:
    """Zero these slots before the next job: what a masked slot holds must be finite."""

    request: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseCache:
    request: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendSegment:
    """To the next hop: `rows` of `payload` (None: a header only)."""

    segment: Segment
    payload: Any
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendVerified:
    """To the head: `rows` of `payload` are the features of the reported nodes (None: nobody asked for
    features)."""

    verified: Verified
    payload: Any = None
    rows: tuple[int, ...] = ()


StageCommand = RunLayers | Trim | OpenCache | ClearSlots | CloseCache | SendSegment | SendVerified

# ------------------------------------------------------------------------------- the head's events, commands


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

    Each has memory for `cache_slots` at least.
    """

    stage_count: int
    cache_slots: int = limits.ID_MAX


HeadEvent = (
    Submit
    | Cancel
    | Forget
    | VerifiedArrived
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
class SendToDrafter:
    """To a drafter, in order with its jobs."""

    message: Release
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
