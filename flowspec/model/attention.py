"""The tree cache, and what rows see of it.

A node's keys and values sit in a slot; RoPE is baked in by position and the mask decides who sees whom, so
pruning frees slots without copying anything. Rows of several requests go through the linear layers together
and attend each to their own cache. A row's sums go by the positions of what it sees (`arithmetic/`), so which
slots its path happens to lie in changes no bit.

Layers that are short convolutions hold an input in each slot instead. Layers with a sliding window may have a
cache of their own, with fewer slots (`core.protocol.model_spec`).

Linear attention holds inputs, too, and of a path's sums three states: `BASE`, behind what was given back,
`NEAR`, of the output's path as far as it was run, and `SNAPSHOT`, what `BASE` once was
(`docs/design/models.md`). A request that went back, whose rows stand before the end of `NEAR`, goes on from
`BASE`, or from the beginning.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from flowspec.core.protocol.model_spec import STATES_HELD, Heads
from flowspec.core.protocol.precision import Q8_0
from flowspec.core.stage.slots import cache_size
from flowspec.model.arithmetic import compiled
from flowspec.model.arithmetic.arrays import I32, I64, Array, Bools, Memory, zeros
from flowspec.model.arithmetic.packed import GROUP
from flowspec.model.arithmetic.plain import BLOCK, LANES, Held

BASE, NEAR, SNAPSHOT = 0, 1, 2
GAP = "a row does not see the nodes right before it"
Angles = tuple[Array, Array]  # cosine and sine of position embeddings, each `[1, rows, numbers that turn]`
MOVED_AT_ONCE = 256  # slots that are copied at once to others: of an 8 B model in bfloat16 16 MiB of keys


@dataclass(frozen=True, slots=True)
class Walk:
    """From the state of a path's first so many positions to those of a request's rows.

    `lines` `[nodes, length]` int64 are the slots of each node's input and of those before it, its own last,
    -1 where the text has not begun. `steps` are `plain.delta_rule`'s, over so many `places`. At the first
    place the walk begins, and in the end the state of `length` positions is there, all of the output's path.
    """

    lines: I64
    steps: I32
    places: int
    length: int


class TreeCache:
    """What one request holds in some layers of a slice, counted from its first, in slots that grow in
    blocks: keys and values, or an input. Those below 0 come before the slice, whose layers attend to them.

    What layers hold that are alike lies in a few tensors. Values, and inputs as those of one head, are
    `[layers, heads, slots, width]`, values filled up to LANES. Keys are `[layers, heads, slots / LANES,
    width, LANES]`: a number of sixteen slots' keys lies side by side, as scores are summed. In int8 both are
    levels (`q8_0`): each 32 numbers of a key or a value, rounded alone, with a step in float16; steps lie as
    keys and values do, by their groups in the place of numbers.

    Layers with inputs may have `states` `[STATES_HELD, *state]`, float32, of which `lengths` says how many
    positions either sums up.
    """

    def __init__(
        self,
        layers: Mapping[int, Heads | int],
        memory: Memory,
        slots_max: int,
        held: str = "",
        state: tuple[int, ...] = (),
    ) -> None:
        """Of each layer the heads of its keys and values, which are `held` as `precision.cached_as` says
        (empty: as rows are), or how many numbers its inputs have."""
        self.slots_max = slots_max
        self.slots = 0  # for which there is room
        self._tensors: list[Array] = []
        self._where: dict[int, tuple[slice, int]] = {}
        self._addresses: dict[int, compiled.Cache] = {}
        for kind in dict.fromkeys(layers.values()):
            alike = [layer for layer, own in layers.items() if own == kind]
            first = len(self._tensors)
            for dtype, *shape in _tensors_of(kind, held or memory.dtype, memory.dtype):
                self._tensors.append(memory.zeros((len(alike), *shape), dtype))
            tensors = slice(first, len(self._tensors))
            self._where |= {layer: (tensors, place) for place, layer in enumerate(alike)}
        with_states = [layer for layer, own in layers.items() if state and isinstance(own, int)]
        self.states = {layer: memory.zeros((STATES_HELD, *state), "float32") for layer in with_states}
        self.lengths = {layer: [0] * STATES_HELD for layer in with_states}

    def __contains__(self, layer: int) -> bool:
        return layer in self._where

    @property
    def bytes(self) -> int:
        """Of all that is held now."""
        return sum(int(each.nbytes) for each in (*self._tensors, *self.states.values()))

    def _of(self, layer: int) -> list[Array]:
        tensors, place = self._where[layer]
        return [each[place] for each in self._tensors[tensors]]

    def of(self, layer: int) -> Held:
        """A layer's keys, values, and between levels the steps of both, where they are levels."""
        keys, values, *steps = self._of(layer)
        return keys, values, (steps[0], steps[1]) if steps else None

    def inputs(self, layer: int) -> Array:
        """`[slots, width]`"""
        return self._of(layer)[0][0]

    def address(self, layer: int) -> int:
        """Of a `compiled.Cache` of a layer; until the next `reserve`."""
        if layer not in self._addresses:
            each = self._of(layer)
            where = [compiled.address(x) for x in each]
            if len(each) > 1:
                found = compiled.Cache(*where, slots=self.slots, kind=compiled.kind_of(each[0].dtype))
            else:
                found = compiled.Cache(inputs=where[0], inputs_width=each[0].shape[2])
            if layer in self.states:
                found.state = compiled.address(self.states[layer][NEAR])
            self._addresses[layer] = found
        return ctypes.addressof(self._addresses[layer])

    def growth_bytes(self, slots: int) -> int:
        """What `reserve` would add."""
        added = max(0, _filled(cache_size(slots, self.slots_max)) - self.slots)
        return added * sum(int(len(x) * x.shape[1] * x.shape[3] * x.itemsize) for x in self._tensors)

    def reserve(self, slots: int) -> None:
        """Makes room for slots `0..slots-1`; new ones are zero. Nothing has changed where memory lacks."""
        if slots <= self.slots:
            return
        assert slots <= self.slots_max, f"{slots} slots asked for, {self.slots_max} reserved"
        more = _filled(cache_size(slots, self.slots_max)) - self.slots
        self._tensors = [_grown(x, more // LANES if _is_in_lanes(x) else more) for x in self._tensors]
        self.slots += more
        self._addresses.clear()

    def copy(self, source: TreeCache, slots: I64) -> None:
        """Into the first slots what those `slots` `[count]` of another request's hold, in their order, and
        its states; there is room for them. What lies in the same slots there, as prompts do, goes over in
        whole blocks of lanes, the rest a few slots at a time: these are in memory once more meanwhile."""
        count, own = len(slots), np.arange(len(slots))
        assert count <= self.slots, f"{count} slots are copied, there is room for {self.slots}"
        moved = np.flatnonzero(slots != own)
        whole = (int(moved[0]) if len(moved) else count) // LANES * LANES
        for mine, other in zip(self._tensors, source._tensors, strict=True):
            same = whole // LANES if _is_in_lanes(mine) else whole
            mine[:, :, :same] = other[:, :, :same]
            for first in range(whole, count, MOVED_AT_ONCE):
                to, of = (each[first : first + MOVED_AT_ONCE] for each in (own, slots))
                mine[_index(mine, to)] = other[_index(mine, of)]
        for layer, states in self.states.items():
            states[:] = source.states[layer]
            self.lengths[layer][:] = source.lengths[layer]

    def copy_state(self, layer: int, source: int, target: int) -> None:
        """Of a layer with states: that of `source` is that of `target`, too."""
        states, lengths = self.states[layer], self.lengths[layer]
        states[target], lengths[target] = states[source], lengths[source]

    def walk_past(self, layer: int, passed: Sequence[int], length: int) -> Walk:
        """The steps with which `BASE` comes to the end of slots, which count as done."""
        lengths = self.lengths[layer]
        beginning = [-1] * (length - 1) if lengths[BASE] == 0 else []
        slots = np.array([*beginning, *passed], np.int64)
        lines = np.lib.stride_tricks.sliding_window_view(slots, length).copy()
        steps = np.array([(row, 0, 0, -1) for row in range(len(lines))], np.int32).reshape(-1, 4)
        lengths[BASE] += len(lines)
        return Walk(lines, steps, 1, lengths[BASE])

    def clear(self, slots: Sequence[int]) -> None:
        """Zeroes slots that were freed."""
        index = np.array([slot for slot in slots if slot < self.slots], np.int64)
        for each in self._tensors if len(index) else ():
            each[_index(each, index)] = 0


def _tensors_of(kind: Heads | int, held: str, of_rows: str) -> list[tuple[Any, ...]]:
    """The dtype of each tensor, and its shape for a layer, without slots."""
    if isinstance(kind, int):
        return [(of_rows, 1, 0, kind)]
    count, width, dtype = kind.count, kind.width, "int8" if held == Q8_0 else held
    groups = -(-width // GROUP)
    found = [(dtype, count, 0, width, LANES), (dtype, count, 0, _filled(width))]
    steps = [("float16", count, 0, groups, LANES), ("float16", count, 0, groups)]
    return found + steps * (held == Q8_0)


def _is_in_lanes(x: Array) -> bool:
    return len(x.shape) == 5


def _index(x: Array, slots: I64) -> tuple[Any, ...]:
    every = slice(None)
    return (every, every, slots // LANES, every, slots % LANES) if _is_in_lanes(x) else (every, every, slots)


def _grown(x: Array, more: int) -> Array:
    """A copy with so many zeros more in the place of slots."""
    before = x.shape[2]
    larger = zeros(x, *x.shape[:2], before + more, *x.shape[3:])  # whose memory is taken as it is written to
    if before:
        larger[:, :, :before] = x
    return larger


def _filled(count: int) -> int:
    """The next multiple of `LANES`."""
    return -(-count // LANES) * LANES


@dataclass
class Sight:
    """What each row of a job sees of a cache: `seen` `[rows, high]`, and `key_positions` `[high]` of the
    slots. A row sees at most one slot for each position."""

    seen: Bools
    key_positions: I32

    @cached_property
    def order(self) -> tuple[I32, I32]:
        """Slots that any row sees by position, and where among them each block of positions ends."""
        slots = np.flatnonzero(self.seen.any(axis=0))
        positions = self.key_positions[slots]
        places = np.argsort(positions, kind="stable")
        blocks = positions[places] // BLOCK
        ends = np.append(np.flatnonzero(blocks[1:] != blocks[:-1]) + 1, len(blocks))
        return slots[places].astype(np.int32), ends.astype(np.int32)

    @cached_property
    def paths(self) -> I64:
        """The slot that a row sees at a position, or -1: `[rows, positions]`."""
        return self.paths_from(0)

    def paths_from(self, first: int) -> I64:
        """Of positions from `first` on, which may be before 0."""
        rows, slots = np.nonzero(self.seen & (self.key_positions >= max(first, 0)))
        positions = self.key_positions[slots]
        paths = np.full((len(self.seen), int(positions.max()) + 1 - first), -1)
        paths[rows, positions - first] = slots
        return paths


@dataclass(slots=True)
class TreeRows:
    """Rows `[first, first + len(slots))` of the batch: one request's; `windowed` are the same ones in the
    cache of layers with a window, if these have their own. `committed` as in `JobPart`; `walks`: by the
    position where they begin."""

    cache: TreeCache
    first: int
    slots: I64  # [rows]
    positions: I64  # [rows]
    key_positions: I32  # [high]
    visible: Bools  # [rows, high]
    windowed: TreeRows | None = None
    committed: int = 0
    sights: dict[int | None, Sight] = field(default_factory=dict)
    lines: dict[int, I64] = field(default_factory=dict)
    walks: dict[int, Walk] = field(default_factory=dict)

    def of(self, layer: int) -> TreeRows:
        """These rows in the cache that holds a layer."""
        return self if self.windowed is None or layer in self.cache else self.windowed

    def sight(self, window: int | None) -> Sight:
        """What each row sees through a sliding window (None: no window)."""
        if window not in self.sights:
            seen = self.visible
            if window is not None:
                seen = seen & (self.key_positions[None, :] > self.positions[:, None] - window)
            self.sights[window] = Sight(np.ascontiguousarray(seen), self.key_positions)
        return self.sights[window]

    def line(self, length: int) -> I64:
        """Slots of each row's last so many nodes, its own last, -1 before the text: `[rows, length]`."""
        if length not in self.lines:
            wanted = self.positions[:, None] - np.arange(length - 1, -1, -1)
            first = int(wanted.min())
            line = np.take_along_axis(self.sight(None).paths_from(first), wanted - first, axis=1)
            assert np.array_equal(line >= 0, wanted >= 0), GAP
            self.lines[length] = line
        return self.lines[length]

    def walk(self, layer: int, length: int) -> Walk:
        """The steps with which `NEAR` comes to the end of the output's path, which count as done."""
        cache, lowest = self.cache, int(self.positions.min())
        lengths = cache.lengths[layer]
        if lowest < lengths[BASE]:  # the text is read again from its beginning
            cache.states[layer][:] = 0
            lengths[:] = [0] * len(lengths)
        elif lowest < lengths[NEAR] or lengths[NEAR] < lengths[BASE]:
            cache.copy_state(layer, BASE, NEAR)
        start = lengths[NEAR]
        if start not in self.walks:
            self.walks[start] = self._walk_from(start, length)
        lengths[NEAR] = self.walks[start].length
        return self.walks[start]

    def _walk_from(self, start: int, length: int) -> Walk:
        before = length - 1
        first = start - before
        paths = self.sight(None).paths_from(first)  # columns: positions from there on
        assert np.array_equal((paths >= 0).sum(axis=1), self.positions + 1 - max(first, 0)), GAP
        _, firsts = np.unique(paths[:, before:], return_index=True)
        places = np.stack(np.unravel_index(firsts, paths[:, before:].shape), axis=1)
        places = places[paths[places[:, 0], places[:, 1] + before] >= 0]
        places = places[
            np.argsort(places[:, 1], kind="stable")
        ]  # of each node a row that sees it, by position
        lines = np.stack([paths[row, column : column + length] for row, column in places])
        nodes = lines[:, -1].tolist()
        index = {slot: number for number, slot in enumerate(nodes)}
        children: dict[int, list[int]] = {}
        for number, (line, column) in enumerate(zip(lines.tolist(), places[:, 1].tolist(), strict=True)):
            children.setdefault(index[line[-2]] if column else -1, []).append(number)
        outputs = {slot: row for row, slot in enumerate(self.slots.tolist())}
        steps: list[tuple[int, int, int, int]] = []

        def step(node: int, source: int, target: int) -> None:
            steps.append((node, source, target, outputs.get(nodes[node], -1)))

        end, committed = -1, max(0, self.committed - start)
        while len(below := children.get(end, [])) == 1 and places[below[0], 1] < committed:
            end = below[0]
            step(end, 0, 0)
        reached = start + len(steps)
        count, free = 1, list[int]()
        waiting = {0: len(children.get(end, [])) + 1}  # the first place stays as it is
        todo = [(child, 0) for child in children.get(end, [])]
        while todo:
            node, source = todo.pop()
            waiting[source] -= 1
            if not waiting[source]:
                target = source
            elif free:
                target = free.pop()
            else:
                target, count = count, count + 1
            step(node, source, target)
            if node in children:
                waiting[target] = len(children[node])
                leaves_last = sorted(children[node], key=lambda child: child not in children)
                todo += [(child, target) for child in leaves_last]  # and so they are taken first
            else:
                free.append(target)
        return Walk(lines, np.array(steps, np.int32).reshape(-1, 4), count, reached)

    def select(self, kept: I64, first: int) -> TreeRows:
        """The same request's rows with only `kept` (indices into these rows)."""
        windowed = None if self.windowed is None else self.windowed.select(kept, first)
        own = self.slots[kept], self.positions[kept], self.key_positions, self.visible[kept]
        return TreeRows(self.cache, first, *own, windowed, self.committed)


@dataclass(slots=True)
class TreeBatch:
    """What layers need to know of a job: of its rows, where layers need that, their `tokens` `[rows]`, their
    `embedding` `[rows, hidden]`, and `going` `[rows, numbers]`, where keys and values are that go on."""

    requests: list[TreeRows]
    tokens: I64 | None = None
    embedding: Array | None = None
    going: Array | None = None

    @property
    def positions(self) -> I64:
        """`[rows]`"""
        return np.concatenate([rows.positions for rows in self.requests])

    def select(self, kept: list[int]) -> TreeBatch:
        """Only these rows, in order."""
        requests, first = [], 0
        for rows in self.requests:
            own = [index - rows.first for index in kept if rows.first <= index < rows.first + len(rows.slots)]
            if own:
                requests.append(rows.select(np.array(own), first))
                first += len(own)
        of_rows = (None if x is None else x[kept] for x in (self.tokens, self.embedding, self.going))
        return TreeBatch(requests, *of_rows)

    def of(self, layer: int) -> Iterator[tuple[TreeRows, slice]]:
        """Of each request its rows in the cache that holds a layer, and which of the batch's these are."""
        for request in self.requests:
            rows = request.of(layer)
            yield rows, slice(rows.first, rows.first + len(rows.slots))
