"""Which engine computes on a device, and that of a CPU: programs as C runs them (`operations.py`), on numpy's
arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from flowspec.core.protocol.model_spec import Convolution, DeltaRule, LayerSpec, Norm, Rotary
from flowspec.core.protocol.precision import ACTIVATIONS
from flowspec.errors import InputError
from flowspec.model.arithmetic import compiled
from flowspec.model.arithmetic.arrays import DTYPES, I64, in_room, narrowed, room, widened
from flowspec.model.arithmetic.compiled import FUNCTIONS, Cache, Call, Part, address, kind_of, threads
from flowspec.model.arithmetic.packed import FORMS, packed
from flowspec.model.arithmetic.plain import Held
from flowspec.model.attention import BASE, Angles, TreeBatch, TreeCache, TreeRows
from flowspec.model.engine import Engine
from flowspec.model.linear_attention import Walk, walk_of, walk_past
from flowspec.model.operations import Operations, Room, Rows, operations_of
from flowspec.model.parts import Linear, Matrix, NormPart, Packed, Parts, Plain, RowsFunction
from flowspec.model.program import Arithmetic, Place, program_of, rows_program
from flowspec.model.rounding import ROUNDINGS, Rounded
from flowspec.model.trials import processor, run_trial

Array = npt.NDArray[Any]


def engine_of(dtype: str, device: str, norm: Norm, arithmetic: str = "") -> Engine:
    """For a model in a precision, whose norms compute so: by an `arithmetic`, or the best that the device
    has. Raises `InputError` where it lacks that."""
    known = run_trial(dtype, device).arithmetics
    arithmetic = arithmetic or known[0]
    if arithmetic not in known:
        has = f"{device} on {processor()} has {', '.join(known)}"
        raise InputError(f"expected the arithmetic {arithmetic} of {dtype}, {has}")
    if device == "cpu":
        return Cpu(dtype, norm)
    from flowspec.model.gpu import Gpu  # where torch is

    return Gpu(dtype, arithmetic, norm, device)


class Cpu(Engine):
    """Raises `InputError` where the library cannot be had."""

    def __init__(self, dtype: str, norm: Norm) -> None:
        self.device, self.dtype = "cpu", ACTIVATIONS[dtype]
        self._how = Arithmetic(self.dtype, norm)
        library = compiled.library()
        assert library is not None, "it was tried"
        self._library, self._room = library, Room(library)

    # ---------------------------------------------------------------------------------------- arrays

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Array:
        return room(shape, DTYPES.get(dtype, dtype), np.zeros)

    def array(self, x: Array) -> Array:
        return np.ascontiguousarray(x)

    def copied(self, x: Array) -> Array:
        return x.copy()

    def numpy(self, x: Array) -> Array:
        return x

    def wide(self, x: Array) -> Array:
        return widened(x)

    def narrow(self, x: Array) -> Array:
        return narrowed(x, self.dtype)

    def rounded_matrix(self, dtype: str, rounded: Rounded, inputs: int) -> Matrix:
        how = ROUNDINGS[dtype]
        panels = packed(FORMS[how.form], how.spread(rounded))
        return Packed(how.form, in_room(panels), len(rounded["levels"]))

    # ------------------------------------------------------------------------------------- computing

    def layer(self, parts: Parts, spec: LayerSpec, place: Place) -> Operations:
        return operations_of(program_of(parts, spec, self._how, place))

    def rows(
        self, *, norm: NormPart | None = None, linear: Linear | None = None, are_logits: bool = False
    ) -> RowsFunction:
        return Rows(self._room, rows_program(self._how, norm, linear, are_logits))

    def take(self, table: Matrix, rows: I64) -> Array:
        if isinstance(table, Plain):
            found: Array = table.weights[rows]
            return narrowed(found, self.dtype) if found.dtype != DTYPES[self.dtype] else found
        ids, form = np.ascontiguousarray(rows), FORMS[table.form]
        made = np.empty((len(ids), table.inputs), np.float32)
        matrix = address(table.panels), form.number, table.inputs
        self._library.packed_rows(*matrix, address(ids), len(ids), address(made))
        return narrowed(made, self.dtype)

    def function(self, x: Array, name: str) -> Array:
        given = np.ascontiguousarray(x)
        found = np.empty_like(given)
        self._library.function(address(given), given.size, FUNCTIONS.index(name), None, address(found))
        return found

    def angles(self, positions: I64, rotary: Rotary) -> Angles:
        frequencies, given = np.array(rotary.frequencies, np.float32), np.ascontiguousarray(positions)
        cosine, sine = (np.empty((1, len(given), 2 * len(frequencies)), np.float32) for _ in range(2))
        of_rows = address(given), len(given), address(frequencies), len(frequencies)
        self._library.angles(*of_rows, rotary.scale, address(cosine), address(sine))
        return cosine, sine

    def turn(self, x: Array, angles: Angles) -> Array:
        rows, heads, width = x.shape
        given, found = np.ascontiguousarray(widened(x)), np.empty(x.shape, np.float32)
        where = address(given), address(angles[0]), address(angles[1]), address(found)
        shape = rows, heads, width, angles[0].shape[-1], heads * width, width
        self._library.turn(compiled.TurnFields(*where, *shape))
        return found

    def store(self, slots: I64, keys: Array, values: Array, to: Held) -> None:
        to_keys, to_values, steps = to
        given = [np.ascontiguousarray(each) for each in (widened(keys), widened(values), slots)]
        where: list[int | None] = [address(each) for each in (*given, to_keys, to_values, *(steps or ()))]
        where += [None] * (7 - len(where))
        rows, heads, width = keys.shape
        shape = rows, heads, width, to_values.shape[2], to_values.shape[1]
        between = (heads * width, width) * 2
        self._library.store(compiled.StoredFields(*where, *shape, *between, kind_of(to_keys.dtype)))

    def begin(self, hidden: Array, batch: TreeBatch) -> _Pass:
        return _Pass(self._room, hidden, batch)

    def pass_by(self, layer: Operations, cache: TreeCache, passed: Sequence[int]) -> None:
        mixer = layer.view[1]
        assert isinstance(mixer, DeltaRule)
        inputs, state = cache.inputs(layer.source), cache.states[layer.source][BASE]
        where = Cache(inputs=address(inputs), inputs_width=inputs.shape[1], state=address(state))
        part, walk = Part(cache=ctypes.addressof(where)), walk_past(layer.source, cache, passed, mixer.length)
        _step(part, walk)
        self._room.run(layer.past, Call(parts=ctypes.addressof(part), parts_count=1, threads=1))


class _Pass:
    """A `Pass`, whose layers change hidden states in place."""

    def __init__(self, room: Room, hidden: Array, batch: TreeBatch) -> None:
        self.hidden = hidden
        self._room, self._batch = room, batch
        self._parts: dict[Any, tuple[int, list[tuple[Part, TreeRows]]]] = {}
        self._angles: Angles | None = None
        call = self._call = Call(hidden=address(hidden), rows=len(hidden), threads=threads())
        call.parts_count = len(batch.requests)
        if batch.tokens is not None:
            call.tokens = address(batch.tokens)
        if batch.going is not None:
            call.going, call.between_going = address(batch.going), batch.going.shape[1]
        if batch.embedding is not None:
            between = batch.embedding.strides[0] // batch.embedding.itemsize
            call.embedding, call.between_embeddings = address(batch.embedding), between

    def run(self, layer: Operations, angles: Angles) -> None:
        call = self._call
        if angles is not self._angles:
            cosine, sine = self._angles = angles
            call.cosine, call.sine, call.angles = address(cosine), address(sine), cosine.shape[2]
        if layer.view not in self._parts:
            self._parts[layer.view] = self._made(layer)
        call.parts, requests = self._parts[layer.view]
        mixer = layer.view[1]
        for part, rows in requests:
            part.cache = rows.cache.address(layer.source)
            if isinstance(mixer, DeltaRule):
                _step(part, walk_of(rows, layer.source, mixer.length))
        self._room.run(layer, call)

    def _made(self, layer: Operations) -> tuple[int, list[tuple[Part, TreeRows]]]:
        array, (window, mixer) = (Part * len(self._batch.requests))(), layer.view
        found = []
        for part, request in zip(array, self._batch.requests, strict=True):
            rows = request.of(layer.source)
            assert rows is request or window is not None, "a layer without a window holds all"
            part.first, part.rows, part.slots = rows.first, len(rows.slots), address(rows.slots)
            if mixer is None:
                sight = rows.sight(window)
                order, ends = sight.order
                part.seen, part.order, part.ends = address(sight.seen), address(order), address(ends)
                part.high, part.blocks = sight.seen.shape[1], len(ends)
            elif isinstance(mixer, Convolution):
                part.lines = address(rows.line(mixer.length))
            found.append((part, rows))
        return ctypes.addressof(array), found  # a part holds the array that it is of


def _step(part: Part, walk: Walk) -> None:
    part.lines, part.steps = address(walk.lines), address(walk.steps)
    part.nodes, part.steps_count, part.places = len(walk.lines), len(walk.steps), walk.places
