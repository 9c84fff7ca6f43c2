"""The tree cache, and what rows see of it.

A node's keys and values sit in a slot; RoPE is baked in by position and the mask decides who sees whom, so
pruning frees slots without copying anything. Rows of several requests go through the linear layers together
and attend each to their own cache. A row's sums go by the positions of what it sees (`arithmetic/`), so which
slots its path happens to lie in changes no bit.

Layers that are short convolutions hold an input in each slot instead (`convolution.py`), and so do those
with linear attention, which have states beside (`linear_attention.py`). Some attend to what a layer before
them holds (`core.protocol.model_spec`).

Layers with a sliding window may have a cache of their own, with fewer slots (`core.protocol.sliding_window`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from flowspec.core.protocol.model_spec import Heads
from flowspec.core.protocol.sliding_window import STATES_HELD
from flowspec.core.stage.slots import cache_size
from flowspec.model.arithmetic import compiled
from flowspec.model.arithmetic.operations import Sight, store
from flowspec.model.arithmetic.packed import GROUP
from flowspec.model.arithmetic.plain import LANES

BASE, NEAR, SNAPSHOT = 0, 1, 2
"""The states that are held (`linear_attention.py`)."""
MOVED_AT_ONCE = 256
"""Slots that are copied at once to others: of an 8 B model in bfloat16 16 MiB of keys."""


class TreeCache:
    """What one request holds in some layers of a slice, counted from its first; grown in blocks: keys and
    values of layers in `heads`, and in those `with_inputs` inputs of `width`, in `input_dtype`, and states of
    the shape `state` where they have any. A layer before the slice's first, below 0, is one to whose keys
    and values layers of the slice attend.

    `inputs` `[layers with inputs, slots, width]`. `states` `[layers with inputs, STATES_HELD, *state]`
    float32 (`linear_attention.py`); of each layer `lengths` says how many positions either sums up.
    """

    def __init__(
        self,
        *,
        heads: Mapping[int, Heads],
        slots_max: int,
        dtype: torch.dtype,
        device: torch.device,
        with_inputs: Sequence[int] = (),
        width: int = 0,
        input_dtype: torch.dtype | None = None,
        state: tuple[int, ...] = (),
    ) -> None:
        self.slots_max = slots_max
        self.places = {layer: place for place, layer in enumerate(with_inputs)}
        self.inputs = torch.zeros((len(with_inputs), 0, width), dtype=input_dtype, device=device)
        held = len(with_inputs) if state else 0
        self.states = torch.zeros((held, STATES_HELD, *state), device=device)
        self.lengths = [[0] * STATES_HELD for _ in range(held)]
        self._device = device
        self._slots = 0
        self._kinds: list[_KeysAndValues] = []
        self._kind_of: dict[int, tuple[_KeysAndValues, int]] = {}
        self._addresses: dict[int, compiled.Cache] = {}
        for kind in dict.fromkeys(heads.values()):
            layers = [layer for layer, own in heads.items() if own == kind]
            self._kinds.append(_KeysAndValues(len(layers), kind, dtype, device))
            self._kind_of |= {layer: (self._kinds[-1], place) for place, layer in enumerate(layers)}

    def __contains__(self, layer: int) -> bool:
        return layer in self._kind_of or layer in self.places

    @property
    def slots(self) -> int:
        """How many there is room for."""
        return self._slots

    @property
    def bytes(self) -> int:
        """Of all that is held now."""
        own = self.inputs.nbytes + self.states.nbytes
        return own + sum(each.nbytes for kind in self._kinds for each in kind.tensors)

    def of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, Steps]:
        """A layer's keys, values, and between levels the steps of both, where they are levels."""
        kind, place = self._kind_of[layer]
        steps = None if kind.steps is None else (kind.steps[0][place], kind.steps[1][place])
        return kind.keys[place], kind.values[place], steps

    def address(self, layer: int) -> int:
        """Of a `compiled.Cache` of a layer; until the next `reserve`."""
        found = self._addresses.get(layer)
        if found is None:
            found = self._addresses[layer] = self._fields(layer)
        return ctypes.addressof(found)

    def _fields(self, layer: int) -> compiled.Cache:
        if layer in self.places:
            place = self.places[layer]
            state = self.states[place, NEAR].data_ptr() if len(self.states) else None
            inputs = self.inputs[place]
            return compiled.Cache(inputs=inputs.data_ptr(), state=state, inputs_width=inputs.shape[1])
        keys, values, steps = self.of(layer)
        of_steps = (None, None) if steps is None else (steps[0].data_ptr(), steps[1].data_ptr())
        where = keys.data_ptr(), values.data_ptr(), *of_steps
        return compiled.Cache(*where, slots=self._slots, kind=compiled.kind_of(keys.dtype))

    def growth_bytes(self, slots: int) -> int:
        """What `reserve` would add."""
        added = max(0, _filled(cache_size(slots, self.slots_max)) - self._slots)
        inputs = self.inputs.shape[0] * self.inputs.shape[2] * self.inputs.element_size()
        return added * (sum(kind.slot_bytes for kind in self._kinds) + inputs)

    def reserve(self, slots: int) -> None:
        """Makes room for slots `0..slots-1`; new ones are zero."""
        if slots <= self._slots:
            return
        assert slots <= self.slots_max, f"{slots} slots asked for, {self.slots_max} reserved"
        more = _filled(cache_size(slots, self.slots_max)) - self._slots
        for kind in self._kinds:
            kind.grow(more)
        layers, _, width = self.inputs.shape  # before torch 2.10 padding took nothing that is empty
        self.inputs = torch.cat([self.inputs, self.inputs.new_zeros((layers, more, width))], dim=1)
        self._slots += more
        self._addresses.clear()

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keys and values `[kv_heads, rows, head_dim]` of a layer to `slots` `[rows]`."""
        store(slots, keys, values, *self.of(layer))

    @torch.inference_mode()
    def copy(self, source: TreeCache, slots: torch.Tensor) -> None:
        """Into the first slots what those `slots` `[count]` int64 of another request's hold, in their order,
        and its states; there is room for them."""
        count = len(slots)
        assert count <= self._slots, f"{count} slots are copied, there is room for {self._slots}"
        for kind, other in zip(self._kinds, source._kinds, strict=True):
            kind.copy(other, slots)
        self.inputs[:, :count] = source.inputs[:, slots]
        self.states.copy_(source.states)
        self.lengths = [list(each) for each in source.lengths]

    @torch.inference_mode()
    def clear(self, slots: tuple[int, ...]) -> None:
        """Zeroes slots that were freed."""
        index = torch.tensor([slot for slot in slots if slot < self._slots], device=self._device)
        if len(index):
            for kind in self._kinds:
                kind.clear(index)
            self.inputs.index_fill_(1, index, 0)


Steps = tuple[torch.Tensor, torch.Tensor] | None


class _KeysAndValues:
    """Those of so many layers whose heads are alike.

    `keys` `[layers, kv_heads, slots / LANES, head_dim, LANES]`: a number of sixteen slots' keys lies side by
    side, as scores are summed. `values` `[layers, kv_heads, slots, head_dim filled up to LANES]`. In int8
    they are levels (`q8_0`): each 32 numbers of a key or a value, rounded alone, with a step in float16.
    """

    def __init__(self, layers: int, heads: Heads, dtype: torch.dtype, device: torch.device) -> None:
        count, width = heads.count, heads.width
        self.keys = torch.zeros((layers, count, 0, width, LANES), dtype=dtype, device=device)
        self.values = torch.zeros((layers, count, 0, _filled(width)), dtype=dtype, device=device)
        self.steps: Steps = None
        if dtype == torch.int8:
            groups = -(-width // GROUP)
            self.steps = (
                torch.zeros((layers, count, 0, groups, LANES), dtype=torch.float16, device=device),
                torch.zeros((layers, count, 0, groups), dtype=torch.float16, device=device),
            )

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.keys, self.values, *(self.steps or ()))

    @property
    def slot_bytes(self) -> int:
        layers, heads, _, width = self.values.shape
        slot = (width + self.keys.shape[3]) * self.keys.element_size()
        slot += sum(steps.shape[3] * steps.element_size() for steps in self.steps or ())
        return layers * heads * slot

    def grow(self, more: int) -> None:
        self.keys = F.pad(self.keys, (0, 0, 0, 0, 0, more // LANES))
        self.values = F.pad(self.values, (0, 0, 0, more))
        if self.steps is not None:
            of_keys, of_values = self.steps
            self.steps = F.pad(of_keys, (0, 0, 0, 0, 0, more // LANES)), F.pad(of_values, (0, 0, 0, more))

    def copy(self, source: _KeysAndValues, slots: torch.Tensor) -> None:
        """What lies in the same slots there, as prompts do, goes over in whole blocks of lanes; the rest slot
        by slot, a few at a time: these are in memory once more meanwhile."""
        count, own = len(slots), torch.arange(len(slots), device=slots.device)
        moved = (slots != own).nonzero()
        blocks = (int(moved[0]) if len(moved) else count) // LANES
        same = blocks * LANES
        into, out = (*self.tensors[::2], *self.tensors[1::2]), (*source.tensors[::2], *source.tensors[1::2])
        lanes = len(into) // 2
        for mine, other in zip(into[:lanes], out[:lanes], strict=True):
            mine[:, :, :blocks] = other[:, :, :blocks]
        for mine, other in zip(into[lanes:], out[lanes:], strict=True):
            mine[:, :, :same] = other[:, :, :same]
        pieces = (torch.split(each[same:], MOVED_AT_ONCE) for each in (own, slots))
        for rest, of in zip(*pieces, strict=True):
            for mine, other in zip(into[:lanes], out[:lanes], strict=True):
                found = other.permute(2, 4, 0, 1, 3)[of // LANES, of % LANES]
                mine.permute(2, 4, 0, 1, 3)[rest // LANES, rest % LANES] = found
            for mine, other in zip(into[lanes:], out[lanes:], strict=True):
                mine.index_copy_(2, rest, other.index_select(2, of))

    def clear(self, index: torch.Tensor) -> None:
        self.keys.permute(2, 4, 0, 1, 3)[index // LANES, index % LANES] = 0
        self.values.index_fill_(2, index, 0)
        if self.steps is not None:
            of_keys, of_values = self.steps
            of_keys.permute(2, 4, 0, 1, 3)[index // LANES, index % LANES] = 0
            of_values.index_fill_(2, index, 0)


def _filled(count: int) -> int:
    """The next multiple of `LANES`."""
    return -(-count // LANES) * LANES


@dataclass(slots=True)
class TreeRows:
    """Rows `[first, first + len(slots))` of the batch: one request's; `windowed` are the same ones in the
    cache of layers with a window, if these have their own. `committed` as in `JobPart`; `walks` are
    `linear_attention`'s, by the place where they begin."""

    cache: TreeCache
    first: int
    slots: torch.Tensor  # [rows] int64
    positions: torch.Tensor  # [rows] int64
    key_positions: torch.Tensor  # [high] int32
    visible: torch.Tensor  # [rows, high] bool
    windowed: TreeRows | None = None
    sights: dict[int | None, Sight] = field(default_factory=dict)
    lines: dict[int, torch.Tensor] = field(default_factory=dict)
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
            self.sights[window] = Sight(seen.contiguous(), self.key_positions)
        return self.sights[window]

    def line(self, length: int) -> torch.Tensor:
        """Slots of the last so many nodes of each row's path, the row's own last, -1 where the text has not
        begun: `[rows, length]` int64."""
        if length not in self.lines:
            back = torch.arange(length - 1, -1, -1, device=self.positions.device)
            wanted = self.positions[:, None] - back  # [rows, length]
            is_it = self.visible[:, None] & (self.key_positions == wanted[..., None])  # [rows, length, high]
            found, slots = is_it.max(dim=2)
            assert torch.equal(found, wanted >= 0), "a row does not see the nodes right before it"
            self.lines[length] = torch.where(found, slots, -1)
        return self.lines[length]

    def select(self, kept: torch.Tensor, first: int) -> TreeRows:
        """The same request's rows with only `kept` (indices into these rows)."""
        windowed = None if self.windowed is None else self.windowed.select(kept, first)
        slots, positions, visible = self.slots[kept], self.positions[kept], self.visible[kept]
        return TreeRows(
            self.cache,
            first,
            slots,
            positions,
            self.key_positions,
            visible,
            windowed,
            committed=self.committed,
        )


@dataclass(slots=True)
class TreeBatch:
    """What layers need to know of a job; of a slice that begins with this layer."""

    requests: list[TreeRows]
    first_layer: int

    def write(self, source: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """The rows' keys and values `[1, kv_heads, rows, head_dim]` of a layer before the slice."""
        for request in self.requests:
            rows = request.of(source - self.first_layer)
            span = slice(rows.first, rows.first + len(rows.slots))
            rows.cache.write(source - self.first_layer, rows.slots, keys[0, :, span], values[0, :, span])
