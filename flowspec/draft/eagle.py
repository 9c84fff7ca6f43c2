"""An EAGLE head, or another that is like one, as a drafter (`draft.chained`), with a tree cache of its own.

Once the target's feature is known and a guess below it is committed, the guess's keys and values are made
again from the truth, beside the new rows of the next pass.

Guesses that live go on from predictions of predictions. In a full pipeline no guess is wrong for a long time,
so their chain would grow without end, and heads are trained for a few tokens. So once it is `SLACK` steps
longer than it need be by what is known now, all of a request's living guesses are made again from the truth,
one generation after another, and proposed children anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from flowspec.core.head.events import CopyFeatures
from flowspec.core.protocol.messages import Open, SegmentPart
from flowspec.core.stage.events import ClearSlots, JobPart, RunLayers
from flowspec.draft.cached import Row
from flowspec.draft.chained import ChainDrafter, ChainRequest, Entry, Run
from flowspec.draft.featured import Head
from flowspec.model.arithmetic.arrays import I64, Array
from flowspec.model.attention import TreeBatch, TreeCache, TreeRows

SLACK = 14
"""Each generation is a pass. In virtual time on the published testbed, 40 prompts, the bundled EAGLE-3 head
gives 17.2 tokens/s without this, 18.5 with 8 and 18.6 with 14, and the EAGLE-1 head 15.1, 14.6 and 14.9."""


class CachedHead(Head, Protocol):
    """A head that attends to its own keys and values: `EagleHead`, `mtp_head.MtpHead`."""

    def new_cache(self, slots_max: int) -> TreeCache:
        """An empty cache for one request; a `TreeBatch` over it begins at layer 0."""

    def run(self, tokens: I64, features: Array, positions: I64, batch: TreeBatch) -> Array:
        """As `EagleHead.run`."""


@dataclass(slots=True)
class _Entry(Entry):
    """Also the slots that the row sees `[high]`."""

    seen: npt.NDArray[np.bool_]


@dataclass(slots=True)
class _Request(ChainRequest):
    """Also of each slot whether its node is known to be committed, and has keys; and which slots a row sees
    that has run."""

    committed: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=bool))  # [slots]
    has_keys: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=bool))  # [slots]

    seen: dict[int, npt.NDArray[np.bool_]] = field(default_factory=dict)

    def forget(self, node: int) -> None:
        self.seen.pop(node, None)
        super(_Request, self).forget(node)

    def learn(self, part: SegmentPart) -> bool:
        for node in part.commit.path:
            if node in self.runs:
                self.committed[self.runs[node].slot] = True
        return super(_Request, self).learn(part)  # the class is made anew for its slots


class EagleDrafter(ChainDrafter[CachedHead, _Request, _Entry]):
    """A `Drafter`; see the module."""

    def copy_features(self, message: CopyFeatures) -> None:
        """The rows that were copied are run here all the same, with the same features."""
        own, others = self._truths.setdefault(message.request, {}), self._truths.get(message.source, {})
        for node, other in zip(message.nodes, message.source_nodes, strict=True):
            if other in others:
                own[node] = others[other]

    def new_request(self, opening: Open) -> _Request:
        return _Request(opening, opening.root)

    def open_cache(self, request: int, slots: int) -> None:
        self._requests[request].cache = self._head.new_cache(slots)
        self._requests[request].committed = np.zeros(slots, dtype=bool)
        self._requests[request].has_keys = np.zeros(slots, dtype=bool)

    def clear_slots(self, command: ClearSlots) -> None:
        known, slots = self._requests[command.request], command.slots
        assert known.cache is not None
        known.cache.clear(slots)
        known.committed[list(slots)] = known.has_keys[list(slots)] = False
        super().clear_slots(command)

    def waiting(self, job: RunLayers, rows: Sequence[Row]) -> list[_Entry]:
        found: list[_Entry] = []
        places = ((part, place) for part in job.parts for place in range(len(part.slots)))
        for row, (part, place) in zip(rows, places, strict=True):
            request, slot = self._requests[row.request], int(part.slots[place])
            request.committed[slot] = request.is_committed(row)
            found.append(_Entry(row, slot, part.visible[place]))
        for part in job.parts:
            found += self._again(part)
        return found

    def run_pass(self, job: RunLayers, entries: Sequence[_Entry], features: Array) -> tuple[Array, Array]:
        tokens = np.array([entry.row.token for entry in entries])
        positions = np.array([entry.row.position for entry in entries])
        batch, first = [], 0
        for part in sorted(job.parts, key=lambda part: part.request):
            own = [entry for entry in entries if entry.row.request == part.request]
            if own:
                cache = self._requests[part.request].cache
                assert cache is not None
                has_keys = self._requests[part.request].has_keys
                has_keys[[entry.slot for entry in own]] = True
                slots, keys = np.array([entry.slot for entry in own]), part.key_positions
                seen = np.stack([entry.seen for entry in own]) & has_keys[: len(keys)]  # [own, high]
                batch.append(TreeRows(cache, first, slots, positions[first : first + len(own)], keys, seen))
                first += len(own)
        predicted = self._head.run(tokens, features, positions, TreeBatch(batch))
        return predicted, predicted

    def _note(self, entry: _Entry, predicted: Array) -> None:
        super()._note(entry, predicted)
        request = self._requests[entry.row.request]
        if entry.row.node in request.runs:
            request.seen[entry.row.node] = entry.seen

    def _again(self, part: JobPart) -> Iterator[_Entry]:
        """Committed rows of a request whose keys stem from a prediction while the truth is known by now; and
        all guesses that live, where their chain is too long."""
        request, truths = self._requests[part.request], self._truths[part.request]
        committed = request.committed[: len(part.key_positions)]
        for node, run in request.runs.items():
            if run.is_guess and run.row.parent in truths and request.is_committed(run.row):
                yield _Entry(
                    replace(run.row, asked=node == request.root),
                    run.slot,
                    committed & (part.key_positions <= run.row.position),
                )
        guesses = [run for run in request.runs.values() if not request.is_committed(run.row)]
        if any(run.steps - self._steps_needed(run) >= SLACK for run in guesses):
            for run in guesses:
                seen, own = np.zeros(len(part.key_positions), dtype=bool), request.seen[run.row.node]
                seen[: len(own)] = own[: len(seen)]  # slots behind the last that is in use are nobody's
                yield _Entry(replace(run.row, asked=True), run.slot, seen)

    def _steps_needed(self, run: Run) -> int:
        """How many predictions in a row it would stem from if it ran now."""
        request, steps = self._requests[run.row.request], 0
        truths = self._truths[run.row.request]
        while run.row.parent not in truths and run.row.parent in request.runs:
            run, steps = request.runs[run.row.parent], steps + 1
        return steps
