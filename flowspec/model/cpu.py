"""The engine of a CPU, on numpy's arrays: a program's steps become operations, which refer to memory by
addresses, and C runs them in one call (`flowspec_run` in `arithmetic/canonical.c`)."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from flowspec.core.protocol.model_spec import NORMS, Convolution, DeltaRule, LayerSpec, Norm, Rotary, Router
from flowspec.core.protocol.precision import ACTIVATIONS
from flowspec.model.arithmetic import compiled
from flowspec.model.arithmetic.arrays import DTYPES, I64, Array, Memory, narrowed, room, widened
from flowspec.model.arithmetic.compiled import KINDS, Cache, Call, Part, address, kind_of, threads
from flowspec.model.arithmetic.packed import FORMS, Panels
from flowspec.model.arithmetic.plain import UNIT_EPS, Held
from flowspec.model.attention import BASE, Angles, TreeBatch, TreeCache, TreeRows, Walk
from flowspec.model.layer import (
    NOWHERE,
    Experts,
    Linear,
    Matrix,
    NormPart,
    Packed,
    Parts,
    Place,
    Plain,
    Program,
    RowsFunction,
    Step,
    View,
    program_of,
    rows_program,
)

_NAMES = (
    *("norm", "divide", "pair", "round", "linear", "pairs", "packed", "halves"),
    *("turn", "store", "attend", "gate", "add", "copy", "clip", "choose", "sort", "gather", "mix"),
    *("multiply", "scale", "hold", "convolve", "recall", "step_states", "load", "load_embedding"),
    *("look_up", "carry", "leave", "narrow"),
)
CODES = {name: code for code, name in enumerate(_NAMES)}  # in the source's order
PREPARED_BY = {
    "linear": "divide",
    "pairs": "pair",
    "packed": "round",
}  # of rows before they are multiplied so
STAGES = {
    **dict.fromkeys((*PREPARED_BY, "halves"), "outputs"),
    **{name: name for name in ("attend", "store", "sort", "convolve", "recall", "step_states")},
}
"""What threads divide in operations that do not go by rows, or that need others' rows."""
TOGETHER = {("rows", "store"), ("store", "rows"), ("convolve", "rows")}  # a thread goes on with its rows
HOW_CHOSEN: tuple[tuple[Router, ...], ...] = (
    ("softmax",),
    ("softmax to 1", "scaled softmax to 1"),
    ("softmax of chosen",),
    ("sigmoid",),
)
"""In the source's order."""
_HOW = {name: place for names in (NORMS, compiled.FUNCTIONS) for place, name in enumerate(names)}
_HOW |= {name: place for place, names in enumerate(HOW_CHOSEN) for name in names}
REGISTERS_MAX = 48
ALIGNMENT, FLOAT_BYTES = 64, 4


class Operations(compiled.ProgramFields):
    """Those of a program as the source reads them, and `held`, what has to stay in memory for them. A layer's
    attends to keys and values of a `source`; layers with one `view` see the same of what a request holds. One
    with states has those of their steps alone, for rows that are `past`."""

    at = 0  # their address
    held: tuple[Any, ...]
    source: int
    view: tuple[int | None, Convolution | DeltaRule | None]
    past: Operations


class Room:
    """Memory that calls are lent, one after another; it grows."""

    def __init__(self, library: compiled.Library) -> None:
        self._bytes = np.empty(0, np.uint8)
        self._at = self._size = 0
        self._run = library.run

    def run(self, operations: Operations, call: Call) -> None:
        call.room, call.room_bytes = self._at, self._size
        while needed := self._run(operations.at, ctypes.byref(call)):
            self._bytes, self._size = np.empty(0, np.uint8), 0  # before there is more: both would not fit
            size = needed + needed // 16
            self._bytes = np.empty(size + ALIGNMENT, np.uint8)
            self._at, self._size = -(-address(self._bytes) // ALIGNMENT) * ALIGNMENT, size
            call.room, call.room_bytes = self._at, self._size


def operations_of(program: Program) -> Operations:
    found = _Lowering(program).operations(program.steps)
    found.source, found.view = program.source, (program.window, program.mixer)
    if isinstance(program.mixer, DeltaRule):
        of_states = [step for step in program.steps if step.name == "sum_up"]
        found.past = _Lowering(program).operations(of_states)
    return found


class _Operand(NamedTuple):
    """A matrix as the source reads it: outputs of a linear layer from number `first` on; `prepared`: how it
    is multiplied, and which rows it takes, rounded so many `times`."""

    prepared: tuple[str, int, int, bool]
    kind: int
    weights: int
    inputs: int
    outputs: int
    first: int
    experts: int = 0


class _Lowering:
    """Where registers lie, and when threads wait."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._operations: list[compiled.Operation] = []
        self._tables: list[Any] = []
        self._starts: dict[int, int] = {}
        self._end = self._numbers = self._products = 0
        self._stage = ""

    def operations(self, steps: Sequence[Step]) -> Operations:
        for (name, source), each in itertools.groupby(steps, lambda step: (step.name, step.source)):
            if name == "products":
                self._multiply([*each])
            elif name == "forget":  # what comes lies where all others did
                self._end, self._stage = 0, "anew"
                self._place(source)  # which is the first
            else:
                for step in each:
                    self._lower(step)
        program, count, registers = self._program, len(self._operations), len(self._program.widths)
        assert registers <= REGISTERS_MAX, "the source has no more room"
        numbers, starts = ctypes.c_int64 * registers, [self._starts.get(r, 0) for r in range(registers)]
        lists = (compiled.Operation * count)(*self._operations), numbers(*program.widths), numbers(*starts)
        where, mixture = [ctypes.addressof(each) for each in lists], program.mixture
        experts, chosen = (0, 0) if mixture is None else (mixture.experts, mixture.chosen)
        sizes = self._numbers, experts, self._products, KINDS[program.dtype]
        found = Operations(*where, count, registers, *sizes, experts, chosen)
        found.at, found.held = ctypes.addressof(found), (*lists, self._tables, program)
        return found

    def _place(self, to: View) -> None:
        """A register lies behind those before it."""
        width = self._program.widths[to.register]
        self._starts[to.register] = self._end
        self._end += -(-width // ALIGNMENT) * ALIGNMENT
        self._numbers = max(self._numbers, self._end)

    def _add(self, name: str, step: Step, **more: Any) -> None:
        """Threads wait for each other between operations that go by rows, by outputs and by heads. `more`:
        what the source wants to know that a step does not say, or says in another way."""
        stage = STAGES.get(name, "rows" if step.spread == 1 else "rows of experts")
        before, self._stage = self._stage, stage
        waits = before not in ("", stage) and (before, stage) not in TOGETHER
        to = step.to
        if to is not NOWHERE and to.register not in self._starts:
            self._place(to)
        (source, at, width), (other, other_at, _) = step.source, step.other
        where = map(_address, (step.weights, step.bias, step.scales))
        shape = at, other_at, to.at, step.inputs or width or to.width, step.outputs
        views = CODES[name], max(0, source), other, max(0, to.register), waits
        how = _HOW.get(step.how, 0), KINDS.get(step.how, 0), step.heads, step.kv_heads, step.spread, 0
        found = compiled.Operation(*where, *shape, *views, *how, step.factor, step.eps, step.cap)
        for field, value in more.items():
            setattr(found, field, value)
        self._operations.append(found)

    def _lower(self, step: Step) -> None:
        mixture, mixer, weights = self._program.mixture, self._program.mixer, step.weights
        match step.name:
            case "route":
                assert mixture is not None
                scored = step._replace(weights=weights.weights, bias=weights.bias)
                self._add("halves", scored, outputs=mixture.experts)
                shape = {"inputs": mixture.experts, "outputs": mixture.open, "factor": mixture.factor}
                shape |= {"heads": mixture.is_normed, "kv_heads": mixture.groups}
                arrays = {"weights": weights.correction, "scales": weights.scales}
                self._add("choose", Step("choose", how=mixture.router, **arrays), **shape)
                self._add("sort", Step("sort"))
            case "sum_up":
                assert isinstance(mixer, DeltaRule)
                shape = {"inputs": mixer.key_width, "outputs": mixer.value_width}
                shape |= {"heads": mixer.heads, "kv_heads": mixer.key_heads}
                own = {"how": len(weights), "factor": mixer.key_width**-0.5, "eps": UNIT_EPS}
                self._add("recall", step._replace(to=NOWHERE), **own, **shape)
                self._add("step_states", Step("step_states", to=step.to), **shape)
            case "look_up" if isinstance(weights, Packed):
                packed_table = step._replace(weights=weights.panels)
                self._add("look_up", packed_table, kind=FORMS[weights.form].number, how=True)
            case "look_up":
                table = weights.weights
                self._add("look_up", step._replace(weights=table), kind=kind_of(table.dtype))
            case name:
                self._add(name, step)

    def _multiply(self, steps: Sequence[Step]) -> None:
        """The same rows, which are prepared once for all that take them alike."""
        given = [(step, each) for step in steps for each in self._operands(step.weights)]
        for prepared in dict.fromkeys(each.prepared for _, each in given):
            alike = [(step, each) for step, each in given if each.prepared == prepared]
            (step, first), (name, times, *_) = alike[0], prepared
            whole = View(step.source.register, 0, first.inputs), step.spread * first.inputs
            lies = step.source, self._program.widths[step.source.register]
            assert lies == whole, "rows are read as they lie"
            how = {"experts": first.experts, "how": times}
            self._add(PREPARED_BY[name], step._replace(weights=None, to=NOWHERE), kind=first.kind, **how)
            for step, each in alike:
                to = View(step.to.register, step.to.at + each.first, each.outputs)
                own = {"kind": each.kind, "weights": each.weights, "outputs": each.outputs, **how}
                linear = step.weights if isinstance(step.weights, Linear) else step.weights[0]
                if linear.bias is not None:
                    own["bias"] = address(linear.bias) + each.first * FLOAT_BYTES
                self._add(name, step._replace(weights=None, to=to), **own)
                self._products += step.spread * each.inputs * each.outputs

    def _operands(self, part: Linear | Experts) -> list[_Operand]:
        """Of experts' matrices, which lie elsewhere and are alike but for that, a table of their places."""
        if isinstance(part, Linear):
            return _operands(part)
        found = []
        for alike in zip(*map(_operands, part), strict=True):
            assert len({each._replace(weights=0) for each in alike}) == 1, "they are packed alike"
            table = (ctypes.c_void_p * len(alike))(*(each.weights for each in alike))
            self._tables.append(table)
            found.append(alike[0]._replace(weights=ctypes.addressof(table), experts=len(alike)))
        return found


def _operands(linear: Linear) -> list[_Operand]:
    found, first = [], 0
    for matrix in linear.matrices:
        if isinstance(matrix, Packed):
            form = FORMS[matrix.form]
            is_signed = bool(form.table) or form.bits == 8
            prepared = "packed", 1 + linear.is_fine, -1 if is_signed else form.offset, form.halves > 1
            kind, weights = form.number, matrix.panels
        else:
            weights = matrix.weights
            kind = kind_of(weights.dtype)
            prepared = "pairs" if kind == KINDS["bfloat16"] else "linear", 1, 0, False
        found.append(_Operand(prepared, kind, address(weights), linear.inputs, matrix.outputs, first))
        first += matrix.outputs
    return found


def _address(x: Any) -> int | None:
    """Where an array lies, if there is one."""
    assert x is None or x.flags.c_contiguous, "the source reads one number after another"
    return None if x is None else address(x)


# ------------------------------------------------------------------------------------------ the engine


class Cpu(Memory):
    """Of one model in one precision, by a library that was tried. Not thread-safe: one thread runs it."""

    def __init__(self, dtype: str, norm: Norm) -> None:
        self.device, self.dtype = "cpu", ACTIVATIONS[dtype]
        self._norm = norm
        library = compiled.library()
        assert library is not None, "it was tried"
        self._library, self.room = library, Room(library)

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

    def packed_matrix(self, form: str, panels: Panels, outputs: int) -> Matrix:
        return Packed(form, self.array(panels), outputs)

    # ------------------------------------------------------------------------------------- computing

    def layer(self, parts: Parts, spec: LayerSpec, place: Place) -> Any:
        """What a pass runs."""
        return operations_of(program_of(parts, spec, self.dtype, self._norm, place))

    def rows(
        self, *, norm: NormPart | None = None, linear: Linear | None = None, are_logits: bool = False
    ) -> RowsFunction:
        """A norm, a linear layer, or both; logits are float32, and other rows as those that are given."""
        program = rows_program(self.dtype, self._norm, norm, linear, are_logits)
        last, operations = program.steps[-1], operations_of(program)
        call, dtype = Call(between_going=last.source.width), DTYPES[last.how]

        def run(x: Array) -> Array:
            found, given = np.empty((len(x), last.source.width), dtype), np.ascontiguousarray(x)
            if len(x):
                call.hidden, call.rows = address(given), len(given)
                call.going, call.threads = address(found), threads()
                self.room.run(operations, call)
            return found

        return run

    def take(self, table: Matrix, rows: I64) -> Array:
        """Rows of a table, in the dtype of rows."""
        if isinstance(table, Plain):
            return narrowed(table.weights[rows], self.dtype)
        ids, form = np.ascontiguousarray(rows), FORMS[table.form]
        made = np.empty((len(ids), table.inputs), np.float32)
        matrix = address(table.panels), form.number, table.inputs
        self._library.packed_rows(*matrix, address(ids), len(ids), address(made))
        return narrowed(made, self.dtype)

    def function(self, x: Array, name: str) -> Array:
        """One of `plain.FUNCTIONS`, number by number, of float32."""
        given = np.ascontiguousarray(x)
        found = np.empty_like(given)
        self._library.function(
            address(given), given.size, compiled.FUNCTIONS.index(name), None, address(found)
        )
        return found

    def angles(self, positions: I64, rotary: Rotary) -> Angles:
        frequencies, given = np.array(rotary.frequencies, np.float32), np.ascontiguousarray(positions)
        cosine, sine = (np.empty((1, len(given), 2 * len(frequencies)), np.float32) for _ in range(2))
        of_rows = address(given), len(given), address(frequencies), len(frequencies)
        self._library.angles(*of_rows, rotary.scale, address(cosine), address(sine))
        return cosine, sine

    def turn(self, x: Array, angles: Angles) -> Array:
        """Queries or keys `[rows, heads, width]`, turned by their positions, in float32."""
        rows, heads, width = x.shape
        given, found = np.ascontiguousarray(widened(x)), np.empty(x.shape, np.float32)
        where = address(given), address(angles[0]), address(angles[1]), address(found)
        shape = rows, heads, width, angles[0].shape[-1], heads * width, width
        self._library.turn(compiled.TurnFields(*where, *shape))
        return found

    def store(self, slots: I64, keys: Array, values: Array, to: Held) -> None:
        """Keys and values `[rows, kv_heads, head_dim]`, of whatever dtype, to slots of a layer's."""
        to_keys, to_values, steps = to
        given = [np.ascontiguousarray(each) for each in (widened(keys), widened(values), slots)]
        where: list[int | None] = [address(each) for each in (*given, to_keys, to_values, *(steps or ()))]
        where += [None] * (7 - len(where))
        rows, heads, width = keys.shape
        shape = rows, heads, width, to_values.shape[2], to_values.shape[1]
        between = (heads * width, width) * 2
        self._library.store(compiled.StoredFields(*where, *shape, *between, kind_of(to_keys.dtype)))

    def begin(self, hidden: Array, batch: TreeBatch) -> _Pass:
        """A pass through layers with hidden states `[rows, width]` of its own; there is one at a time."""
        return _Pass(self.room, hidden, batch)

    def pass_by(self, layer: Operations, cache: TreeCache, passed: Sequence[int]) -> None:
        """Brings the state `BASE` of a layer to the end of these slots, which `ClearSlots` names."""
        mixer = layer.view[1]
        assert isinstance(mixer, DeltaRule)
        inputs, state = cache.inputs(layer.source), cache.states[layer.source][BASE]
        where = Cache(inputs=address(inputs), inputs_width=inputs.shape[1], state=address(state))
        part, walk = Part(cache=ctypes.addressof(where)), cache.walk_past(layer.source, passed, mixer.length)
        _step(part, walk)
        self.room.run(layer.past, Call(parts=ctypes.addressof(part), parts_count=1, threads=1))


class _Pass:
    """Runs layers with the same rows, one after another; `hidden` `[rows, width]` changes in place."""

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
                _step(part, rows.walk(layer.source, mixer.length))
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
