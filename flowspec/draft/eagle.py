"""An EAGLE head as a drafter: its nodes are rows that read their token and the feature of their parent.

Features of committed nodes come from the target (`take_features`) and are kept by node, for a later turn may
go on below any of them. A guess's feature is the head's own prediction. Once the target's is known and a
guess below it is committed, the guess's keys and values are made again from the truth, beside the new rows of
the next pass; and if it is the root, it is ranked again, for what comes after it is now known better (the
papers call this the catch-up pass).

A row whose parent has no feature cannot run: its slot stays empty, nothing attends to it, and nothing is
proposed below it. That is the first token of every text, and no other if features come before the rows that
read them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Open, Proposal, Release, Segment, SegmentPart
from flowspec.core.stage.events import ClearSlots, JobPart, RunLayers
from flowspec.draft.cached import Row, TreeCachedDrafter
from flowspec.draft.eagle_head import EagleHead
from flowspec.draft.ranking import F32, Ranker
from flowspec.errors import ClusterError
from flowspec.model.attention import TreeBatch, TreeCache, TreeRows
from flowspec.model.files import ModelFiles
from flowspec.model.support import context_max


@dataclass(slots=True)
class _Entry:
    """A row that is to run: its slot in the cache, and the slots that it sees `[high]`."""

    row: Row
    slot: int
    seen: npt.NDArray[np.bool_]


@dataclass(slots=True)
class _Run:
    """A row that has run, as long as its own prediction may be needed or its keys stem from one
    (`is_guess`)."""

    row: Row
    slot: int
    predicted: torch.Tensor  # [hidden]
    is_guess: bool


@dataclass(slots=True)
class _Request:
    """What the head has of a request.

    `path` holds the committed nodes by position as far as they were named; after a rewind it may hold dead
    ones until others take their places, which is before the new root is run.
    """

    opening: Open
    root: int
    path: dict[int, int] = field(default_factory=dict)
    runs: dict[int, _Run] = field(default_factory=dict)
    node_at: dict[int, int] = field(default_factory=dict)
    cache: TreeCache | None = None
    committed: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=bool))  # [slots]
    has_keys: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=bool))  # [slots]

    def learn(self, part: SegmentPart) -> bool:
        """Takes what a part says of the path; True when with it the path is known from the first node to the
        last."""
        for position, node in enumerate(part.commit.path, part.commit.base):
            self.path[position] = node
            if node in self.runs:
                self.committed[self.runs[node].slot] = True
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
        """Drops a node's run; its keys and values stay."""
        run = self.runs.pop(node, None)
        if run is not None:
            del self.node_at[run.slot]


class EagleDrafter(TreeCachedDrafter):
    """A `Drafter`; see the module."""

    def __init__(
        self,
        files: ModelFiles,
        target: ModelFiles,
        dtype: str,
        device: torch.device,
        *,
        context: int | None = None,
        coupled: bool = True,
    ) -> None:
        """Loads the head for this target; raises `InputError` when that cannot be. `context` is the
        target's."""
        self._head = EagleHead.load(files, target, dtype, device)
        self.captures = self._head.capture
        own = min(context_max(self._head.config), limits.CONTEXT_MAX)
        self.context = own if context is None else min(own, context)
        ids = self._head.target_ids()
        ranker = Ranker(
            target.config().vocab_size, ids=None if ids is None else ids.cpu().numpy(), coupled=coupled
        )
        super().__init__(
            ranker,
            context_max=max(self.context, context or 0),
            device=device,
            slot_bytes=self._head.slot_bytes,
        )
        self._requests: dict[int, _Request] = {}
        self._truths: dict[
            int, dict[int, torch.Tensor]
        ] = {}  # request -> node -> the target's feature `[hidden]`
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
                self._requests.setdefault(number, _Request(opening, opening.root)).begin(opening)
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

    # ----------------------------------------------------------------------------------------------- caches

    def open_cache(self, request: int, slots: int) -> None:
        self._requests[request].cache = self._head.new_cache(slots)
        self._requests[request].committed = np.zeros(slots, dtype=bool)
        self._requests[request].has_keys = np.zeros(slots, dtype=bool)

    def clear_slots(self, command: ClearSlots) -> None:
        known, slots = self._requests[command.request], command.slots
        assert known.cache is not None
        known.cache.clear(slots)
        known.committed[list(slots)] = known.has_keys[list(slots)] = False
        for slot in slots:
            if slot in known.node_at:
                known.forget(known.node_at[slot])

    def close_cache(self, request: int) -> None:
        self._requests.pop(request, None)

    # ---------------------------------------------------------------------------------------------- running

    @torch.inference_mode()
    def run(self, job: RunLayers, rows: Sequence[Row]) -> tuple[Sequence[Row], torch.Tensor]:
        """Runs rows whose parent's feature is known, and those to be made again, then the rows below them, as
        far as it goes."""
        waiting: list[_Entry] = []
        places = ((part, place) for part in job.parts for place in range(len(part.slots)))
        for row, (part, place) in zip(rows, places, strict=True):
            request, slot = self._requests[row.request], int(part.slots[place])
            request.committed[slot] = request.is_committed(row)
            waiting.append(_Entry(row, slot, part.visible[place]))
        for part in job.parts:
            waiting += self._stale(part)
        asked: list[Row] = []
        predicted = [
            torch.empty((0, self._head.hidden_size), dtype=self._head.dtype, device=self._head.device)
        ]
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
            found = self._pass(
                job, [entry for entry, _ in ready], torch.stack([feature for _, feature in ready])
            )
            for (entry, _), feature in zip(ready, found, strict=True):
                self._note(entry, feature)
            asked += [entry.row for entry, _ in ready if entry.row.asked]
            predicted.append(found[[index for index, (entry, _) in enumerate(ready) if entry.row.asked]])
        return asked, torch.cat(predicted)

    def _pass(self, job: RunLayers, entries: Sequence[_Entry], features: torch.Tensor) -> torch.Tensor:
        """One run of the head over entries, sorted by request; predicted features `[entries, hidden]`."""
        device = self._head.device
        tokens = torch.tensor([entry.row.token for entry in entries])
        positions = torch.tensor([entry.row.position for entry in entries], device=device)
        batch, first = [], 0
        for part in sorted(job.parts, key=lambda part: part.request):
            own = [entry for entry in entries if entry.row.request == part.request]
            if own:
                cache = self._requests[part.request].cache
                assert cache is not None
                has_keys = self._requests[part.request].has_keys
                has_keys[[entry.slot for entry in own]] = True
                slots = torch.tensor([entry.slot for entry in own], device=device)
                keys = torch.from_numpy(part.key_positions).to(device)
                seen = torch.from_numpy(np.stack([entry.seen for entry in own]) & has_keys[: len(keys)]).to(
                    device
                )  # [own, high]
                batch.append(TreeRows(cache, first, slots, positions[first : first + len(own)], keys, seen))
                first += len(own)
        return self._head.run(tokens, features, positions, TreeBatch(batch, 0))

    def _stale(self, part: JobPart) -> Iterator[_Entry]:
        """Committed rows of a request whose keys stem from a prediction while the truth is known by now."""
        request, truths = self._requests[part.request], self._truths[part.request]
        committed = request.committed[: len(part.key_positions)]
        for node, run in request.runs.items():
            if run.is_guess and run.row.parent in truths and request.is_committed(run.row):
                yield _Entry(
                    replace(run.row, asked=node == request.root),
                    run.slot,
                    committed & (part.key_positions <= run.row.position),
                )

    def _feature(self, row: Row) -> torch.Tensor | None:
        """The parent's feature `[hidden]`: the target's where it is known, else the head's own; None where
        neither is."""
        run = self._requests[row.request].runs.get(row.parent)
        return self._truths[row.request].get(row.parent, None if run is None else run.predicted)

    def _note(self, entry: _Entry, predicted: torch.Tensor) -> None:
        """Remembers a row that has run, and drops what is now known for good."""
        row, request, truths = entry.row, self._requests[entry.row.request], self._truths[entry.row.request]
        is_guess = row.parent not in truths
        request.forget(row.node)
        if is_guess or row.node not in truths:
            request.runs[row.node] = _Run(
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
                f"the EAGLE head computed no finite numbers in {str(self._head.dtype)[6:]}; try --dtype "
                "bfloat16 or float32"
            )
        return logits
