"""The tree cache, and what rows see of it.

A node's keys and values sit in a slot; RoPE is baked in by position and the mask decides who sees whom, so
pruning frees slots without copying anything. Rows of several requests go through the linear layers together
and attend each to their own cache. A row's sums go by the positions of what it sees (`arithmetic/`), so which
slots its path happens to lie in changes no bit.

Layers that are short convolutions hold an input in each slot instead, and so do those with linear attention,
which have states, too (`linear_attention.py`). Some attend to what a layer before them holds
(`core.protocol.model_spec`).

Layers with a sliding window may have a cache of their own, with fewer slots (`core.protocol.sliding_window`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from flowspec.core.protocol.model_spec import Heads
from flowspec.core.protocol.precision import Q8_0
from flowspec.core.protocol.sliding_window import STATES_HELD
from flowspec.core.stage.slots import cache_size
from flowspec.model.arithmetic import compiled
from flowspec.model.arithmetic.arrays import I32, I64, Array, Bools, zeros
from flowspec.model.arithmetic.packed import GROUP
from flowspec.model.arithmetic.plain import BLOCK, LANES

Steps = tuple[Array, Array] | None
Held = tuple[Array, Array, Steps]
"""Of a layer: keys, values, and between levels the steps of both."""
BASE, NEAR, SNAPSHOT = 0, 1, 2
"""The states that are held (`linear_attention.py`)."""
Angles = tuple[Array, Array]
"""Cosine and sine of position embeddings, each `[1, rows, numbers that turn]`."""


class Memory(Protocol):
    """Of a device."""

    dtype: str
    """Of rows, by name."""

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Array: ...
    def store(self, slots: I64, keys: Array, values: Array, to: Held) -> None:
        """Keys and values `[rows, kv_heads, head_dim]` to slots of a layer's."""


MOVED_AT_ONCE = 256
"""Slots that are copied at once to others: of an 8 B model in bfloat16 16 MiB of keys."""


class TreeCache:
    """What one request holds in some layers of a slice, counted from its first; grown in blocks: keys and
    values of layers in `heads`, and in those `with_inputs` inputs of `width`, and states of the shape `state`
    where they have any. A layer before the slice's first, below 0, is one to whose keys
    and values layers of the slice attend.

    `inputs` `[layers with inputs, slots, width]`. `states` `[layers with inputs, STATES_HELD, *state]`
    float32 (`linear_attention.py`); of each layer `lengths` says how many positions either sums up.
    """

    def __init__(
        self,
        *,
        heads: Mapping[int, Heads],
        memory: Memory,
        slots_max: int,
        held: str = "",
        with_inputs: Sequence[int] = (),
        width: int = 0,
        state: tuple[int, ...] = (),
    ) -> None:
        """Keys and values are `held` as `precision.cached_as` says (empty: as rows are)."""
        self.slots_max = slots_max
        self.places = {layer: place for place, layer in enumerate(with_inputs)}
        self.inputs = memory.zeros((len(with_inputs), 0, width), memory.dtype)
        with_states = len(with_inputs) if state else 0
        self.states = memory.zeros((with_states, STATES_HELD, *state), "float32")
        self.lengths = [[0] * STATES_HELD for _ in range(with_states)]
        self.slots = 0  # for which there is room
        self._kinds: list[_KeysAndValues] = []
        self._kind_of: dict[int, tuple[_KeysAndValues, int]] = {}
        self._addresses: dict[int, compiled.Cache] = {}
        for kind in dict.fromkeys(heads.values()):
            layers = [layer for layer, own in heads.items() if own == kind]
            self._kinds.append(_KeysAndValues(len(layers), kind, memory, held or memory.dtype))
            self._kind_of |= {layer: (self._kinds[-1], place) for place, layer in enumerate(layers)}

    def __contains__(self, layer: int) -> bool:
        return layer in self._kind_of or layer in self.places

    @property
    def bytes(self) -> int:
        """Of all that is held now."""
        own = int(self.inputs.nbytes + self.states.nbytes)
        return own + sum(int(each.nbytes) for kind in self._kinds for each in kind.tensors)

    def of(self, layer: int) -> Held:
        """A layer's keys, values, and between levels the steps of both, where they are levels."""
        kind, place = self._kind_of[layer]
        return kind.of(place)

    def address(self, layer: int) -> int:
        """Of a `compiled.Cache` of a layer; until the next `reserve`."""
        if layer not in self._addresses:
            self._addresses[layer] = self._fields(layer)
        return ctypes.addressof(self._addresses[layer])

    def _fields(self, layer: int) -> compiled.Cache:
        if layer in self.places:
            place = self.places[layer]
            state = compiled.address(self.states[place, NEAR]) if len(self.states) else None
            inputs = self.inputs[place]
            where = compiled.address(inputs)
            return compiled.Cache(inputs=where, state=state, inputs_width=inputs.shape[1])
        keys, values, steps = self.of(layer)
        each = tuple(map(compiled.address, (keys, values, *(steps or ()))))
        return compiled.Cache(*each, slots=self.slots, kind=compiled.kind_of(keys.dtype))

    def growth_bytes(self, slots: int) -> int:
        """What `reserve` would add."""
        added = max(0, _filled(cache_size(slots, self.slots_max)) - self.slots)
        inputs = self.inputs.shape[0] * self.inputs.shape[2] * self.inputs.itemsize
        return added * int(sum(kind.slot_bytes for kind in self._kinds) + inputs)

    def reserve(self, slots: int) -> None:
        """Makes room for slots `0..slots-1`; new ones are zero. Nothing has changed where memory lacks."""
        if slots <= self.slots:
            return
        assert slots <= self.slots_max, f"{slots} slots asked for, {self.slots_max} reserved"
        more = _filled(cache_size(slots, self.slots_max)) - self.slots
        larger, inputs = [kind.grown(more) for kind in self._kinds], _grown(self.inputs, more, 1)
        for kind, tensors in zip(self._kinds, larger, strict=True):
            kind.tensors = tensors
        self.inputs = inputs
        self.slots += more
        self._addresses.clear()

    def copy(self, source: TreeCache, slots: I64) -> None:
        """Into the first slots what those `slots` `[count]` of another request's hold, in their order, and
        its states; there is room for them."""
        count = len(slots)
        assert count <= self.slots, f"{count} slots are copied, there is room for {self.slots}"
        for kind, other in zip(self._kinds, source._kinds, strict=True):
            kind.copy(other, slots)
        self.inputs[:, :count] = source.inputs[:, slots]
        self.states[:] = source.states
        self.lengths = [list(each) for each in source.lengths]

    def clear(self, slots: Sequence[int]) -> None:
        """Zeroes slots that were freed."""
        index = np.array([slot for slot in slots if slot < self.slots], np.int64)
        if len(index):
            for kind in self._kinds:
                kind.clear(index)
            self.inputs[:, index] = 0


class _KeysAndValues:
    """Those of so many layers whose heads are alike, as `tensors`.

    The first are keys `[layers, kv_heads, slots / LANES, head_dim, LANES]`: a number of sixteen slots' keys
    lies side by side, as scores are summed. Then values `[layers, kv_heads, slots, head_dim filled up to
    LANES]`. In int8 both are levels (`q8_0`): each 32 numbers of a key or a value, rounded alone, with a step
    in float16; the steps of keys and of values follow, by their groups in the place of head_dim.
    """

    def __init__(self, layers: int, heads: Heads, memory: Memory, held: str) -> None:
        count, width, dtype = heads.count, heads.width, "int8" if held == Q8_0 else held
        self.tensors = [
            memory.zeros((layers, count, 0, width, LANES), dtype),
            memory.zeros((layers, count, 0, _filled(width)), dtype),
        ]
        if held == Q8_0:
            shape = layers, count, 0, -(-width // GROUP)
            self.tensors += [memory.zeros((*shape, LANES), "float16"), memory.zeros(shape, "float16")]

    def of(self, layer: int) -> Held:
        keys, values, *steps = (each[layer] for each in self.tensors)
        return keys, values, (steps[0], steps[1]) if steps else None

    @property
    def slot_bytes(self) -> int:
        return sum(int(len(x) * x.shape[1] * x.shape[3] * x.itemsize) for x in self.tensors)

    def grown(self, more: int) -> list[Array]:
        """Copies of its `tensors` with so many slots more."""
        sizes = (more // LANES, more) * 2
        return [_grown(each, size, 2) for each, size in zip(self.tensors, sizes, strict=False)]

    def copy(self, source: _KeysAndValues, slots: I64) -> None:
        """What lies in the same slots there, as prompts do, goes over in whole blocks of lanes; the rest slot
        by slot, a few at a time: these are in memory once more meanwhile."""
        count, own = len(slots), np.arange(len(slots))
        moved = np.flatnonzero(slots != own)
        blocks = (int(moved[0]) if len(moved) else count) // LANES
        for place, (mine, other) in enumerate(zip(self.tensors, source.tensors, strict=True)):
            whole = blocks * LANES if place % 2 else blocks
            mine[:, :, :whole] = other[:, :, :whole]
            for first in range(blocks * LANES, count, MOVED_AT_ONCE):
                rest, of = (each[first : first + MOVED_AT_ONCE] for each in (own, slots))
                mine[_index(place, rest)] = other[_index(place, of)]

    def clear(self, slots: I64) -> None:
        for place, own in enumerate(self.tensors):
            own[_index(place, slots)] = 0


def _index(place: int, slots: I64) -> tuple[Any, ...]:
    """Of slots, in the tensor at a place."""
    every = slice(None)
    return (every, every, slots) if place % 2 else (every, every, slots // LANES, every, slots % LANES)


def _grown(x: Array, more: int, axis: int) -> Array:
    """With so many zeros more along an axis."""
    shape, before = [*x.shape], x.shape[axis]
    shape[axis] += more
    larger = zeros(x, *shape)  # of which memory is taken as it is written to
    if before:
        larger[(slice(None),) * axis + (slice(before),)] = x
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

    def paths(self) -> I64:
        """The slot that a row sees at a position, or -1: `[rows, positions]`."""
        rows, slots = np.nonzero(self.seen)
        positions = self.key_positions[slots]
        paths = np.full((len(self.seen), int(positions.max()) + 1), -1)
        paths[rows, positions] = slots
        return paths


@dataclass(slots=True)
class TreeRows:
    """Rows `[first, first + len(slots))` of the batch: one request's; `windowed` are the same ones in the
    cache of layers with a window, if these have their own. `committed` as in `JobPart`; `walks` are
    `linear_attention`'s, by the place where they begin."""

    cache: TreeCache
    first: int
    slots: I64  # [rows]
    positions: I64  # [rows]
    key_positions: I32  # [high]
    visible: Bools  # [rows, high]
    windowed: TreeRows | None = None
    sights: dict[int | None, Sight] = field(default_factory=dict)
    lines: dict[int, I64] = field(default_factory=dict)
    committed: int = 0
    walks: dict[int, Any] = field(default_factory=dict)

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
        """Slots of the last so many nodes of each row's path, the row's own last, -1 where the text has not
        begun: `[rows, length]`."""
        if length not in self.lines:
            wanted = self.positions[:, None] - np.arange(length - 1, -1, -1)  # [rows, length]
            is_it = self.visible[:, None] & (self.key_positions == wanted[..., None])  # [rows, length, high]
            assert np.array_equal(is_it.any(axis=2), wanted >= 0), (
                "a row does not see the nodes right before it"
            )
            self.lines[length] = np.where(wanted >= 0, is_it.argmax(axis=2), -1)
        return self.lines[length]

    def select(self, kept: I64, first: int) -> TreeRows:
        """The same request's rows with only `kept` (indices into these rows)."""
        windowed = None if self.windowed is None else self.windowed.select(kept, first)
        own = self.slots[kept], self.positions[kept], self.key_positions, self.visible[kept]
        return TreeRows(self.cache, first, *own, windowed, committed=self.committed)


@dataclass(slots=True)
class TreeBatch:
    """What layers need to know of a job; of a slice that begins with this layer.

    Of its rows, where layers need that, their `tokens` `[rows]`, their `embedding` `[rows, hidden]`, and
    `going` `[rows, numbers]`, to which layers write keys and values that go on.
    """

    requests: list[TreeRows]
    first_layer: int = 0
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
        return TreeBatch(requests, self.first_layer, *of_rows)

    def of(self, layer: int) -> Iterator[tuple[TreeRows, slice]]:
        """Of each request its rows in the cache that holds a layer, and which of the batch's these are."""
        for request in self.requests:
            rows = request.of(layer)
            yield rows, slice(rows.first, rows.first + len(rows.slots))

    def write(self, memory: Memory, source: int, keys: Array, values: Array) -> None:
        """The rows' keys and values `[rows, kv_heads, head_dim]` of a layer before the slice."""
        for rows, span in self.of(source - self.first_layer):
            held = rows.cache.of(source - self.first_layer)
            memory.store(rows.slots, keys[span], values[span], held)
