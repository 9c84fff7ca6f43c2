"""The segment that runs at a stage, and what leaves the stage when it has run: a smaller segment, or on the
last stage the report to the head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Features, Hop, Segment, Verified, VerifiedPart
from flowspec.core.stage.events import LayersDone, SendFeatures, SendSegment, SendVerified

Alive = Sequence[tuple[int, tuple[int, int]]]
"""Rows that are still alive: the index among those that came back from the layers, and `(part, row)` in the
segment."""


@dataclass(slots=True)
class Job:
    """The segment that runs: its rows as `(part, row)` in job order, and those known to be dead by now."""

    number: int
    segment: Segment
    rows: list[tuple[int, int]]
    dead: set[int]
    received_s: float
    queued_s: float
    started_s: float


def verified(job: Job, done: LayersDone, alive: Alive, hops: tuple[Hop, ...]) -> SendVerified:
    """The report to the head: rows whose next token was drawn."""
    reported = sorted(
        ((index, at) for index, at in alive if done.next_tokens[index] >= 0),
        key=lambda entry: entry[1][0],
    )
    indices: dict[int, list[int]] = {}
    ids: dict[int, list[int]] = {}
    for index, (number, row) in reported:
        indices.setdefault(number, []).append(index)
        ids.setdefault(number, []).append(job.segment.parts[number].ids[row])
    parts = tuple(
        VerifiedPart(
            request=job.segment.parts[number].commit.request,
            epoch=job.segment.parts[number].commit.epoch,
            ids=tuple(ids[number]),
            next_tokens=tuple(done.next_tokens[index] for index in own),
            logprobs=tuple(found for index in own if (found := done.logprobs[index]) is not None)
            if done.logprobs
            else (),
        )
        for number, own in indices.items()
    )
    return SendVerified(verified=Verified(segment=job.segment.segment, parts=parts, hops=hops))


def features(request: int, epoch: int, captured: Sequence[tuple[int, Any]]) -> list[SendFeatures]:
    """What was captured of nodes of one request, as it travels."""
    most = limits.FEATURES_ROWS_MAX
    return [
        SendFeatures(
            features=Features(request=request, epoch=epoch, ids=tuple(node for node, _ in some)),
            rows=tuple(row for _, row in some),
        )
        for some in (captured[at : at + most] for at in range(0, len(captured), most))
    ]


def onward(job: Job, done: LayersDone, alive: Alive, hops: tuple[Hop, ...]) -> SendSegment:
    """What the next stage gets."""
    kept: list[list[int]] = [[] for _ in job.segment.parts]
    for _, (part, row) in alive:
        kept[part].append(row)
    parts = tuple(part.select(rows) for part, rows in zip(job.segment.parts, kept, strict=True))
    return SendSegment(
        segment=structs.replace(job.segment, parts=parts, hops=hops),
        payload=done.payload,
        rows=tuple(index for index, _ in alive),
    )


def hop_of(job: Job, done: LayersDone, alive_count: int, now_s: float) -> Hop:
    """When the segment came, what it spent here, and where its dead rows left."""
    compute_s = done.ended_s - done.started_s
    return Hop(
        received_s=job.received_s,
        queued_s=job.queued_s,
        compute_s=compute_s,
        own_s=max(0.0, now_s - job.received_s - job.queued_s - compute_s),
        rows=len(job.rows),
        dead_in_queue=job.segment.row_count - len(job.rows),
        dead_between_layers=len(job.rows) - len(done.rows),
        dead_late=len(done.rows) - alive_count,
    )
