"""What computes a model's parts on a device. There are two: programs in C on a CPU (`engines.py`), torch on a
GPU (`gpu.py`). Both give a row the same bits whatever rows run with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from flowspec.core.protocol.model_spec import LayerSpec, Rotary
from flowspec.model.arithmetic.arrays import I64, Array, Memory, namespace
from flowspec.model.arithmetic.plain import Held
from flowspec.model.attention import Angles, TreeBatch, TreeCache
from flowspec.model.parts import Linear, Matrix, NormPart, Parts, RowsFunction
from flowspec.model.program import Place
from flowspec.model.rounding import Rounded


class Pass(Protocol):
    """Runs layers with the same rows, one after another; there is one at a time."""

    hidden: Array
    """Hidden states `[rows, width]`, by now."""

    def run(self, layer: Any, angles: Angles) -> None: ...


class Engine(Memory, Protocol):
    """Of one model in one precision. Not thread-safe: one thread runs it."""

    device: str
    """`cpu`, `cuda:0`."""

    # ---------------------------------------------------------------------------------------- arrays

    def array(self, x: npt.NDArray[Any]) -> Array:
        """There, as it is; bfloat16 is uint16 in numpy."""

    def numpy(self, x: Array) -> npt.NDArray[Any]:
        """Here again."""

    def copied(self, x: Array) -> Array: ...
    def wide(self, x: Array) -> Array:
        """In float32."""

    def narrow(self, x: Array) -> Array:
        """In the dtype of rows."""

    def cast(self, x: npt.NDArray[Any]) -> Array:
        return self.narrow(self.array(x))

    def scaled(self, x: Array, factor: float) -> Array:
        """Times a factor, rounded once."""
        with np.errstate(all="ignore"):  # what is too large shows in logits
            return self.narrow(self.wide(x) * factor)

    def joined(self, parts: Sequence[Array]) -> Array:
        """`[rows, numbers]` of several, one after another."""
        return parts[0] if len(parts) == 1 else namespace(parts[0]).concatenate(parts, 1)

    def rounded_matrix(self, dtype: str, rounded: Rounded, inputs: int) -> Matrix: ...

    # ------------------------------------------------------------------------------------- computing

    def layer(self, parts: Parts, spec: LayerSpec, place: Place) -> Any:
        """What `Pass.run` takes."""

    def rows(
        self, *, norm: NormPart | None = None, linear: Linear | None = None, are_logits: bool = False
    ) -> RowsFunction:
        """A norm, a linear layer, or both; logits are float32, and other rows as those that are given."""

    def take(self, table: Matrix, rows: I64) -> Array:
        """Rows of a table, in the dtype of rows."""

    def angles(self, positions: I64, rotary: Rotary) -> Angles: ...
    def turn(self, x: Array, angles: Angles) -> Array:
        """Queries or keys `[rows, heads, width]`, turned by their positions, in float32."""

    def store(self, slots: I64, keys: Array, values: Array, to: Held) -> None:
        """Keys and values `[rows, kv_heads, head_dim]`, of whatever dtype, to slots of a layer's."""

    def function(self, x: Array, name: str) -> Array:
        """One of `plain.FUNCTIONS`, number by number, of float32."""

    def begin(self, hidden: Array, batch: TreeBatch) -> Pass:
        """With hidden states `[rows, width]` of its own."""

    def pass_by(self, layer: Any, cache: TreeCache, passed: Sequence[int]) -> None:
        """Brings the state `BASE` of a layer to the end of these slots, which `ClearSlots` names."""
