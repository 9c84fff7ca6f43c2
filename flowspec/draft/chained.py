"""What drafters share whose nodes are rows that read their token and the feature of their parent, in chains.

A guess's feature is the drafter's own prediction. Once the target's is known below a guess that is committed
by then, and the guess is the root, it is ranked again, for what comes after it is now known better (the
papers call this the catch-up pass).

A row whose parent has no feature cannot run: nothing attends to it, and nothing is proposed below it. That is
the first token of every text, and no other if features come before the rows that read them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from flowspec.core.stage.events import ClearSlots, RunLayers
from flowspec.draft.cached import Row
from flowspec.draft.featured import FeatureDrafter, HeadT, Request
from flowspec.model.arithmetic.arrays import Array, namespace


@dataclass(slots=True)
class Entry:
    """A row that is to run, and its slot."""

    row: Row
    slot: int


@dataclass(slots=True)
class Run:
    """A row that has run, as long as its own prediction may be needed or what it stems from is one.

    `steps`: how many predictions in a row it stems from, 0 where its parent's feature was the target's.
    """

    row: Row
    slot: int
    predicted: Array  # [width]
    steps: int

    @property
    def is_guess(self) -> bool:
        return self.steps > 0


@dataclass(slots=True)
class ChainRequest(Request):
    """Also the rows that have run, by node and by slot."""

    runs: dict[int, Run] = field(default_factory=dict)
    node_at: dict[int, int] = field(default_factory=dict)

    def forget(self, node: int) -> None:
        """Drops a node's run."""
        run = self.runs.pop(node, None)
        if run is not None:
            del self.node_at[run.slot]


ChainT = TypeVar("ChainT", bound=ChainRequest)
EntryT = TypeVar("EntryT", bound=Entry)


class ChainDrafter(FeatureDrafter[HeadT, ChainT], Generic[HeadT, ChainT, EntryT]):
    """A `Drafter`; see the module."""

    def clear_slots(self, command: ClearSlots) -> None:
        known = self._requests[command.request]
        for slot in command.slots:
            if slot in known.node_at:
                known.forget(known.node_at[slot])

    # ---------------------------------------------------------------------------------------------- running

    def run(self, job: RunLayers, rows: Sequence[Row]) -> tuple[Sequence[Row], Array]:
        """Runs rows whose parent's feature is known, and those to be run again, then the rows below them, as
        far as it goes."""
        waiting = self.waiting(job, rows)
        self.pass_rows = []
        asked: list[Row] = []
        head = self._head
        predicted = [head.engine.zeros((0, head.hidden_size), head.engine.dtype)]
        while waiting:
            pending = {(entry.row.request, entry.row.node) for entry in waiting}
            features = [self._feature(entry.row, pending) for entry in waiting]
            ready = [
                (entry, feature)
                for entry, feature in zip(waiting, features, strict=True)
                if feature is not None
            ]
            if not ready:
                break
            waiting = [entry for entry, feature in zip(waiting, features, strict=True) if feature is None]
            ready.sort(key=lambda pair: pair[0].row.request)
            self.pass_rows.append(len(ready))
            hidden, found = self.run_pass(
                job,
                [entry for entry, _ in ready],
                namespace(ready[0][1]).stack([feature for _, feature in ready]),
            )
            for (entry, _), feature in zip(ready, found, strict=True):
                self._note(entry, feature)
            asked += [entry.row for entry, _ in ready if entry.row.asked]
            predicted.append(hidden[[index for index, (entry, _) in enumerate(ready) if entry.row.asked]])
        return asked, namespace(predicted[0]).concatenate(predicted)

    @abstractmethod
    def waiting(self, job: RunLayers, rows: Sequence[Row]) -> list[EntryT]:
        """Of a job's rows those that are to run, and those of earlier ones that are to run again."""

    @abstractmethod
    def run_pass(self, job: RunLayers, entries: Sequence[EntryT], features: Array) -> tuple[Array, Array]:
        """One run of the head over entries, sorted by request, with their parents' features: what `logits`
        takes `[entries, hidden_size]`, and the features predicted `[entries, width]`."""

    def _feature(self, row: Row, pending: Set[tuple[int, int]]) -> Array | None:
        """The parent's feature `[width]`: the target's where it is known, else the drafter's own; None where
        neither is, or the parent is among nodes of requests that are still to run."""
        truth = self._truths[row.request].get(row.parent)
        if truth is not None or (row.request, row.parent) in pending:
            return truth
        run = self._requests[row.request].runs.get(row.parent)
        return None if run is None else run.predicted

    def _note(self, entry: EntryT, predicted: Array) -> None:
        """Remembers a row that has run, and drops what is now known for good."""
        row, request, truths = entry.row, self._requests[entry.row.request], self._truths[entry.row.request]
        above = request.runs.get(row.parent)
        steps = 0 if row.parent in truths else 1 if above is None else above.steps + 1
        request.forget(row.node)
        if steps or row.node not in truths:
            request.runs[row.node] = Run(
                row, entry.slot, self._head.engine.copied(predicted), steps
            )  # a view would keep all rows in memory
            request.node_at[entry.slot] = row.node
        if above is not None and not steps and not above.steps:
            request.forget(row.parent)
