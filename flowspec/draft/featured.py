"""What drafters share whose nodes are rows that read their token and the feature of their parent.

Features of committed nodes come from the target (`take_features`) and are kept by node, for a later turn may
go on below any of them. A guess's feature is the drafter's own prediction. Once the target's is known below a
guess that is committed by then, and the guess is the root, it is ranked again, for what comes after it is now
known better (the papers call this the catch-up pass).

A row whose parent has no feature cannot run: nothing attends to it, and nothing is proposed below it. That is
the first token of every text, and no other if features come before the rows that read them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch

from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Open, Proposal, Release, Segment, SegmentPart
from flowspec.core.stage.events import ClearSlots, RunLayers
from flowspec.draft.cached import Row, TreeCachedDrafter
from flowspec.draft.ranking import F32, Ranker
from flowspec.errors import ClusterError
from flowspec.model.files import ModelFiles


class Head(Protocol):
    """The network of such a drafter, on one device."""

    @property
    def capture(self) -> tuple[int, ...]:
        """The hidden states of the target that make up a feature: c is the input of layer c, and the number
        of layers is the output after the final norm."""

    @property
    def context_max(self) -> int:
        """Positions it can handle."""

    @property
    def hidden_size(self) -> int:
        """Width of what `logits` takes."""

    @property
    def slot_bytes(self) -> int:
        """What a node takes."""

    @property
    def weight_bytes(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def project(self, target_features: torch.Tensor) -> torch.Tensor:
        """The target's features `[rows, hidden * len(capture)]` as they are kept, `[rows, width]`."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[rows, draft vocabulary]` in float32 from `[rows, hidden_size]`."""

    def target_ids(self) -> torch.Tensor | None:
        """The target's id of every draft id, `[draft vocabulary]` int64; None when they are the same."""


@dataclass(slots=True)
class Entry:
    """A row that is to run, and its slot."""

    row: Row
    slot: int


@dataclass(slots=True)
class Run:
    """A row that has run, as long as its own prediction may be needed or what it stems from is one
    (`is_guess`)."""

    row: Row
    slot: int
    predicted: torch.Tensor  # [width]
    is_guess: bool


@dataclass(slots=True)
class Request:
    """What the drafter has of a request.

    `path` holds the committed nodes by position as far as they were named; after a rewind it may hold dead
    ones until others take their places, which is before the new root is run.
    """

    opening: Open
    root: int
    path: dict[int, int] = field(default_factory=dict)
    runs: dict[int, Run] = field(default_factory=dict)
    node_at: dict[int, int] = field(default_factory=dict)

    def learn(self, part: SegmentPart) -> bool:
        """Takes what a part says of the path; True when with it the path is known from the first node to the
        last."""
        for position, node in enumerate(part.commit.path, part.commit.base):
            self.path[position] = node
        if part.commit.path:
            self.root = max(self.root, part.commit.path[-1])
        for node, position, is_committed in zip(part.ids, part.positions, part.committed, strict=True):
            if is_committed:
                self.path[position] = node
        return self.opening.root in part.ids

    def is_committed(self, row: Row) -> bool:
        return self.path.get(row.position) == row.node

    def begin(self, opening: Open) -> None:
        self.opening, self.root = opening, opening.root
        self.path = {position: node for position, node in self.path.items() if position < opening.length}
        self.path[opening.length - 1] = opening.root

    def forget(self, node: int) -> None:
        """Drops a node's run."""
        run = self.runs.pop(node, None)
        if run is not None:
            del self.node_at[run.slot]


RequestT = TypeVar("RequestT", bound=Request)
EntryT = TypeVar("EntryT", bound=Entry)


class FeatureDrafter(TreeCachedDrafter, Generic[RequestT, EntryT]):
    """A `Drafter`; see the module."""

    def __init__(
        self, head: Head, target: ModelFiles, *, context: int | None = None, coupled: bool = True
    ) -> None:
        """Over a head that is loaded for this target; `context` is the target's."""
        self.captures = head.capture
        own = min(head.context_max, limits.CONTEXT_MAX)
        self.context = own if context is None else min(own, context)
        ids = head.target_ids()
        ranker = Ranker(
            target.config().vocab_size, ids=None if ids is None else ids.cpu().numpy(), coupled=coupled
        )
        super().__init__(
            ranker,
            context_max=max(self.context, context or 0),
            device=head.device,
            slot_bytes=head.slot_bytes,
        )
        self._head = head
        self._requests: dict[int, RequestT] = {}
        self._truths: dict[
            int, dict[int, torch.Tensor]
        ] = {}  # request -> node -> the target's feature `[width]`
        self._truths_max = max(self.context, context or 0) + limits.DRAFT_NODES_MAX
        self._released: OrderedDict[int, int] = OrderedDict()  # request -> the last epoch that is over

    @property
    def weight_bytes(self) -> int:
        return self._head.weight_bytes

    # ---------------------------------------------------------------------------------------------- learning

    def take_features(self, request: int, epoch: int, ids: Sequence[int], features: torch.Tensor) -> None:
        """The target's features `[len(ids), hidden * len(captures)]` of nodes of the output's path; they may
        come before the rows."""
        known = self._requests.get(request)
        if (
            not len(ids)
            or epoch <= self._released.get(request, -1)
            or (known is not None and epoch < known.opening.epoch)
        ):
            return
        truths = self._truths.setdefault(request, {})
        for node, feature in zip(ids, self._head.project(features).unbind(), strict=True):
            truths[node] = feature
        while len(truths) > self._truths_max:
            del truths[next(iter(truths))]  # the oldest, which only a rewind far back could need

    def release(self, message: Release) -> None:
        """Forgets a request; features of it that are still on their way are not taken."""
        super().release(message)
        self._released[message.request] = message.epoch
        if len(self._released) > limits.REQUESTS_MAX:
            self._released.popitem(last=False)
        self._requests.pop(message.request, None)
        self._truths.pop(message.request, None)

    def draft(self, segment: Segment, width: int) -> tuple[Proposal, ...]:
        """As every drafter's; may also propose again below a root that it knows better by now."""
        self._learn(segment)
        return super().draft(segment, width)

    def _learn(self, segment: Segment) -> None:
        """Takes the segment's Opens and Commits before the core does, and its rows."""
        for part in segment.parts:
            opening, number = part.opening, part.commit.request
            if opening is not None and (
                number not in self._requests or opening.epoch > self._requests[number].opening.epoch
            ):
                if number not in self._requests:
                    self._requests[number] = self.new_request(opening)
                self._requests[number].begin(opening)
                self._truths.setdefault(number, {})
            request = self._requests.get(number)
            if request is not None and part.commit.epoch == request.opening.epoch and request.learn(part):
                # Features of what a rewind left behind can go; those of nodes after the new root may have
                # come already.
                living = {*request.path.values()}
                truths = self._truths[number]
                self._truths[number] = {
                    n: truth for n, truth in truths.items() if n in living or n > request.opening.root
                }

    @abstractmethod
    def new_request(self, opening: Open) -> RequestT: ...

    # ----------------------------------------------------------------------------------------------- caches

    def clear_slots(self, command: ClearSlots) -> None:
        known = self._requests[command.request]
        for slot in command.slots:
            if slot in known.node_at:
                known.forget(known.node_at[slot])

    def close_cache(self, request: int) -> None:
        self._requests.pop(request, None)

    # ---------------------------------------------------------------------------------------------- running

    @torch.inference_mode()
    def run(self, job: RunLayers, rows: Sequence[Row]) -> tuple[Sequence[Row], torch.Tensor]:
        """Runs rows whose parent's feature is known, and those to be run again, then the rows below them, as
        far as it goes."""
        waiting = self.waiting(job, rows)
        asked: list[Row] = []
        head = self._head
        predicted = [torch.empty((0, head.hidden_size), dtype=head.dtype, device=head.device)]
        while waiting:
            features = [self._feature(entry.row) for entry in waiting]
            ready = [
                (entry, feature)
                for entry, feature in zip(waiting, features, strict=True)
                if feature is not None
            ]
            if not ready:
                break
            waiting = [entry for entry, feature in zip(waiting, features, strict=True) if feature is None]
            ready.sort(key=lambda pair: pair[0].row.request)
            hidden, found = self.run_pass(
                job, [entry for entry, _ in ready], torch.stack([feature for _, feature in ready])
            )
            for (entry, _), feature in zip(ready, found, strict=True):
                self._note(entry, feature)
            asked += [entry.row for entry, _ in ready if entry.row.asked]
            predicted.append(hidden[[index for index, (entry, _) in enumerate(ready) if entry.row.asked]])
        return asked, torch.cat(predicted)

    @abstractmethod
    def waiting(self, job: RunLayers, rows: Sequence[Row]) -> list[EntryT]:
        """Of a job's rows those that are to run, and those of earlier ones that are to run again."""

    @abstractmethod
    def run_pass(
        self, job: RunLayers, entries: Sequence[EntryT], features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One run of the head over entries, sorted by request, with their parents' features: what `logits`
        takes `[entries, hidden_size]`, and the features predicted `[entries, width]`."""

    def _feature(self, row: Row) -> torch.Tensor | None:
        """The parent's feature `[width]`: the target's where it is known, else the drafter's own; None where
        neither is."""
        run = self._requests[row.request].runs.get(row.parent)
        return self._truths[row.request].get(row.parent, None if run is None else run.predicted)

    def _note(self, entry: Entry, predicted: torch.Tensor) -> None:
        """Remembers a row that has run, and drops what is now known for good."""
        row, request, truths = entry.row, self._requests[entry.row.request], self._truths[entry.row.request]
        is_guess = row.parent not in truths
        request.forget(row.node)
        if is_guess or row.node not in truths:
            request.runs[row.node] = Run(
                row, entry.slot, predicted.clone(), is_guess
            )  # a view would keep all rows in memory
            request.node_at[entry.slot] = row.node
        above = request.runs.get(row.parent)
        if above is not None and not is_guess and not above.is_guess:
            request.forget(row.parent)

    def logits(self, hidden: torch.Tensor) -> F32:
        logits: F32 = self._head.logits(hidden).cpu().numpy()
        if not np.isfinite(logits.max(axis=1, initial=0)).all():
            raise ClusterError(
                f"the drafter computed no finite numbers in {str(self._head.dtype)[6:]}; try --dtype "
                "bfloat16 or float32"
            )
        return logits
