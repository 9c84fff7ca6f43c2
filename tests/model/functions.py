"""Operations of `canonical.c` one at a time, for numpy's arrays, by programs as layers are."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from flowspec.core.protocol.model_spec import DeltaRule
from flowspec.model.arithmetic import compiled
from flowspec.model.arithmetic.compiled import KINDS, Cache, Call, Part, address, kind_of, threads
from flowspec.model.arithmetic.plain import UNIT_EPS, Held
from flowspec.model.attention import Sight
from flowspec.model.engines import Cpu
from flowspec.model.parts import Linear, Matrix, Plain
from flowspec.model.program import Arithmetic, Maker, Room, Rows, View
from flowspec.model.rounding import ROUNDINGS

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
FLOAT32 = KINDS["float32"]
WORTH_THREADS = 1 << 30
"""Products with which a program is run by as many threads as there are."""


def room() -> Room:
    library = compiled.library()
    assert library is not None
    return Room(library)


def engine(dtype: str = "float32") -> Cpu:
    return Cpu(dtype, "", "cast, scale")


def multiplied(x: Array, matrix: Matrix, bias: Array | None = None, plain: str = "linear") -> Array:
    """Rows by a matrix, in their dtype; a `plain` one in lanes or in `pairs`."""
    how = Arithmetic(kind_of(x.dtype), "cast, scale", plain)
    linear = Linear(inputs=x.shape[1], matrices=(matrix,), bias=bias)
    found: Array = Rows(room(), how, None, linear)(x)
    return found


def pairs(x: Array, weights: Array) -> F32:
    """Float32 of bfloat16 in pairs (`pairs_product`): the rows of a program in float32 are read as if
    they were bfloat16, and its results are not rounded."""
    given = np.zeros(x.shape, np.float32)
    given.view(np.uint16)[:, : x.shape[1]] = x
    return multiplied(given, Plain(weights), plain="pairs")


def rounded_matrix(dtype: str, weights: Array) -> Matrix:
    """As slices of that precision have it."""
    return engine().rounded_matrix(dtype, ROUNDINGS[dtype].round(weights), weights.shape[1])


class _Few(Maker):
    """A program of a few operations, on rows of so many numbers."""

    def __init__(self, dtype: Any, width: int) -> None:
        super().__init__(Arithmetic(kind_of(dtype), "cast, scale"))
        self._products = WORTH_THREADS
        self.rows = self.register(width)
        self._end = self._numbers = 0  # these are the caller's

    def sum(self, name: str, source: View, to: View | None = None, sums: int = 0, **fields: Any) -> None:
        """An operation, which sums so many numbers for a row."""
        self._sums_most = max(self._sums_most, sums)
        for each in ("weights", "bias", "scales"):
            if isinstance(fields.get(each), np.ndarray):
                fields[each] = self.hold(fields[each])
        self.add(name, source, to or source, **fields)

    def run(self, x: Array, found: Array | None = None, part: Part | None = None) -> Room:
        """With what is carried out to `found`; gives the room that it was lent."""
        program, given, lent = self.program(), np.ascontiguousarray(x), room()
        call = Call(hidden=address(given), rows=len(given), threads=threads())
        if found is not None:
            call.going, call.between_going = address(found), found.shape[1]
        if part is not None:
            call.parts, call.parts_count = ctypes.addressof(part), 1
        lent.run(program, call)
        return lent


def product(x: F32, weights: F32) -> F32:
    """In halves (`plain.product`): what a router's next operation takes, from where registers end."""
    (rows, inputs), outputs = x.shape, len(weights)
    few = _Few(x.dtype, inputs)
    few.add("widen", few.rows)
    shape: dict[str, Any] = {"inputs": inputs, "outputs": outputs, "kind": FLOAT32, "how": FLOAT32}
    few.sum("halves", few.rows, weights=weights, sums=outputs, **shape)
    lent = few.run(x)
    first = lent._at - address(lent._bytes)
    return lent._bytes[first : first + 4 * rows * outputs].view(np.float32).reshape(rows, outputs)


def attention(
    queries: Array, held: Held, sight: Sight, scale: float, cap: float = 0.0, sinks: F32 | None = None
) -> Array:
    """`[rows, heads, width]` of that shape (`plain.attention`)."""
    (rows, heads, width), (keys, values, steps) = queries.shape, held
    few = _Few(queries.dtype, heads * width)
    to = few.register(heads * width)
    shape: dict[str, Any] = {"inputs": width, "heads": heads, "kv_heads": len(keys)}
    few.sum("attend", few.rows, to, bias=sinks, factor=scale, cap=cap, **shape)
    few.add("carry", to)
    of_steps = (None, None) if steps is None else tuple(map(address, steps))
    cache = Cache(address(keys), address(values), *of_steps, slots=values.shape[1], kind=kind_of(keys.dtype))
    order, ends = sight.order
    part = Part(cache=ctypes.addressof(cache), rows=rows, high=sight.seen.shape[1], blocks=len(ends))
    part.seen, part.order, part.ends = map(address, (sight.seen, order, ends))
    found = np.empty((rows, heads * width), queries.dtype)
    few.run(queries.reshape(rows, -1), found, part)
    return found.reshape(queries.shape)


def delta_rule(
    mixer: DeltaRule, held: Array, lines: Array, taps: F32, rates: F32, state: F32, steps: Array, places: int
) -> Array:
    """What rows read after steps from a `state` `[heads, key_width, value_width]`, which is changed in place
    (`plain.delta_rows`, `plain.delta_rule`): `[rows, heads, value_width]` in the dtype of what is `held`."""
    rows, values = 1 + int(steps[:, 3].max()), mixer.value_numbers
    few = _Few(held.dtype, 1)
    shape: dict[str, Any] = {
        "inputs": mixer.key_width,
        "outputs": mixer.value_width,
        "heads": mixer.heads,
        "kv_heads": mixer.key_heads,
    }
    more: dict[str, Any] = {"how": mixer.length, "factor": mixer.key_width**-0.5, "eps": UNIT_EPS}
    few.sum("recall", few.rows, weights=taps, scales=rates, **shape, **more)
    to = few.register(values)
    few.sum("step_states", few.rows, to, sums=values, **shape)
    few.add("carry", to)
    cache = Cache(inputs=address(held), state=address(state), inputs_width=held.shape[1])
    part = Part(cache=ctypes.addressof(cache), lines=address(lines), steps=address(steps), rows=rows)
    part.nodes, part.steps_count, part.places = len(lines), len(steps), places
    found = np.empty((rows, values), held.dtype)
    few.run(np.zeros((rows, 1), held.dtype), found, part)
    return found.reshape(rows, mixer.heads, mixer.value_width)
