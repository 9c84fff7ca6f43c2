"""The tree cache and the tree attention, which transformers' model code calls unchanged (`pieces.py`).

A node's keys and values sit in a slot; RoPE is baked in by position and the mask decides who sees whom, so
pruning frees slots without copying anything. Rows of several requests go through the linear layers together
and attend each to their own cache. A row's sums go by the positions of what it sees (`arithmetic/`), so which
slots its path happens to lie in changes no bit.

Layers that are short convolutions hold an input in each slot instead (`convolution.py`), and so do those
with linear attention, which have states beside (`linear_attention.py`).

Layers with a sliding window may have a cache of their own, with fewer slots (`core.protocol.sliding_window`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from flowspec.core.protocol.sliding_window import STATES_HELD
from flowspec.core.stage.slots import cache_size
from flowspec.model.arithmetic.operations import Sight, attention, store
from flowspec.model.arithmetic.packed import GROUP
from flowspec.model.arithmetic.plain import LANES


class TreeCache:
    """What one request holds in some layers of a slice, counted from its first; grown in blocks: keys and
    values in `layers`, and in those `with_inputs` inputs of `width`, in `input_dtype`, and states of the
    shape `state` where they have any.

    `keys` `[layers, kv_heads, slots / LANES, head_dim, LANES]`: a number of sixteen slots' keys lies side by
    side, as scores are summed. `values` `[layers, kv_heads, slots, head_dim filled up to LANES]`. In int8
    they are levels (`q8_0`): each 32 numbers of a key or a value, rounded alone, with a step in float16.
    `inputs` `[layers with inputs, slots, width]`. `states` `[layers with inputs, STATES_HELD, *state]`
    float32 (`linear_attention.py`); of each layer `lengths` says how many positions either sums up.
    """

    def __init__(
        self,
        *,
        layers: Sequence[int],
        kv_heads: int,
        head_dim: int,
        slots_max: int,
        dtype: torch.dtype,
        device: torch.device,
        with_inputs: Sequence[int] = (),
        width: int = 0,
        input_dtype: torch.dtype | None = None,
        state: tuple[int, ...] = (),
    ) -> None:
        self.slots_max = slots_max
        self.places = {layer: place for kind in (layers, with_inputs) for place, layer in enumerate(kind)}
        count = len(layers)
        self.inputs = torch.zeros((len(with_inputs), 0, width), dtype=input_dtype, device=device)
        held = len(with_inputs) if state else 0
        self.states = torch.zeros((held, STATES_HELD, *state), device=device)
        self.lengths = [[0] * STATES_HELD for _ in range(held)]
        self.keys = torch.zeros((count, kv_heads, 0, head_dim, LANES), dtype=dtype, device=device)
        self.values = torch.zeros((count, kv_heads, 0, _filled(head_dim)), dtype=dtype, device=device)
        self._steps: tuple[torch.Tensor, torch.Tensor] | None = None
        if dtype == torch.int8:
            groups = -(-head_dim // GROUP)
            self._steps = (
                torch.zeros((count, kv_heads, 0, groups, LANES), dtype=torch.float16, device=device),
                torch.zeros((count, kv_heads, 0, groups), dtype=torch.float16, device=device),
            )

    @property
    def bytes(self) -> int:
        """Of all that is held now."""
        held = (self.keys, self.values, self.inputs, self.states, *(self._steps or ()))
        return sum(each.nbytes for each in held)

    def steps(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Between levels of a layer's keys and values, where they are levels."""
        place = self.places[layer]
        return None if self._steps is None else (self._steps[0][place], self._steps[1][place])

    def growth_bytes(self, slots: int) -> int:
        """What `reserve` would add."""
        layers, heads, have, width = self.values.shape
        added = max(0, _filled(cache_size(slots, self.slots_max)) - have)
        slot = (width + self.keys.shape[3]) * self.keys.element_size()
        if self._steps is not None:
            slot += sum(steps.shape[3] * steps.element_size() for steps in self._steps)
        inputs = self.inputs.shape[0] * self.inputs.shape[2] * self.inputs.element_size()
        return added * (layers * heads * slot + inputs)

    def reserve(self, slots: int) -> None:
        """Makes room for slots `0..slots-1`; new ones are zero."""
        have = self.values.shape[2]
        if slots <= have:
            return
        assert slots <= self.slots_max, f"{slots} slots asked for, {self.slots_max} reserved"
        more = _filled(cache_size(slots, self.slots_max)) - have
        self.keys = F.pad(self.keys, (0, 0, 0, 0, 0, more // LANES))
        self.values = F.pad(self.values, (0, 0, 0, more))
        layers, _, width = self.inputs.shape  # before torch 2.10 padding took nothing that is empty
        self.inputs = torch.cat([self.inputs, self.inputs.new_zeros((layers, more, width))], dim=1)
        if self._steps is not None:
            of_keys, of_values = self._steps
            self._steps = F.pad(of_keys, (0, 0, 0, 0, 0, more // LANES)), F.pad(of_values, (0, 0, 0, more))

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keys and values `[kv_heads, rows, head_dim]` of a layer to `slots` `[rows]`."""
        place = self.places[layer]
        store(slots, keys, values, self.keys[place], self.values[place], self.steps(layer))

    @torch.inference_mode()
    def clear(self, slots: tuple[int, ...]) -> None:
        """Zeroes slots that were freed."""
        index = torch.tensor([slot for slot in slots if slot < self.values.shape[2]], device=self.keys.device)
        if len(index):
            self.keys.permute(2, 4, 0, 1, 3)[index // LANES, index % LANES] = 0
            self.values.index_fill_(2, index, 0)
            self.inputs.index_fill_(1, index, 0)
            if self._steps is not None:
                of_keys, of_values = self._steps
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
        return self if self.windowed is None or layer in self.cache.places else self.windowed

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
    """What the attention needs to know of a job; handed to every layer as the keyword `tree`."""

    requests: list[TreeRows]
    first_layer: int


def tree_attention(
    module: Any,
    query: torch.Tensor,  # [1, heads, rows, head_dim]
    key: torch.Tensor,  # [1, kv_heads, rows, head_dim]
    value: torch.Tensor,  # [1, kv_heads, rows, head_dim]
    attention_mask: torch.Tensor | None,
    *,
    tree: TreeBatch,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_unused: Any,
) -> tuple[torch.Tensor, None]:
    """Writes the rows' keys and values to their slots, then attends to what each row sees, and to sinks
    `s_aux` `[heads]`; returns `[1, rows, heads, head_dim]`."""
    layer = module.layer_idx - tree.first_layer
    outputs = []
    for request in tree.requests:
        rows = request.of(layer)
        assert rows is request or sliding_window is not None, "a layer without a window holds all"
        span = slice(rows.first, rows.first + len(rows.slots))
        rows.cache.write(layer, rows.slots, key[0, :, span], value[0, :, span])
        own = query[0, :, span].transpose(0, 1)  # [rows, heads, head_dim]
        place = rows.cache.places[layer]
        keys, values = rows.cache.keys[place], rows.cache.values[place]
        sight, steps = rows.sight(sliding_window), rows.cache.steps(layer)
        outputs.append(attention(own, keys, values, sight, scaling, softcap, steps, s_aux))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)  # [rows, heads, head_dim]
    return output[None], None
