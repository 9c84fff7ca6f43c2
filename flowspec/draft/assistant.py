"""An assistant of Gemma 4 as a drafter (`draft.chained`): it has no cache of its rows, but the target's keys
and values of the committed text (`draft.assistant_head`).

All guesses below a committed node stand at that node's place, and see what it sees, as the publisher's own
code has it. That node is the last one on a row's path whose parent's feature the target has given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from flowspec.core.protocol.messages import Open
from flowspec.core.stage.events import RunLayers
from flowspec.draft.assistant_head import AssistantHead
from flowspec.draft.cached import Row
from flowspec.draft.chained import ChainDrafter, ChainRequest, Entry
from flowspec.model.arithmetic.arrays import Array, namespace
from flowspec.model.attention import TreeBatch, TreeRows


class AssistantDrafter(ChainDrafter[AssistantHead, ChainRequest, Entry]):
    """A `Drafter`; see the module."""

    def new_request(self, opening: Open) -> ChainRequest:
        return ChainRequest(opening, opening.root)

    def open_cache(self, request: int, slots: int) -> None:
        self._requests[request].cache = self._head.new_cache(slots)
        self._requests[request].written = 0

    def waiting(self, job: RunLayers, rows: Sequence[Row]) -> list[Entry]:
        """All but committed rows that nobody asks for: nothing is remembered of these but their keys."""
        found: list[Entry] = []
        slots = (int(slot) for part in job.parts for slot in part.slots)
        for row, slot in zip(rows, slots, strict=True):
            request = self._requests[row.request]
            if row.asked or not request.is_committed(row):
                found.append(Entry(row, slot))
        for part in job.parts:
            self._write(part.request)
            request, truths = self._requests[part.request], self._truths[part.request]
            run = request.runs.get(request.root)
            if run is not None and run.is_guess and run.row.parent in truths:
                found.append(Entry(replace(run.row, asked=True), run.slot))
        return [entry for entry in found if self._requests[entry.row.request].written]

    def run_pass(self, job: RunLayers, entries: Sequence[Entry], features: Array) -> tuple[Array, Array]:
        tokens = np.array([entry.row.token for entry in entries])
        positions = np.array([self._place(entry.row) for entry in entries])
        batch, first = [], 0
        for number in sorted({entry.row.request for entry in entries}):
            request = self._requests[number]
            count = sum(entry.row.request == number for entry in entries)
            own = positions[first : first + count]
            keys = np.arange(request.written, dtype=np.int32)
            assert request.cache is not None
            batch.append(TreeRows(request.cache, first, own, own, keys, keys[None] < own[:, None]))
            first += count
        own_features = features[:, -self._head.feature_width :]
        return self._head.run(tokens, own_features, positions, TreeBatch(batch))

    def _place(self, row: Row) -> int:
        """The position of the last row on a path, this one included, whose parent's feature is the
        target's."""
        request, truths = self._requests[row.request], self._truths[row.request]
        while row.parent not in truths and row.parent in request.runs:
            row = request.runs[row.parent].row
        return row.position

    def _write(self, number: int) -> None:
        """Keys and values of committed nodes whose features have come; what they were made of goes."""
        request, truths, width = self._requests[number], self._truths[number], self._head.feature_width
        nodes, positions = self._arrived(number, len(self.captures) * width)
        if nodes and request.cache is not None:
            own = [truths[node] for node in nodes]
            self._head.write(namespace(own[0]).stack(own)[:, :-width], positions, request.cache)
        for node in nodes:
            truths[node] = self._head.engine.copied(truths[node][-width:])
