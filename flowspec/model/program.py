"""A layer as a list of operations that C runs in one call (`flowspec_run` in `arithmetic/canonical.c`).

The list is made when a slice is loaded, of the layer's `LayerSpec` and of its parts, which say where its
matrices and norms lie in memory and how. Rows stay in registers, each a matrix `[rows, width]`; register 0 is
the hidden state, which the operations add to in place.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flowspec.core.protocol.model_spec import NORMS, Convolution, DeltaRule, LayerSpec, Mixture, Norm, Router
from flowspec.model.arithmetic import compiled
from flowspec.model.arithmetic.arrays import Array
from flowspec.model.arithmetic.compiled import (
    KINDS,
    Call,
    Library,
    Operation,
    ProgramFields,
    address,
    kind_of,
    threads,
)
from flowspec.model.arithmetic.packed import FORMS
from flowspec.model.arithmetic.plain import UNIT_EPS
from flowspec.model.parts import Digits, Linear, NormPart, Packed, Parts, RouterPart, Stack

_NAMES = (
    *("norm", "widen", "pair", "round", "split", "linear", "pairs", "packed", "digits", "halves"),
    *("turn", "store", "attend", "gate", "add", "copy", "clip", "choose", "sort", "gather", "mix"),
    *("multiply", "scale", "hold", "convolve", "recall", "step_states", "load", "look_up", "carry"),
)
CODES = {name: code for code, name in enumerate(_NAMES)}
"""In the source's order."""
PREPARED_BY = {"linear": "widen", "pairs": "pair", "packed": "round", "digits": "split"}
"""What rows are made of before they are multiplied, by how they are."""
BY_OUTPUT = {*PREPARED_BY, "halves"}
ALONE = ("attend", "store", "sort", "convolve", "recall", "step_states")
"""What goes neither by rows nor by outputs, or needs others' rows."""
HOW_CHOSEN: tuple[tuple[Router, ...], ...] = (
    ("softmax",),
    ("softmax to 1", "scaled softmax to 1"),
    ("softmax of chosen",),
    ("sigmoid",),
)
"""In the source's order."""
REGISTERS_MAX = 48
SIZES = (4, 2, 2)
"""Bytes of a number of each kind."""
NO_FUNCTION = len(compiled.FUNCTIONS)
ALIGNMENT = 64
Register = int


@dataclass(frozen=True, slots=True)
class _Operand:
    """A matrix as the source reads it: outputs of a linear layer from number `first` on; `prepared`: rows for
    two matrices are the same."""

    how: str
    kind: int
    weights: int
    inputs: int
    outputs: int
    first: int
    prepared: tuple[str, int, bool]
    scales: int = 0

    def is_like(self, other: _Operand | None) -> bool:
        """Whether it lies elsewhere, and is the same but for that."""
        return other is not None and replace(other, weights=self.weights, scales=self.scales) == self


class Room:
    """Memory that calls are lent, one after another; it grows."""

    def __init__(self, library: Library) -> None:
        self._bytes = np.empty(0, np.uint8)
        self._at = self._size = 0
        self._run = library.run

    def run(self, program: Any, call: Call) -> None:
        """By a pointer, with what the call says."""
        call.room, call.room_bytes = self._at, self._size
        while needed := self._run(program, ctypes.byref(call)):
            size = needed + needed // 4
            room = np.empty(size + ALIGNMENT, np.uint8)  # or no memory is left, and nothing has changed
            self._bytes, self._size = room, size
            self._at = -(-address(room) // ALIGNMENT) * ALIGNMENT
            call.room, call.room_bytes = self._at, self._size


@dataclass(slots=True)
class LayerProgram:
    """What a layer does, and a pointer to it; `held` is what of it has to stay in memory for that. Layers
    with one `view` see the same of what a request holds. `source`: the place whose keys and values it attends
    to. `past`: of a layer with states, that does the steps alone."""

    view: tuple[int | None, Convolution | DeltaRule | None]
    source: int
    fields: ProgramFields
    pointer: Any
    held: list[Any]
    past: ProgramFields | None = None


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How rows of a kind are computed: their norms, and products with matrices that are plain (`linear`, or
    `pairs`)."""

    kind: int
    norm: Norm
    plain: str = "linear"


def program_of(
    parts: Parts, spec: LayerSpec, how: Arithmetic, place: int = 0, source: int = 0, going: int | None = None
) -> LayerProgram:
    """That of one layer, which attends to keys and values of a `source`, as its `place` counted from the
    slice's first layer; its own go on from number `going`, if they do."""
    assert spec.dense is not None, "there is an operation for everything"
    maker = _LayerMaker(parts, spec, how)
    fields, held = maker.make(going, source == place)
    past = None
    if isinstance(spec.dense.mixer, DeltaRule):
        past, more = maker.past()
        held += more
    view = spec.window or None, spec.dense.mixer
    return LayerProgram(view, source, fields, ctypes.byref(fields), held, past)


class Rows:
    """A program that makes rows `[rows, outputs]` of rows `[rows, inputs]` alone: by a norm, a linear layer,
    or both."""

    def __init__(
        self,
        room: Room,
        how: Arithmetic,
        inputs: int,
        norm: NormPart | None = None,
        linear: Linear | None = None,
    ) -> None:
        maker = _Maker(how)
        found = maker.register(inputs)
        if norm is not None:
            found = maker.norm(found, norm, 1)
        if linear is not None:
            (found,) = maker.multiply(found, [linear])
        self.outputs = maker.carry(found)
        self._fields, self._held = maker.program()
        self._room, self._pointer = room, ctypes.byref(self._fields)
        self._call = Call(between_going=self.outputs)

    def __call__(self, x: Any) -> Any:
        found = np.empty((len(x), self.outputs), x.dtype)
        if len(x):
            call, given = self._call, np.ascontiguousarray(x)
            call.hidden, call.rows = address(given), len(given)
            call.going, call.threads = address(found), threads()
            self._room.run(self._pointer, call)
        return found


class _Maker:
    """Registers, operations on them, and what of them stays in memory."""

    def __init__(self, how: Arithmetic) -> None:
        self._how, self._kind = how.norm, how.kind
        self._plain = how.plain
        self._held: list[Any] = []
        self._clear()

    def _clear(self) -> None:
        self._widths: list[int] = []
        self._starts: list[int] = []
        self._end = self._numbers = 0
        self._operations: list[Operation] = []
        self._sums = self._sums_most = self._products = 0
        self._stage, self._spread = "", 1

    def program(self, mixture: Mixture | None = None) -> tuple[ProgramFields, list[Any]]:
        operations = (Operation * len(self._operations))(*self._operations)
        widths, starts = ((ctypes.c_int64 * len(each))(*each) for each in (self._widths, self._starts))
        lists = operations, widths, starts
        sizes = self._numbers, self._sums_most, self._products, self._kind
        experts = (0, 0) if mixture is None else (mixture.experts, mixture.chosen)
        where = (ctypes.addressof(each) for each in lists)
        fields = ProgramFields(*where, len(operations), len(widths), *sizes, *experts)
        return fields, [*lists, *self._held]

    def register(self, width: int) -> Register:
        self._widths.append(width)
        self._starts.append(self._end)
        self._end += -(-width // ALIGNMENT) * ALIGNMENT
        self._numbers = max(self._numbers, self._end)
        return len(self._widths) - 1

    def _add(self, name: str, source: Register, to: Register = 0, *, other: int = -1, **fields: Any) -> None:
        """Threads wait for each other between operations that go by rows, by outputs and by heads."""
        by_row = "rows" if self._spread == 1 else "rows of experts"
        stage = name if name in ALONE else "outputs" if name in BY_OUTPUT else by_row
        before, self._stage = self._stage, stage
        waits = before not in ("", stage) and {before, stage} != {"rows", "store"}
        waits = waits and (before, stage) != ("convolve", "rows")
        where = {"source": source, "to": to, "other": other, "spread": self._spread}
        self._operations.append(Operation(code=CODES[name], waits=waits, **where, **fields))

    def _hold(self, given: Array | None) -> int | None:
        if given is None:
            return None
        assert given.flags.c_contiguous, "the source reads one number after another"
        self._held.append(given)
        return address(given)

    def _hold_own(self, given: Array | None) -> int | None:
        """Of numbers that are read in the kind of rows."""
        assert given is None or kind_of(given.dtype) == self._kind, "they are loaded so"
        return self._hold(given)

    def norm(
        self, source: Register, norm: NormPart, heads: int, at: int = 0, how: Norm | None = None
    ) -> Register:
        width = norm.weights.size
        to = self.register(heads * width)
        weights, number = self._hold_own(norm.weights), NORMS.index(how or self._how)
        shape = {"from_at": at, "inputs": width, "heads": heads}
        self._add("norm", source, to, weights=weights, factor=1 / width, eps=norm.eps, how=number, **shape)
        return to

    def gate(self, name: str, gates: Register, values: Register, width: int, **more: Any) -> Register:
        """A function of `gates`, from number `from_at` on, times `values`, from `with_at` on."""
        to = self.register(self._spread * width)
        where = {"other": values, "inputs": width}
        self._add("gate", gates, to, how=compiled.FUNCTIONS.index(name), **where, **more)
        return to

    def multiply(self, source: Register, linears: Sequence[Linear]) -> list[Register]:
        """What linear layers make of the same rows, one register each."""
        places = [(self.register(linear.outputs), 0) for linear in linears]
        self.multiply_to(source, linears, places)
        return [to for to, _ in places]

    def multiply_to(
        self, source: Register, linears: Sequence[Linear], places: Sequence[tuple[Register, int]]
    ) -> None:
        """By linear layers, whose results begin at these places of registers."""
        pending: list[tuple[Register, tuple[tuple[Register, int], Linear], _Operand]] = []
        for place, linear in zip(places, linears, strict=True):
            own, order = source, linear.order
            if order is not None:
                own = self.register(order.size)
                self._add("copy", source, own, weights=self._hold(order), inputs=order.size)
            pending += [(own, (place, linear), operand) for operand in self._operands(linear)]
        while pending:
            own, _, first = pending[0]
            same = [each for each in pending if (each[0], each[2].prepared) == (own, first.prepared)]
            pending = [each for each in pending if each not in same]
            self._add(PREPARED_BY[first.how], own, inputs=first.inputs, kind=first.kind)
            self._sums = 0
            for _, ((to, at), linear), matrix in same:
                self._multiply(own, to, [matrix], linear.bias, at=at)

    def _operands(self, linear: Linear) -> list[_Operand]:
        found, first = [], 0
        for matrix in linear.matrices:
            self._held.append(matrix)
            prepared: tuple[str, int, bool]
            kind, scales = 0, 0
            if isinstance(matrix, Packed):
                form = FORMS[matrix.form]
                is_signed = bool(form.table) or form.bits == 8
                prepared = "packed", -1 if is_signed else form.offset, form.halves > 1
                kind, weights = form.number, matrix.panels
            elif isinstance(matrix, Digits):
                prepared, weights, scales = ("digits", 0, False), matrix.panels, address(matrix.scales)
            else:
                prepared, weights = (self._plain, 0, False), matrix.weights
                kind = 0 if self._plain == "pairs" else kind_of(weights.dtype)
            where = address(weights), linear.inputs, matrix.outputs, first, prepared, scales
            found.append(_Operand(prepared[0], kind, *where))
            first += matrix.outputs
        return found

    def _multiply(
        self,
        source: Register,
        to: Register,
        own: Sequence[_Operand],
        bias: Array | None,
        experts: int = 0,
        at: int = 0,
    ) -> None:
        """By a matrix, or by those of so many experts, which lie elsewhere and are alike but for that."""
        first = own[0]
        assert self._widths[source] == self._spread * first.inputs, "rows are read as they lie"
        weights, scales = first.weights, first.scales
        if experts:
            table = ctypes.c_void_p * experts
            tables = table(*(each.weights for each in own)), table(*(each.scales for each in own))
            self._held += tables
            weights, scales = map(ctypes.addressof, tables)
        of_bias = self._hold_own(bias)
        own_bias = None if of_bias is None else of_bias + first.first * SIZES[self._kind]
        numbers: dict[str, Any] = {"weights": weights, "bias": own_bias, "scales": scales or None}
        shape = {"inputs": first.inputs, "outputs": first.outputs, "kind": first.kind, "experts": experts}
        to_at = at + first.first
        self._add(first.how, source, to, to_at=to_at, sums_at=self._sums, **numbers, **shape)
        self._sums += self._spread * first.outputs
        self._sums_most = max(self._sums_most, self._sums)
        self._products += self._spread * first.inputs * first.outputs

    def carry(self, source: Register, from_at: int = 0, to_at: int = 0, width: int = 0) -> int:
        """Out of the program, as many numbers as are told, or all; how many these are."""
        width = width or self._widths[source]
        self._add("carry", source, from_at=from_at, to_at=to_at, inputs=width)
        return width


class _LayerMaker(_Maker):
    def __init__(self, parts: Parts, spec: LayerSpec, how: Arithmetic) -> None:
        super().__init__(how)
        assert spec.dense is not None, "there is an operation for everything"
        self._parts: Mapping[str, Any] = parts
        self._spec, self._dense = spec, spec.dense

    def make(self, going: int | None, is_own: bool) -> tuple[ProgramFields, list[Any]]:
        """`is_own`: whether the layer has keys and values of its own."""
        dense = self._dense
        norm = self._parts[dense.norm_before_attention or dense.norm_after_attention or dense.norm_before_mlp]
        hidden = self.register(norm.weights.size)
        self._end = 0  # the hidden state is the caller's
        rows = self._normed(hidden, dense.norm_before_attention)
        if dense.is_residual_normed:
            self._add("copy", rows, hidden, inputs=self._widths[hidden], heads=1)
        if dense.embedding_norm:
            rows = self._joined(rows, dense.embedding_norm)
        if isinstance(dense.mixer, Convolution):
            found = self._convolution(dense.mixer, rows)
        elif dense.mixer is not None:
            found = self._delta_rule(dense.mixer, rows)
        else:
            found = self._attention(rows, going, is_own)
        self._added(hidden, found, dense.norm_after_attention)
        self._end, self._stage = 0, "anew"  # the MLP's registers lie where attention's did
        rows = self._normed(hidden, dense.norm_before_mlp)
        if dense.mixture is None:
            found = self._mlp("mlp", rows)
        elif dense.mixture.is_parallel:
            found = self._normed(self._mlp("mlp", rows), "post_feedforward_layernorm_1")
            rows = self._normed(hidden, "pre_feedforward_layernorm_2")
            mixed = self._mixture(dense.mixture, "", hidden, rows)
            mixed = self._normed(mixed, "post_feedforward_layernorm_2")
            self._add("add", mixed, found, inputs=self._widths[found], factor=1.0)
        else:
            found = self._mixture(dense.mixture, "mlp.", rows, rows)
        self._added(hidden, found, dense.norm_after_mlp)
        if dense.input_width:
            self._input(hidden)
        if dense.has_factor and (factor := self._parts["layer_scalar"]) != 1:
            self._add("scale", hidden, hidden, inputs=self._widths[hidden], factor=factor)
        assert len(self._widths) <= REGISTERS_MAX, "the source has no more room"
        return self.program(dense.mixture)

    def past(self) -> tuple[ProgramFields, list[Any]]:
        """That of the steps alone, of a layer with states."""
        self._clear()
        self.register(0)
        assert isinstance(self._dense.mixer, DeltaRule)
        self._steps(self._dense.mixer)
        return self.program()

    def _normed(self, source: Register, name: str) -> Register:
        return self.norm(source, self._parts[name], 1) if name else source

    def _added(self, hidden: Register, source: Register, name: str) -> None:
        source = self._normed(source, name)
        self._add("add", source, hidden, inputs=self._widths[hidden], factor=self._dense.added_scale)

    def _joined(self, rows: Register, name: str) -> Register:
        """A token's embedding after this norm, then `rows`."""
        width = self._widths[rows]
        embedding, both = self.register(width), self.register(2 * width)
        self._add("load", 0, embedding, inputs=width)
        normed = self._normed(embedding, name)
        for source, at in ((normed, 0), (rows, width)):
            self._add("copy", source, both, to_at=at, inputs=width, heads=1)
        return both

    def _multiplied(self, source: Register, *names: str) -> list[Register]:
        """By linear layers of these names."""
        return self.multiply(source, [self._parts[name] for name in names])

    # -------------------------------------------------------------------------- attention, and in its place

    def _attention(self, rows: Register, going: int | None, is_own: bool) -> Register:
        spec, dense, name = self._spec, self._dense, "self_attn."
        width, query_width = spec.kv.width, spec.heads * spec.kv.width
        key_width = spec.kv.count * width
        gates: Register | None = None
        if name + "qkv_proj" in self._parts:
            (joined,) = self._multiplied(rows, name + "qkv_proj")
            found = [(joined, 0), (joined, query_width), (joined, query_width + key_width)]
        else:
            names = [f"{name}{each}_proj" for each in "qkv" if f"{name}{each}_proj" in self._parts]
            made = [(each, 0) for each in self._multiplied(rows, *names)]
            found = [made[0], made[1], made[-1]] if is_own else made[:1]  # keys may be values, too
        if dense.is_gated:
            both, alone, gates = found[0][0], self.register(query_width), self.register(query_width)
            for to, at in ((alone, 0), (gates, width)):
                self._add("copy", both, to, from_at=at, inputs=width, outputs=2 * width, heads=spec.heads)
            found[0] = alone, 0
        found = self._ready(found)
        queries = found[0]
        if is_own:
            self._store(found[1], found[2], going)
        if self._widths[queries[0]] != query_width:
            alone = self.register(query_width)
            self._add("copy", queries[0], alone, from_at=queries[1], inputs=query_width, heads=1)
            queries = alone, 0
        attended = self.register(query_width)
        shape = {"inputs": width, "heads": spec.heads, "kv_heads": spec.kv.count}
        sinks = self._hold(self._parts["self_attn.sinks"]) if dense.has_sinks else None
        self._add("attend", queries[0], attended, bias=sinks, factor=dense.scale, cap=dense.cap, **shape)
        if gates is not None:
            attended = self.gate("sigmoid", gates, attended, query_width)
        return self._multiplied(attended, name + "o_proj")[0]

    def _ready(self, given: Sequence[tuple[Register, int]]) -> list[tuple[Register, int]]:
        """Queries, and keys and values if any, each from a number of a register on, as they meet."""
        spec, dense = self._spec, self._dense
        counts = spec.heads, spec.kv.count, spec.kv.count
        found = list(given)
        for place, name in enumerate(("self_attn.q_norm", "self_attn.k_norm")[: len(given)]):
            if dense.query_norm:
                heads = counts[place] if dense.query_norm == "head" else 1
                source, at = found[place]
                found[place] = self.norm(source, self._parts[name], heads, at), 0
        if dense.has_value_norm and len(given) > 1:
            source, at = found[2]
            found[2] = self.norm(source, self._parts["self_attn.v_norm"], spec.kv.count, at), 0
        for (source, at), count in zip(found, counts, strict=False):
            if dense.clip:
                width = count * spec.kv.width
                self._add("clip", source, source, to_at=at, inputs=width, cap=dense.clip)
        if dense.is_turned:
            found[:2] = [self._turned(*each, count) for each, count in zip(found[:2], counts, strict=False)]
        return found

    def _store(self, keys: tuple[Register, int], values: tuple[Register, int], going: int | None) -> None:
        """To the rows' slots, and with the rows to the next slice where that needs them."""
        (of_keys, keys_at), (of_values, values_at) = keys, values
        width, count = self._spec.kv.width, self._spec.kv.count
        if going is not None:
            for place, (source, at) in enumerate((keys, values)):
                to_at = going + place * count * width
                self.carry(source, at, to_at, count * width)
        where = {"from_at": keys_at, "with_at": values_at}
        self._add("store", of_keys, other=of_values, inputs=width, kv_heads=count, **where)

    def _convolution(self, mixer: Convolution, rows: Register) -> Register:
        (joined,) = self._multiplied(rows, "conv.in_proj")
        width = self._widths[joined] // 3
        inputs, mixed, found = (self.register(width) for _ in range(3))
        self._add("multiply", joined, inputs, other=joined, with_at=2 * width, inputs=width, how=NO_FUNCTION)
        self._add("hold", inputs, inputs=width)
        taps, bias = (self._hold(self._parts.get(name)) for name in ("conv.taps", "conv.bias"))
        self._add("convolve", inputs, mixed, weights=taps, bias=bias, inputs=width, outputs=mixer.length)
        self._add("multiply", joined, found, other=mixed, from_at=width, inputs=width, how=NO_FUNCTION)
        return self._multiplied(found, "conv.out_proj")[0]

    def _delta_rule(self, mixer: DeltaRule, rows: Register) -> Register:
        names = ("in_proj_qkv", "in_proj_b", "in_proj_a", "in_proj_z")
        linears = [self._parts[f"linear_attn.{name}"] for name in names]
        widths = [linear.outputs for linear in linears]
        inputs, gates = self.register(sum(widths[:3])), self.register(widths[3])
        starts = itertools.accumulate(widths[:2], initial=0)
        self.multiply_to(rows, linears, [*((inputs, at) for at in starts), (gates, 0)])
        self._add("hold", inputs, inputs=sum(widths[:3]))
        found, gated = self._steps(mixer), self.register(widths[3])
        normal = self.norm(found, self._parts["linear_attn.norm"], mixer.heads, how="cast, scale")
        how = compiled.FUNCTIONS.index("silu")
        self._add("multiply", gates, gated, other=normal, inputs=widths[3], how=how)
        return self._multiplied(gated, "linear_attn.out_proj")[0]

    def _steps(self, mixer: DeltaRule) -> Register:
        """What rows read from their states."""
        values = mixer.heads * mixer.value_width
        shape = {"inputs": mixer.key_width, "outputs": mixer.value_width}
        shape |= {"heads": mixer.heads, "kv_heads": mixer.key_heads}
        taps, rates = (self._hold(self._parts[f"linear_attn.{name}"]) for name in ("taps", "rates"))
        more = {"how": mixer.length, "factor": mixer.key_width**-0.5, "eps": UNIT_EPS}
        self._add("recall", 0, weights=taps, scales=rates, **shape, **more)
        found = self.register(values)
        self._sums_most = max(self._sums_most, values)
        self._add("step_states", 0, found, **shape)
        return found

    def _turned(self, source: Register, at: int, heads: int) -> tuple[Register, int]:
        to = self.register(heads * self._spec.kv.width)
        self._add("turn", source, to, from_at=at, inputs=self._spec.kv.width, heads=heads)
        return to, 0

    # ------------------------------------------------------------------------------------- MLPs, experts

    def _mlp(self, name: str, rows: Register) -> Register:
        if f"{name}.gate_up_proj" in self._parts:
            (joined,) = self._multiplied(rows, f"{name}.gate_up_proj")
            width = self._widths[joined] // 2
            gate, up = (joined, 0), (joined, width)
        else:
            made = self._multiplied(rows, f"{name}.gate_proj", f"{name}.up_proj")
            gate, up = ((each, 0) for each in made)
            width = self._widths[gate[0]]
        gated = self.gate(self._dense.activation, gate[0], up[0], width, from_at=gate[1], with_at=up[1])
        return self._multiplied(gated, f"{name}.down_proj")[0]

    def _input(self, hidden: Register) -> None:
        """What a layer takes of a token beside its hidden state: of a table, and of the token's embedding."""
        width, table = self._dense.input_width, self._parts["layer_input.table"]
        embedding, looked_up = self.register(self._widths[hidden]), self.register(width)
        self._add("load", 0, embedding, inputs=self._widths[hidden])
        (projected,) = self._multiplied(embedding, "layer_input.projection")
        self._add("scale", projected, projected, inputs=width, factor=self._widths[hidden] ** -0.5)
        projected = self.norm(projected, self._parts["layer_input.norm"], 1)
        matrix, is_packed = table.matrix, isinstance(table.matrix, Packed)
        kind = FORMS[matrix.form].number if is_packed else kind_of(matrix.weights.dtype)
        weights = self._hold(matrix.panels if is_packed else matrix.weights)
        self._add("look_up", 0, looked_up, inputs=width, weights=weights, kind=kind, how=is_packed)
        self._add("add", looked_up, projected, inputs=width, factor=table.factor)
        self._add("scale", projected, projected, inputs=width, factor=2.0**-0.5)
        (gates,) = self._multiplied(hidden, "per_layer_input_gate")
        gated = self.gate(self._dense.activation, gates, projected, width)
        (found,) = self._multiplied(gated, "per_layer_projection")
        self._added(hidden, found, "post_per_layer_input_norm")

    def _mixture(self, mixture: Mixture, name: str, of: Register, rows: Register) -> Register:
        """Rows choose experts by what they are `of`, are sorted by them, run through each expert's MLP, and
        are added up."""
        router: RouterPart = self._parts[f"{name}router"]
        how = next((place for place, names in enumerate(HOW_CHOSEN) if mixture.router in names), None)
        assert how is not None, "there is an operation for every router"
        if router.norm is not None:
            of = self.norm(of, router.norm, 1, how="cast, scale")
            self._add("scale", of, of, inputs=self._widths[of], factor=router.factor)
        hidden, chosen = self._widths[rows], mixture.chosen
        self._add("widen", of, inputs=hidden)
        shape = {"inputs": hidden, "outputs": mixture.experts, "kind": kind_of(router.weights.dtype)}
        shape["how"] = KINDS["float32"] if mixture.router == "sigmoid" else self._kind
        weights, bias = self._hold(router.weights), self._hold(router.bias)
        self._add("halves", of, weights=weights, bias=bias, **shape)
        self._sums_most = max(self._sums_most, mixture.experts)
        shape = {"inputs": mixture.experts, "outputs": mixture.open, "heads": mixture.is_normed}
        weights, scales = self._hold(router.correction), self._hold(router.scales)
        shape |= {"kv_heads": mixture.groups, "how": how}
        self._add("choose", rows, weights=weights, scales=scales, factor=mixture.factor, **shape)
        self._add("sort", rows)
        self._spread = chosen
        sorted_rows = self.register(chosen * hidden)
        self._add("gather", rows, sorted_rows, inputs=hidden)
        joined = self._each(sorted_rows, self._parts[f"{name}experts.gate_up_proj"])
        width = self._widths[joined] // chosen // 2
        where = {"with_at": width, "cap": mixture.limit, "factor": mixture.slope}
        gated = self.gate(self._dense.activation, joined, joined, width, **where)
        found = self._each(gated, self._parts[f"{name}experts.down_proj"])
        self._spread = 1
        mixed = self.register(hidden)
        self._add("mix", found, mixed, inputs=hidden)
        if mixture.has_shared:
            shared = self._mlp(f"{name}shared_expert" + "s" * (not mixture.is_shared_gated), rows)
            if mixture.is_shared_gated:
                (gate,) = self._multiplied(rows, f"{name}shared_expert_gate")
                how = compiled.FUNCTIONS.index("sigmoid")
                self._add("scale", shared, shared, other=gate, inputs=hidden, how=how)
            self._add("add", shared, mixed, inputs=hidden, factor=1.0)
        return mixed

    def _each(self, source: Register, stack: Stack) -> Register:
        """What each expert's matrices make of its own rows."""
        made = [self._operands(linear) for linear in stack.linears]
        pending = [list(each) for each in itertools.zip_longest(*made)]
        assert all(all(map(own[0].is_like, own)) for own in pending), "experts are packed alike"
        to = self.register(self._spread * sum(own[0].outputs for own in pending))
        while pending:
            first = pending[0][0]
            same = [own for own in pending if own[0].prepared == first.prepared]
            pending = [own for own in pending if own not in same]
            name = PREPARED_BY[first.how]
            self._add(name, source, inputs=first.inputs, kind=first.kind, experts=len(made))
            self._sums = 0
            for own in same:
                self._multiply(source, to, own, stack.bias, len(own))
        return to
