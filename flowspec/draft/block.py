"""A block drafter (`draft.block_head`): one pass guesses all places of a block, each alone.

A block begins with the newest committed node whose feature the target has not given yet. What it guesses for
a place goes for all nodes at the place before, but for what their own tokens add: whoever builds the tree
takes the best pairs of node and token first (as arXiv 2604.12989 has it). Once more features come, the next
block begins further on, and all nodes that live are proposed children anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import structs

from flowspec.core.protocol.messages import Open, Proposal
from flowspec.core.stage.events import ClearSlots, RunLayers
from flowspec.draft.block_head import BlockHead
from flowspec.draft.cached import Masks, Row
from flowspec.draft.featured import FeatureDrafter, Request
from flowspec.model.arithmetic.arrays import Array, namespace


@dataclass(slots=True)
class _Block:
    """It begins at a position with a node; `guesses` `[places, width]` are of the places after."""

    node: int
    begin: int
    guesses: Array


@dataclass(slots=True)
class _Request(Request):
    """Also its last block, and rows that came and live, by node and by slot; those before the block are
    forgotten."""

    block: _Block | None = None
    rows: dict[int, Row] = field(default_factory=dict)
    node_at: dict[int, int] = field(default_factory=dict)

    @property
    def next_block(self) -> tuple[int, Row] | None:
        """Where one would begin, and with which row, if more is known than of the last one."""
        row = self.rows.get(self.path.get(self.written, -1))
        is_known = self.block is not None and row is not None and self.block.node == row.node
        return None if row is None or not self.written or is_known else (self.written, row)

    def place(self, row: Row) -> int | None:
        """Which of the block's guesses are for a row's children; None where there is none."""
        if self.block is None:
            return None
        place = row.position - self.block.begin
        return place if 0 <= place < len(self.block.guesses) else None


class BlockDrafter(FeatureDrafter[BlockHead, _Request]):
    """A `Drafter`; see the module."""

    def new_request(self, opening: Open) -> _Request:
        return _Request(opening, opening.root)

    def open_cache(self, request: int, slots: int) -> None:
        self._requests[request].cache = self._head.new_cache(slots)
        self._requests[request].written = 0

    def clear_slots(self, command: ClearSlots) -> None:
        request = self._requests[command.request]
        for slot in command.slots:
            request.rows.pop(request.node_at.pop(slot, -1), None)

    def run(self, job: RunLayers, rows: Sequence[Row]) -> tuple[Sequence[Row], Array]:
        """Runs a block of each request of which more is known than of the last one; returns the rows that
        are proposed children, and what the block has for them."""
        slots = (int(slot) for part in job.parts for slot in part.slots)
        for row, slot in zip(rows, slots, strict=True):
            request = self._requests[row.request]
            request.rows[row.node], request.node_at[slot] = row, row.node
        for part in job.parts:
            self._write(part.request)
        self.pass_rows = []
        begun = self._begin([part.request for part in job.parts])
        asked = [row for row in rows if row.asked and row.request not in begun]
        for number in begun:
            request = self._requests[number]
            asked += [
                row
                for row in request.rows.values()
                if row.node == request.root or not request.is_committed(row)
            ]
        found: list[Row] = []
        guesses: list[Array] = []
        for row in asked:
            block, place = self._requests[row.request].block, self._requests[row.request].place(row)
            if block is not None and place is not None:
                found.append(row)
                guesses.append(block.guesses[place])
        if not found:
            return found, self._head.engine.zeros((0, self._head.hidden_size), self._head.engine.dtype)
        return found, self._head.after(namespace(guesses[0]).stack(guesses), [row.token for row in found])

    def _propose(self, rows: Sequence[Row], hidden: Array, width: int, masks: Masks) -> list[Proposal]:
        """Ranks once for all nodes of a request that have the same guesses: those at one place, of a drafter
        that looks at the token before, those with one token there. Where the text before changes what is
        drawn, each has its own."""
        is_of_token = self._head.block.rank > 0
        places = [
            (
                row.request,
                row.position,
                row.token if is_of_token else 0,
                row.node if row.sampling.needs_text else 0,
            )
            for row in rows
        ]
        first = {place: index for index, place in reversed([*enumerate(places)])}
        chosen = sorted(first.values())
        ranked = super()._propose([rows[index] for index in chosen], hidden[chosen], width, masks)
        of = {places[index]: proposal for index, proposal in zip(chosen, ranked, strict=True)}
        return [
            structs.replace(of[place], epoch=row.epoch, node=row.node)
            for row, place in zip(rows, places, strict=True)
        ]

    def _begin(self, numbers: Sequence[int]) -> list[int]:
        """Runs the next block of each request that has one; returns these."""
        found = [(number, self._requests[number].next_block) for number in numbers]
        ready = [(number, *begin) for number, begin in found if begin is not None]
        if not ready:
            return []
        self.pass_rows.append(len(ready) * self._head.block.size)
        caches = [cache for number, _, _ in ready if (cache := self._requests[number].cache) is not None]
        guesses = self._head.run([row.token for _, _, row in ready], [begin for _, begin, _ in ready], caches)
        for (number, begin, row), own in zip(ready, guesses, strict=True):
            request = self._requests[number]
            request.block = _Block(row.node, begin, own)
            request.rows = {node: row for node, row in request.rows.items() if row.position >= begin}
        return [number for number, _, _ in ready]

    def _write(self, number: int) -> None:
        """Keys and values of committed nodes whose features have come; these go."""
        request, truths = self._requests[number], self._truths[number]
        nodes, positions = self._arrived(number, self._head.width)
        if nodes and request.cache is not None:
            own = [truths.pop(node) for node in nodes]
            self._head.write(namespace(own[0]).stack(own), positions, request.cache)
