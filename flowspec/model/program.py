"""A layer as a list of operations that C runs in one call (`flowspec_run` in `arithmetic/canonical.c`).

The list is made when a slice is loaded, of the layer's `LayerSpec` and of its parts, which say where its
matrices and norms lie in memory and how. Rows stay in registers, each a float32 matrix `[rows, width]`; what
comes to a layer and leaves it is of the kind in which hidden states travel.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from flowspec.core.protocol.model_spec import NORMS, Convolution, DeltaRule, LayerSpec, Mixture, Norm, Router
from flowspec.model.arithmetic.arrays import Array
from flowspec.model.arithmetic.compiled import (
    FUNCTIONS,
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
from flowspec.model.parts import Linear, NormPart, Packed, Parts, RouterPart, Stack

_NAMES = (
    *("norm", "divide", "pair", "round", "linear", "pairs", "packed", "halves"),
    *("turn", "store", "attend", "gate", "add", "copy", "clip", "choose", "sort", "gather", "mix"),
    *("multiply", "scale", "hold", "convolve", "recall", "step_states", "load", "load_embedding"),
    *("look_up", "carry", "leave", "narrow"),
)
CODES = {name: code for code, name in enumerate(_NAMES)}
"""In the source's order."""
PREPARED_BY = {"linear": "divide", "pairs": "pair", "packed": "round"}
"""What rows are made of before they are multiplied, by how they are."""
STAGES = {
    **dict.fromkeys((*PREPARED_BY, "halves"), "outputs"),
    **{name: name for name in ("attend", "store", "sort", "convolve", "recall", "step_states")},
}
"""What threads divide in operations that do not go by rows, or that need others' rows."""
HOW_CHOSEN: tuple[tuple[Router, ...], ...] = (
    ("softmax",),
    ("softmax to 1", "scaled softmax to 1"),
    ("softmax of chosen",),
    ("sigmoid",),
)
"""In the source's order."""
REGISTERS_MAX = 48
ALIGNMENT, FLOAT_BYTES = 64, 4


class View(NamedTuple):
    """Numbers `[at, at + width)` of each row of a register."""

    register: int
    at: int
    width: int

    def split(self, *widths: int) -> list[View]:
        """So many numbers each, one after another."""
        starts = itertools.accumulate(widths, initial=self.at)
        return [View(self.register, at, width) for at, width in zip(starts, widths, strict=False)]


_NONE, _NO_OTHER = View(0, 0, 0), View(-1, 0, 0)


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


class Program(ProgramFields):
    """Operations as the source reads them, and `held`, what has to stay in memory for them. A layer's attends
    to keys and values of a `source`; layers with one `view` see the same of what a request holds. One with
    states has a program of the steps alone, for rows that are `past`."""

    at = 0
    """Its address."""
    held: list[Any]
    source: int
    view: tuple[int | None, Convolution | DeltaRule | None]
    past: Program


class Room:
    """Memory that calls are lent, one after another; it grows."""

    def __init__(self, library: Library) -> None:
        self._bytes = np.empty(0, np.uint8)
        self._at = self._size = 0
        self._run = library.run

    def run(self, program: Program, call: Call) -> None:
        call.room, call.room_bytes = self._at, self._size
        while needed := self._run(program.at, ctypes.byref(call)):
            self._bytes, self._size = np.empty(0, np.uint8), 0  # before there is more: both would not fit
            size = needed + needed // 16
            self._bytes = np.empty(size + ALIGNMENT, np.uint8)
            self._at, self._size = -(-address(self._bytes) // ALIGNMENT) * ALIGNMENT, size
            call.room, call.room_bytes = self._at, self._size


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How rows are computed: the kind in which hidden states travel, and norms."""

    kind: int
    norm: Norm


def program_of(
    parts: Parts,
    spec: LayerSpec,
    how: Arithmetic,
    source: int = 0,
    going: int | None = None,
    is_source: bool = False,
) -> Program:
    """Of a layer that attends to keys and values of a `source`; to its own later layers do if it `is_source`,
    and they go on from number `going`, if they do."""
    maker = _LayerMaker(parts, spec, how, is_source=is_source)
    mixer, program = maker.dense.mixer, maker.make(going)
    program.source, program.view = source, (spec.window or None, mixer)
    if isinstance(mixer, DeltaRule):
        program.past = _LayerMaker(parts, spec, how, is_source=False).past(mixer)
    return program


class Rows:
    """Makes rows `[rows, outputs]` of rows `[rows, inputs]` alone: by a norm, a linear layer, or both. Of
    logits, `are_logits`, rows are float32, and those that they are made of finely rounded."""

    def __init__(
        self,
        room: Room,
        how: Arithmetic,
        norm: NormPart | None,
        linear: Linear | None,
        are_logits: bool = False,
    ) -> None:
        maker = Maker(how)
        if linear is not None:
            width = linear.inputs
        else:
            assert norm is not None, "there is something to do"
            width = norm.weights.size
        found = maker.add("load", to=maker.register(width))
        if norm is not None:
            found = maker.norm(found, norm)
        if linear is not None:
            (found,) = maker.multiply(found, replace(linear, is_fine=are_logits))
        maker.add("carry", found, kind=KINDS["float32"] if are_logits else how.kind)
        self._room, self._program, self.outputs = room, maker.program(), found.width
        self._call, self._are_logits = Call(between_going=self.outputs), are_logits

    def __call__(self, x: Any) -> Any:
        found = np.empty((len(x), self.outputs), np.float32 if self._are_logits else x.dtype)
        if len(x):
            call, given = self._call, np.ascontiguousarray(x)
            call.hidden, call.rows = address(given), len(given)
            call.going, call.threads = address(found), threads()
            self._room.run(self._program, call)
        return found


class Maker:
    """Registers, operations on them, and what of them stays in memory."""

    def __init__(self, how: Arithmetic) -> None:
        self.how = how
        self._held: list[Any] = []
        self._widths: list[int] = []
        self._starts: list[int] = []
        self._end = self._numbers = 0
        self._operations: list[Operation] = []
        self._sums = self._products = 0
        self._stage, self._spread = "", 1

    def program(self, mixture: Mixture | None = None) -> Program:
        count, registers = len(self._operations), len(self._widths)
        assert registers <= REGISTERS_MAX, "the source has no more room"
        numbers = ctypes.c_int64 * registers
        lists = (Operation * count)(*self._operations), numbers(*self._widths), numbers(*self._starts)
        sizes = self._numbers, self._sums, self._products, self.how.kind
        experts = (0, 0) if mixture is None else (mixture.experts, mixture.chosen)
        places = [ctypes.addressof(each) for each in lists]
        program = Program(*places, count, registers, *sizes, *experts)
        program.at, program.held = ctypes.addressof(program), [*lists, *self._held]
        return program

    def register(self, width: int) -> View:
        """Of so many numbers for a row, or of a row of each expert that it chose."""
        whole = self._spread * width
        self._widths.append(whole)
        self._starts.append(self._end)
        self._end += -(-whole // ALIGNMENT) * ALIGNMENT
        self._numbers = max(self._numbers, self._end)
        return View(len(self._widths) - 1, 0, width)

    def add(
        self, name: str, source: View = _NONE, to: View = _NONE, other: View = _NO_OTHER, **fields: Any
    ) -> View:
        """An operation; gives where it writes `to`. Threads wait for each other between those that go by
        rows, by outputs and by heads."""
        stage = STAGES.get(name, "rows" if self._spread == 1 else "rows of experts")
        before, self._stage = self._stage, stage
        waits = before not in ("", stage) and {before, stage} != {"rows", "store"}
        waits = waits and (before, stage) != ("convolve", "rows")
        views = {
            **{"source": source.register, "from_at": source.at, "to": to.register, "to_at": to.at},
            **{"other": other.register, "with_at": other.at, "inputs": source.width or to.width},
        }
        whole = {"code": CODES[name], "waits": waits, "spread": self._spread, **views, **fields}
        self._operations.append(Operation(**whole))
        return to

    def hold(self, given: Array | None) -> int | None:
        """Where it lies."""
        if given is None:
            return None
        assert given.flags.c_contiguous, "the source reads one number after another"
        self._held.append(given)
        return address(given)

    def norm(self, source: View, norm: NormPart, how: Norm | None = None) -> View:
        """Of each head alone, as wide as the weights are."""
        width, to = norm.weights.size, self.register(source.width)
        weights, number = self.hold(norm.weights), NORMS.index(how or self.how.norm)
        shape: dict[str, Any] = {"inputs": width, "heads": source.width // width, "factor": 1 / width}
        return self.add("norm", source, to, weights=weights, eps=norm.eps, how=number, **shape)

    def gate(self, name: str, gates: View, values: View, **more: Any) -> View:
        """A function of `gates` times `values`."""
        to = self.register(gates.width)
        return self.add("gate", gates, to, values, how=FUNCTIONS.index(name), **more)

    def multiply(self, source: View, *linears: Linear, to: Sequence[View] = ()) -> list[View]:
        """What linear layers make of the same rows, each in a register of its own, or `to` these places."""
        places = [*to] or [self.register(linear.outputs) for linear in linears]
        given = []
        for place, linear in zip(places, linears, strict=True):
            own, order = source, linear.order
            if order is not None:
                own = self.register(order.size)
                self.add("copy", source, own, weights=self.hold(order), inputs=order.size)
            given += [(own, place, linear.bias, operand) for operand in self._operands(linear)]
        self._multiply(given)
        return places

    def multiply_each(self, source: View, stack: Stack) -> View:
        """What each expert's matrices, which lie elsewhere and are alike but for that, make of its rows."""
        to = self.register(stack.linears[0].outputs)
        table, given = ctypes.c_void_p * len(stack.linears), []
        for alike in zip(*map(self._operands, stack.linears), strict=True):
            assert len({each._replace(weights=0) for each in alike}) == 1, "they are packed alike"
            addresses = table(*(each.weights for each in alike))
            self._held.append(addresses)
            operand = alike[0]._replace(weights=ctypes.addressof(addresses), experts=len(alike))
            given.append((source, to, stack.bias, operand))
        self._multiply(given)
        return to

    def _operands(self, linear: Linear) -> list[_Operand]:
        found, first = [], 0
        for matrix in linear.matrices:
            self._held.append(matrix)
            if isinstance(matrix, Packed):
                form = FORMS[matrix.form]
                is_signed = bool(form.table) or form.bits == 8
                prepared = "packed", 1 + linear.is_fine, -1 if is_signed else form.offset, form.halves > 1
                kind, weights = form.number, matrix.panels
            else:
                weights = matrix.weights
                kind = kind_of(weights.dtype)
                prepared = "pairs" if kind == KINDS["bfloat16"] else "linear", 1, 0, False
            shape = linear.inputs, matrix.outputs, first
            found.append(_Operand(prepared, kind, address(weights), *shape))
            first += matrix.outputs
        return found

    def _multiply(self, given: Sequence[tuple[View, View, Array | None, _Operand]]) -> None:
        """Rows, where they come to, with which bias, by what; they are prepared once for all that take them
        alike."""
        for source, prepared in dict.fromkeys((source, each.prepared) for source, *_, each in given):
            alike = [each for each in given if (each[0], each[3].prepared) == (source, prepared)]
            first, (name, times, *_) = alike[0][3], prepared
            whole = View(source.register, 0, first.inputs), self._spread * first.inputs
            assert (source, self._widths[source.register]) == whole, "rows are read as they lie"
            self.add(PREPARED_BY[name], source, kind=first.kind, experts=first.experts, how=times)
            for _, to, bias, each in alike:
                at = self.hold(bias)
                at = None if at is None else at + each.first * FLOAT_BYTES
                shape: dict[str, Any] = {"kind": each.kind, "experts": each.experts, "how": times}
                shape |= {"outputs": each.outputs, "weights": each.weights}
                to = View(to.register, to.at + each.first, each.outputs)
                self.add(name, source, to, bias=at, **shape)
                self._products += self._spread * each.inputs * each.outputs


class _LayerMaker(Maker):
    def __init__(self, parts: Parts, spec: LayerSpec, how: Arithmetic, *, is_source: bool) -> None:
        super().__init__(how)
        assert spec.dense is not None, "there is an operation for everything"
        self._is_source = is_source
        self._parts: Mapping[str, Any] = parts
        self._spec, self.dense = spec, spec.dense

    def make(self, going: int | None) -> Program:
        dense = self.dense
        norm = self._parts[dense.norm_before_attention or dense.norm_after_attention or dense.norm_before_mlp]
        hidden = self.add("load", to=self.register(norm.weights.size))
        begin = self._end
        rows = self._normed(hidden, dense.norm_before_attention)
        if dense.is_residual_normed:
            self.add("copy", rows, hidden, heads=1)
        if dense.embedding_norm:
            rows = self._joined(rows, dense.embedding_norm)
        if isinstance(dense.mixer, Convolution):
            found = self._convolution(dense.mixer, rows)
        elif dense.mixer is not None:
            found = self._delta_rule(dense.mixer, rows)
        else:
            found = self._attention(rows, going)
        self._added(hidden, found, dense.norm_after_attention)
        self._end, self._stage = begin, "anew"  # the MLP's registers lie where attention's did
        rows = self._normed(hidden, dense.norm_before_mlp)
        if dense.mixture is None:
            found = self._mlp("mlp", rows)
        elif dense.mixture.is_parallel:
            found = self._normed(self._mlp("mlp", rows), "post_feedforward_layernorm_1")
            rows = self._normed(hidden, "pre_feedforward_layernorm_2")
            mixed = self._mixture(dense.mixture, "", hidden, rows)
            mixed = self._normed(mixed, "post_feedforward_layernorm_2")
            self.add("add", mixed, found, factor=1.0)
        else:
            found = self._mixture(dense.mixture, "mlp.", rows, rows)
        self._added(hidden, found, dense.norm_after_mlp)
        if dense.input_width:
            self._input(hidden)
        if dense.has_factor and (factor := self._parts["layer_scalar"]) != 1:
            self.add("scale", hidden, hidden, factor=factor)
        self.add("leave", hidden)
        return self.program(dense.mixture)

    def past(self, mixer: DeltaRule) -> Program:
        """That of the steps alone."""
        self._steps(mixer)
        return self.program()

    def _normed(self, source: View, name: str) -> View:
        return self.norm(source, self._parts[name]) if name else source

    def _added(self, hidden: View, source: View, name: str) -> None:
        """What attention or an MLP found, in the kind in which it could travel, after a norm of this name."""
        self._narrow(source)
        self.add("add", self._normed(source, name), hidden, factor=self.dense.added_scale)

    def _joined(self, rows: View, name: str) -> View:
        """A token's embedding after this norm, then `rows`."""
        embedding = self.add("load_embedding", to=self.register(rows.width))
        both = self.register(2 * rows.width)
        parts = self._normed(embedding, name), rows
        for part, to in zip(parts, both.split(rows.width, rows.width), strict=True):
            self.add("copy", part, to, heads=1)
        return both

    def _narrow(self, *views: View) -> None:
        for each in views if self.how.kind != KINDS["float32"] else ():
            self.add("narrow", each, each)

    def _multiplied(self, source: View, *names: str) -> list[View]:
        """By linear layers of these names."""
        return self.multiply(source, *(self._parts[name] for name in names))

    # -------------------------------------------------------------------------- attention, and in its place

    def _attention(self, rows: View, going: int | None) -> View:
        spec, dense, width = self._spec, self.dense, self._spec.kv.width
        counts = spec.heads, spec.kv.count, spec.kv.count
        if "self_attn.qkv_proj" in self._parts:
            (joined,) = self._multiplied(rows, "self_attn.qkv_proj")
            found = joined.split(*(count * width for count in counts))
        else:
            names = [f"self_attn.{each}_proj" for each in "qkv"]
            found = self._multiplied(rows, *(name for name in names if name in self._parts))
            found += found[1:] * (len(found) == 2)  # keys are values, too
        gates = None
        if dense.is_gated:
            both, size = found[0], spec.heads * width
            found[0], gates = self.register(size), self.register(size)
            for of, to in zip(both.split(width, width), (found[0], gates), strict=True):
                self.add("copy", of, to, outputs=2 * width, heads=spec.heads)
        are_normed = dense.query_norm, dense.query_norm, dense.has_value_norm
        for place, (name, is_normed) in enumerate(zip("qkv"[: len(found)], are_normed, strict=False)):
            if is_normed:
                found[place] = self._normed(found[place], f"self_attn.{name}_norm")
        for each in found if dense.clip else ():
            self.add("clip", each, each, cap=dense.clip)
        for place, count in enumerate(counts[: min(2, len(found))] if dense.is_turned else ()):
            to = self.register(count * width)
            found[place] = self.add("turn", found[place], to, inputs=width, heads=count)
        queries, *new = found
        if new:
            keys, values = new
            if self._is_source:
                self._narrow(*dict.fromkeys(new))
            for place, part in enumerate(new if going is not None else ()):
                to = View(0, (going or 0) + place * keys.width, part.width)
                self.add("carry", part, to, kind=self.how.kind)
            self.add("store", keys, other=values, inputs=width, kv_heads=spec.kv.count)
        if queries.width != self._widths[queries.register]:
            queries = self.add("copy", queries, self.register(queries.width), heads=1)
        attended = self.register(queries.width)
        shape: dict[str, Any] = {"inputs": width, "heads": spec.heads, "kv_heads": spec.kv.count}
        sinks = self.hold(self._parts["self_attn.sinks"]) if dense.has_sinks else None
        self.add("attend", queries, attended, bias=sinks, factor=dense.scale, cap=dense.cap, **shape)
        if gates is not None:
            attended = self.gate("sigmoid", gates, attended)
        return self._multiplied(attended, "self_attn.o_proj")[0]

    def _convolution(self, mixer: Convolution, rows: View) -> View:
        (joined,) = self._multiplied(rows, "conv.in_proj")
        width = joined.width // 3
        first, middle, last = joined.split(width, width, width)
        inputs = self.add("multiply", first, self.register(width), last)
        self.add("hold", inputs)
        weights, bias = (self.hold(self._parts.get(name)) for name in ("conv.taps", "conv.bias"))
        shape: dict[str, Any] = {"weights": weights, "bias": bias, "outputs": mixer.length}
        mixed = self.add("convolve", inputs, self.register(width), **shape)
        found = self.add("multiply", middle, self.register(width), mixed)
        return self._multiplied(found, "conv.out_proj")[0]

    def _delta_rule(self, mixer: DeltaRule, rows: View) -> View:
        names = ("in_proj_qkv", "in_proj_b", "in_proj_a", "in_proj_z")
        linears = [self._parts[f"linear_attn.{name}"] for name in names]
        *widths, width = (linear.outputs for linear in linears)
        inputs, gates = self.register(sum(widths)), self.register(width)
        self.multiply(rows, *linears, to=[*inputs.split(*widths), gates])
        self.add("hold", inputs)
        normal = self.norm(self._steps(mixer), self._parts["linear_attn.norm"], "weights")
        gated = self.gate("silu", gates, normal)
        return self._multiplied(gated, "linear_attn.out_proj")[0]

    def _steps(self, mixer: DeltaRule) -> View:
        """What rows read from their states."""
        shape: dict[str, Any] = {"inputs": mixer.key_width, "outputs": mixer.value_width}
        shape |= {"heads": mixer.heads, "kv_heads": mixer.key_heads}
        taps, rates = (self.hold(self._parts[f"linear_attn.{name}"]) for name in ("taps", "rates"))
        more: dict[str, Any] = {"how": mixer.length, "factor": mixer.key_width**-0.5, "eps": UNIT_EPS}
        self.add("recall", weights=taps, scales=rates, **shape, **more)
        return self.add("step_states", to=self.register(mixer.value_numbers), **shape)

    # ------------------------------------------------------------------------------------- MLPs, experts

    def _mlp(self, name: str, rows: View) -> View:
        if f"{name}.gate_up_proj" in self._parts:
            (joined,) = self._multiplied(rows, f"{name}.gate_up_proj")
            gates, values = joined.split(joined.width // 2, joined.width // 2)
        else:
            gates, values = self._multiplied(rows, f"{name}.gate_proj", f"{name}.up_proj")
        gated = self.gate(self.dense.activation, gates, values)
        return self._multiplied(gated, f"{name}.down_proj")[0]

    def _input(self, hidden: View) -> None:
        """What a layer takes of a token beside its hidden state: of a table, and of the token's embedding."""
        table = self._parts["layer_input.table"]
        embedding = self.add("load_embedding", to=self.register(hidden.width))
        (projected,) = self._multiplied(embedding, "layer_input.projection")
        self.add("scale", projected, projected, factor=hidden.width**-0.5)
        projected = self._normed(projected, "layer_input.norm")
        matrix, is_packed = table.matrix, isinstance(table.matrix, Packed)
        kind = FORMS[matrix.form].number if is_packed else kind_of(matrix.weights.dtype)
        weights = self.hold(matrix.panels if is_packed else matrix.weights)
        looked_up = self.register(projected.width)
        self.add("look_up", to=looked_up, weights=weights, kind=kind, how=is_packed)
        self.add("add", looked_up, projected, factor=table.factor)
        self.add("scale", projected, projected, factor=2.0**-0.5)
        (gates,) = self._multiplied(hidden, "per_layer_input_gate")
        gated = self.gate(self.dense.activation, gates, projected)
        (found,) = self._multiplied(gated, "per_layer_projection")
        self.add("add", self._normed(found, "post_per_layer_input_norm"), hidden, factor=1.0)

    def _mixture(self, mixture: Mixture, name: str, of: View, rows: View) -> View:
        """Rows choose experts by what they are `of`, are sorted by them, run through each expert's MLP, and
        are added up."""
        self._choose(mixture, self._parts[f"{name}router"], of, rows)
        self.add("sort", rows)
        self._spread = mixture.chosen
        sorted_rows = self.add("gather", rows, self.register(rows.width))
        joined = self.multiply_each(sorted_rows, self._parts[f"{name}experts.gate_up_proj"])
        gates, values = joined.split(joined.width // 2, joined.width // 2)
        gated = self.gate(self.dense.activation, gates, values, cap=mixture.limit, factor=mixture.slope)
        found = self.multiply_each(gated, self._parts[f"{name}experts.down_proj"])
        self._spread = 1
        mixed = self.add("mix", found, self.register(rows.width))
        if mixture.has_shared:
            shared = self._mlp(f"{name}shared_expert" + "s" * (not mixture.is_shared_gated), rows)
            if mixture.is_shared_gated:
                (gate,) = self._multiplied(rows, f"{name}shared_expert_gate")
                self.add("scale", shared, shared, gate, how=FUNCTIONS.index("sigmoid"))
            self.add("add", shared, mixed, factor=1.0)
        return mixed

    def _choose(self, mixture: Mixture, router: RouterPart, of: View, rows: View) -> None:
        how = next(place for place, names in enumerate(HOW_CHOSEN) if mixture.router in names)
        if router.norm is not None:
            of = self.norm(of, router.norm, "weights")
            self.add("scale", of, of, factor=router.factor)
        weights, bias, experts = self.hold(router.weights), self.hold(router.bias), mixture.experts
        self.add("halves", of, weights=weights, bias=bias, outputs=experts)
        self._sums = max(self._sums, experts)
        weights, scales = self.hold(router.correction), self.hold(router.scales)
        shape: dict[str, Any] = {"inputs": experts, "outputs": mixture.open, "kv_heads": mixture.groups}
        shape |= {"how": how, "heads": mixture.is_normed}
        self.add("choose", rows, weights=weights, scales=scales, factor=mixture.factor, **shape)
