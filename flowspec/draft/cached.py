"""What every drafter that is a model shares: its nodes' life, and the way from its logits to proposals.

Inside is the `StageCore` of a pipeline of one stage, which decides what lives, what runs and in which slot;
here its commands are carried out at once, one segment after another. A drafter draws no tokens itself, so no
row ever learns the token after it, and what the core would send to a head is dropped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Proposal, Release, Sampling, Segment
from flowspec.core.stage.events import (
    ClearSlots,
    CloseCache,
    ControlArrived,
    LayersDone,
    OpenCache,
    RunLayers,
    SegmentArrived,
    StageCommand,
)
from flowspec.core.stage.slots import slots_in
from flowspec.core.stage.stage import StageCore
from flowspec.core.text_before import TextBefore
from flowspec.draft.ranking import F32, Children, Ranker
from flowspec.model.accelerator import accelerator_of
from flowspec.model.ahead import Ahead
from flowspec.model.arithmetic.arrays import Array
from flowspec.model.grammar import GrammarVocabulary, Mask
from flowspec.model.sampler import are_masks_beside

ROWS_RANKED_MAX = 32
"""Rows whose logits are in memory at once."""


Masks = Ahead[tuple[int, int], Mask | None]
"""By request and node."""


@dataclass(frozen=True, slots=True)
class Row:
    """A node that runs; `asked` says that its children are wanted, which stand behind `text` (None where the
    sampling does not need it)."""

    request: int
    epoch: int
    node: int
    parent: int
    token: int
    position: int
    asked: bool
    sampling: Sampling
    text: TextBefore | None = None


class TreeCachedDrafter(ABC):
    """A `Drafter` over a model with a tree cache; `context_max` is the largest of any request it will be
    opened for.

    Its model is loaded on `device` by then, where each cache slot takes `slot_bytes`, and the states of a
    conversation `state_bytes`.
    """

    captures: tuple[int, ...] = ()

    def __init__(
        self,
        ranker: Ranker,
        *,
        context_max: int,
        device: str,
        slot_bytes: int,
        state_bytes: int = 0,
    ) -> None:
        self.cache_slots = slots_in(accelerator_of(device).free_bytes() - state_bytes, slot_bytes)
        self._ranker = ranker
        self._core = StageCore(is_last=True, slots_max=context_max + limits.DRAFT_NODES_MAX)

    def draft(self, segment: Segment, width: int) -> tuple[Proposal, ...]:
        """Runs the segment's rows; proposes up to `width` children for each root or uncommitted one that
        lives."""
        proposals: list[Proposal] = []
        commands = deque(
            self._core.handle(SegmentArrived(segment=segment, payload=None, received_s=0.0), 0.0)
        )
        while commands:
            command = commands.popleft()
            if isinstance(command, RunLayers):
                rows = _rows_of(command, segment)
                masks_below = {
                    (row.request, row.node): partial(self._ranker.shaping(row.sampling).mask, row.text)
                    for row in rows
                    if row.text is not None and row.sampling.grammar is not None
                }
                with Ahead(masks_below, beside=are_masks_beside(self._ranker.grammars)) as masks:
                    proposals += self._propose(*self.run(command, rows), width, masks)
                done = LayersDone(
                    job=command.job,
                    rows=tuple(range(len(rows))),
                    payload=None,
                    next_tokens=(-1,) * len(rows),
                    started_s=0.0,
                    ended_s=0.0,
                )
                commands.extend(self._core.handle(done, 0.0))
            else:
                self._keep_cache(command)
        return tuple(proposals)

    def take_grammars(self, grammars: GrammarVocabulary | None) -> None:
        """From now on proposals are those that grammars allow; without their vocabulary, any."""
        self._ranker.take_grammars(grammars)

    def release(self, message: Release) -> None:
        for command in self._core.handle(ControlArrived(message=message), 0.0):
            self._keep_cache(command)

    def take_features(self, request: int, epoch: int, ids: Sequence[int], features: Array) -> None:
        raise AssertionError("features came for a drafter that wants none")

    @abstractmethod
    def run(self, job: RunLayers, rows: Sequence[Row]) -> tuple[Sequence[Row], Array]:
        """Runs a job's rows; returns those to propose children for, and their hidden states `[rows,
        hidden]`."""

    @abstractmethod
    def logits(self, hidden: Array) -> F32:
        """`[rows, columns]` from what `run` returned."""

    @abstractmethod
    def open_cache(self, request: int, slots: int) -> None: ...

    @abstractmethod
    def clear_slots(self, command: ClearSlots) -> None: ...

    @abstractmethod
    def close_cache(self, request: int) -> None: ...

    def _keep_cache(self, command: StageCommand) -> None:
        if isinstance(command, OpenCache):
            self.open_cache(command.request, command.slots)
        elif isinstance(command, ClearSlots):
            self.clear_slots(command)
        elif isinstance(command, CloseCache):
            self.close_cache(command.request)

    def _propose(self, rows: Sequence[Row], hidden: Array, width: int, masks: Masks) -> list[Proposal]:
        ranked: list[Children] = []
        for first in range(0, len(rows), ROWS_RANKED_MAX):
            some = rows[first : first + ROWS_RANKED_MAX]
            ranked += self._ranker.best(
                self.logits(hidden[first : first + ROWS_RANKED_MAX]),
                [(row.sampling, row.position + 1) for row in some],
                width,
                [row.text for row in some],
                # also None for a row of an earlier job that is asked about again: its mask is computed then
                [masks.take((row.request, row.node)) if row.sampling.grammar else None for row in some],
            )
        return [
            Proposal(
                request=row.request,
                epoch=row.epoch,
                node=row.node,
                tokens=children.tokens,
                confidences=children.confidences,
            )
            for row, children in zip(rows, ranked, strict=True)
        ]


def _rows_of(job: RunLayers, segment: Segment) -> list[Row]:
    """The job's rows with what only the segment knows of them."""
    sent = [(part, index) for part in segment.parts for index in range(len(part.ids))]
    flags = [
        (part.sampling, bool(asked), part.text(row) if asked else None)
        for part in job.parts
        for row, asked in enumerate(part.sampled)
    ]
    return [
        Row(
            request=part.commit.request,
            epoch=part.commit.epoch,
            node=part.ids[index],
            parent=part.parents[index],
            token=part.tokens[index],
            position=part.positions[index],
            asked=asked,
            sampling=sampling,
            text=text,
        )
        for (part, index), (sampling, asked, text) in zip((sent[row] for row in job.rows), flags, strict=True)
    ]
