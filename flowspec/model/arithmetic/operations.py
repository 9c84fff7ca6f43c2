"""The canonical arithmetic's operations, each by `canonical.c`, on a GPU by `canonical.cu`, where that may be
used, else as `plain.py` defines it.

Tensors may have any dtype that a layer computes in, and results have it, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from flowspec.model.arithmetic import compiled, compiled_cuda, compiled_torch, plain
from flowspec.model.arithmetic.compiled_cuda import POSITIONS_MAX, WIDTH_MAX
from flowspec.model.arithmetic.delta import DeltaRows
from flowspec.model.arithmetic.norms import Norm
from flowspec.model.arithmetic.packed import Form


def norm(x: torch.Tensor, weights: torch.Tensor, eps: float, how: Norm) -> torch.Tensor:
    """Rows `[..., width]` over the root of their mean square, times `weights` `[width]` in the way `how`."""
    library = _library(x, x.shape[-1])
    if library is None:
        return plain.norm(x, weights, eps, how)
    return library.norm(x.contiguous(), weights, eps, how)


def function(x: torch.Tensor, name: str) -> torch.Tensor:
    """`silu`, `gelu_tanh`, `tanh` or `sigmoid`, number by number."""
    library = _library(x)
    if library is None:
        return plain.FUNCTIONS[name](x.float()).to(x.dtype)
    return library.function(x.contiguous(), name)


def gated(gate: torch.Tensor, up: torch.Tensor, name: str) -> torch.Tensor:
    """A function of `gate`, rounded to the dtype, times `up`, number by number."""
    library = _library(gate)
    if library is None:
        return plain.FUNCTIONS[name](gate.float()).to(gate.dtype) * up
    return library.function(gate.contiguous(), name, up.contiguous())


def angles(
    positions: torch.Tensor, frequencies: torch.Tensor, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """`plain.angles`."""
    library = _cpu_library(positions)
    if library is None:
        return plain.angles(positions, frequencies, scale, dtype)
    return library.angles(positions.contiguous(), frequencies.contiguous(), scale, dtype)


def turned(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Queries or keys `[1, heads, rows, width]`, turned by their positions (`plain.turned`)."""
    library = _library(x)
    turn = plain.turned if library is None or x.stride(3) != 1 else library.turned
    return turn(x, cosine, sine)


def delta_rule(rows: DeltaRows, states: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Steps of linear attention (`plain.delta_rule`); `states` are contiguous, `steps` on the CPU."""
    library = _cpu_library(states)
    if library is None or rows.keys.shape[2] > compiled.KEY_WIDTH_MAX or not len(steps):
        return plain.delta_rule(rows, states, steps)
    rows = DeltaRows(*(each.contiguous() for each in rows))
    return library.delta_rule(rows, states, steps.contiguous())


def product(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`x W^T`, `[rows, out]`, of float32 `[rows, in]` and `[out, in]`: for small matrices, such as a
    router's."""
    library = _library(x, x.shape[-1])
    if library is None:
        return plain.product(x, weights)
    return library.halves(x.contiguous(), weights.contiguous())


def softmax(x: torch.Tensor) -> torch.Tensor:
    """By the last dimension, of float32."""
    library = _library(x, x.shape[-1])
    return plain.softmax(x) if library is None else library.shares(x.contiguous(), are_powers=True)


def over_their_sum(x: torch.Tensor) -> torch.Tensor:
    """Numbers over their sum by the last dimension, of float32."""
    library = _library(x, x.shape[-1])
    return plain.over_their_sum(x) if library is None else library.shares(x.contiguous(), are_powers=False)


def packed_product(x: torch.Tensor, form: Form, panels: torch.Tensor, outputs: int) -> torch.Tensor:
    """`x W^T`, `[rows, outputs]`, from rows `[rows, in]` and the panels of W (`packed.py`)."""
    library = _cpu_library(x)
    if library is None:
        return plain.packed_product(x.float(), form, panels, outputs).to(x.dtype)
    return library.packed(x.contiguous(), form, panels, outputs)


def packed_rows(form: Form, panels: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Rows of a packed matrix as numbers, `[ids, in]` float32, from ids `[ids]` int64."""
    library = _cpu_library(panels)
    return (plain.packed_rows if library is None else library.packed_rows)(form, panels, ids)


def levels(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `[rows, width]` as levels, int8, and the step between them for each 32 numbers, float32 `[rows,
    width / 32]`, rounded up."""
    library = _cpu_library(x)
    wide = x.float().contiguous()
    return plain.levels(wide) if library is None else library.levels(wide)


def store(
    places: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    to_keys: torch.Tensor,
    to_values: torch.Tensor,
    steps: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """Keys and values `[kv_heads, rows, width]` to slots `places` `[rows]` of a cache (`plain.store`)."""
    library = _library(keys)
    lie_apart = keys.stride(2) != 1 or values.stride(2) != 1
    if isinstance(library, compiled_torch.TensorLibrary) and not lie_apart:
        library.store(places, keys, values, to_keys, to_values, steps)
    elif isinstance(library, compiled_cuda.CudaLibrary) and not lie_apart and steps is None:
        library.store(places, keys, values, to_keys, to_values)
    else:
        plain.store(places, keys, values, to_keys, to_values, steps)


@dataclass(slots=True)
class Sight:
    """What each row of a job sees of a cache: `seen` `[rows, high]` bool, `key_positions` `[high]` int32 of
    the slots.

    A row sees at most one slot for each position.
    """

    seen: torch.Tensor
    key_positions: torch.Tensor
    _order: tuple[torch.Tensor, torch.Tensor] | None = None
    _paths: torch.Tensor | None = None

    def order(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots that any row sees by position, and where among them each block of positions ends; both int32,
        on the CPU."""
        if self._order is None:
            slots = np.flatnonzero(self.seen.numpy().any(axis=0))
            positions = self.key_positions.numpy()[slots]
            places = np.argsort(positions, kind="stable")
            blocks = positions[places] // plain.BLOCK
            ends = np.append(np.flatnonzero(blocks[1:] != blocks[:-1]) + 1, len(blocks))
            self._order = (
                torch.from_numpy(slots[places].astype(np.int32)),
                torch.from_numpy(ends.astype(np.int32)),
            )
        return self._order

    def paths(self) -> torch.Tensor:
        """The slot that a row sees at a position, or -1: `[rows, positions]` int64."""
        if self._paths is None:
            rows, slots = self.seen.nonzero(as_tuple=True)
            positions = self.key_positions[slots].long()
            self._paths = slots.new_full((len(self.seen), int(positions.max()) + 1), -1)
            self._paths[rows, positions] = slots
        return self._paths


def attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sight: Sight,
    scale: float,
    cap: float | None = None,
    steps: tuple[torch.Tensor, torch.Tensor] | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`[rows, heads, width]` from queries of that shape, `keys` `[kv_heads, slots / 16, width, 16]` and
    `values` `[kv_heads, slots, width filled up to a multiple of 16]`.

    Keys and values in int8 are levels; `steps` has the step between them for each 32 numbers of a slot, in
    float16: `[kv_heads, slots / 16, width / 32, 16]` and `[kv_heads, slots, width / 32]`, rounded up.
    `sinks` `[heads]` are scores beside those of keys, which have a share and no value.
    """
    library = _library(queries)
    sinks = None if sinks is None else sinks.float().contiguous()
    if isinstance(library, compiled_torch.TensorLibrary):
        seen = sight.seen, *sight.order()
        return library.attention(queries.contiguous(), keys, values, steps, *seen, scale, cap, sinks)
    if library is not None and steps is None and (paths := sight.paths()).shape[1] <= POSITIONS_MAX:
        return library.attention(queries.contiguous(), keys, values, paths, scale, cap, sinks)
    if steps is not None:
        keys, values = plain.of_levels(keys, steps[0], 2), plain.of_levels(values, steps[1], 2)
    values = values[..., : queries.shape[2]]
    return plain.attention(queries.float(), keys, values, sight.paths(), scale, cap, sinks).to(queries.dtype)


def _library(
    x: torch.Tensor, width: int = 0
) -> compiled_torch.TensorLibrary | compiled_cuda.CudaLibrary | None:
    """What computes on a tensor's device, for sums in halves of `width` numbers; None: the definitions do."""
    if x.device.type == "cpu":
        return compiled_torch.library()
    return compiled_cuda.library(x.device) if width <= WIDTH_MAX else None


def _cpu_library(x: torch.Tensor) -> compiled_torch.TensorLibrary | None:
    """For what has no kernel on GPUs."""
    return compiled_torch.library() if x.device.type == "cpu" else None
