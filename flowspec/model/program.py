"""A layer as a list of operations that C runs in one call (`flowspec_run` in `arithmetic/canonical.c`).

The list is made when a slice is loaded, of the layer's `LayerSpec` and of its matrices and norms as they are
in memory. Rows stay in registers, each a matrix `[rows, width]`; register 0 is the hidden state, which the
operations add to in place. What a call gives beside: the angles of the rows' positions, and for each request
where what it holds lies, and what its rows see of that.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from flowspec.core.protocol.model_spec import Convolution, DeltaRule, LayerSpec, Mixture, ModelSpec, Router
from flowspec.model.arithmetic import compiled
from flowspec.model.arithmetic.compiled import KINDS, Call, Operation, Part, ProgramFields
from flowspec.model.arithmetic.norms import NORMS, Norm
from flowspec.model.arithmetic.packed import FORMS
from flowspec.model.arithmetic.plain import UNIT_EPS
from flowspec.model.attention import BASE, TreeBatch, TreeCache, TreeRows
from flowspec.model.beside import Beside
from flowspec.model.gguf_layers import GgufEmbedding, GgufLinear, PlainGgufLinear
from flowspec.model.layer_by_layer import LAYER_INPUT
from flowspec.model.linear_attention import Walk, fading, walk_of, walk_past
from flowspec.model.products import lanes16, pairs16
from flowspec.model.quantised import PanelInt4Linear, PanelInt8Linear, QuantisedLinear

if TYPE_CHECKING:  # a trial of kernels would import transformers for nothing
    from flowspec.model.pieces import Angles, Pieces

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
ROUTERS: tuple[tuple[Router, ...], ...] = (
    ("softmax",),
    ("softmax to 1", "scaled softmax to 1"),
    ("softmax of chosen",),
    ("sigmoid",),
)
"""In the source's order."""
REGISTERS_MAX = 48
NO_FUNCTION = len(compiled.FUNCTIONS)
ALIGNMENT = 64
Register = int


@dataclass(frozen=True, slots=True)
class Matrix:
    """Outputs of a linear layer from number `first` on; `prepared`: rows for two matrices are the same."""

    how: str
    kind: int
    weights: int
    inputs: int
    outputs: int
    first: int
    prepared: tuple[str, int, bool]
    scales: int = 0

    def is_like(self, other: Matrix | None) -> bool:
        """Whether it lies elsewhere, and is the same but for that."""
        return other is not None and replace(other, weights=self.weights, scales=self.scales) == self


class CannotProgramError(Exception):
    """A layer that has something for which there is no operation."""


class Room:
    """Memory that calls of a slice's programs are lent, one after another; it grows."""

    def __init__(self) -> None:
        self.call = Call()
        self.pointer = ctypes.pointer(self.call)
        self._bytes = torch.empty(0, dtype=torch.uint8)
        library = compiled.library()
        self._run = None if library is None else library.run

    def run(self, program: Any) -> None:
        """By a pointer, with what the call says."""
        assert self._run is not None, "programs are made where the library is there"
        while needed := self._run(program, self.pointer):
            self._grow(needed)

    def _grow(self, needed: int) -> None:
        size = needed + needed // 4
        self._bytes = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
        self.call.room = -(-self._bytes.data_ptr() // ALIGNMENT) * ALIGNMENT
        self.call.room_bytes = size


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


class Pass:
    """Runs programs with the same rows: hidden states `[1, rows, width]`, which they change in place, what
    these see, and what comes and goes with them. There is one at a time in a room."""

    def __init__(
        self, room: Room, hidden: torch.Tensor, batch: TreeBatch, beside: Beside | None = None
    ) -> None:
        self._room, self._batch, self._beside = room, batch, beside
        self._parts: dict[Any, tuple[int, list[tuple[Part, TreeRows]]]] = {}
        self._angles: Angles | None = None
        call = room.call
        call.hidden, call.rows = hidden.data_ptr(), hidden.shape[1]
        call.parts_count, call.threads = len(batch.requests), torch.get_num_threads()
        if beside is not None:
            call.tokens, call.embedding = beside.tokens.data_ptr(), beside.embedding.data_ptr()
            call.going, call.between_going = beside.going.data_ptr(), beside.going.shape[1]
            call.between_embeddings = beside.embedding.stride(1)

    def run(self, program: LayerProgram, angles: Angles) -> None:
        call = self._room.call
        if angles is not self._angles:
            cosine, sine = self._angles = angles
            call.cosine, call.sine, call.angles = cosine.data_ptr(), sine.data_ptr(), cosine.shape[2]
        parts = self._parts.get(program.view)
        if parts is None:
            parts = self._parts[program.view] = self._made(program)
        call.parts, requests = parts
        for part, rows in requests:
            part.cache = rows.cache.address(program.source)
        mixer = program.view[1]
        if isinstance(mixer, DeltaRule):
            for part, rows in requests:
                _step(part, walk_of(rows, program.source, mixer.length))
        self._room.run(program.pointer)

    def _made(self, program: LayerProgram) -> tuple[int, list[tuple[Part, TreeRows]]]:
        array, (window, mixer) = (Part * len(self._batch.requests))(), program.view
        found = []
        for part, request in zip(array, self._batch.requests, strict=True):
            rows = request.of(program.source)
            assert rows is request or window is not None, "a layer without a window holds all"
            part.first, part.rows, part.slots = rows.first, len(rows.slots), rows.slots.data_ptr()
            if mixer is None:
                sight = rows.sight(window)
                order, ends = sight.order()
                part.seen, part.order, part.ends = sight.seen.data_ptr(), order.data_ptr(), ends.data_ptr()
                part.high, part.blocks = sight.seen.shape[1], len(ends)
            elif isinstance(mixer, Convolution):
                part.lines = rows.line(mixer.length).data_ptr()
            found.append((part, rows))
        return ctypes.addressof(array), found  # a part holds the array that it is of


def _step(part: Part, walk: Walk) -> None:
    part.lines, part.steps = walk.lines.data_ptr(), walk.steps.data_ptr()
    part.nodes, part.steps_count, part.places = len(walk.lines), len(walk.steps), walk.places


def pass_by(room: Room, program: LayerProgram, cache: TreeCache, passed: Sequence[int]) -> None:
    """Brings the state `BASE` to the end of these slots, which `ClearSlots` names."""
    mixer, layer = program.view[1], program.source
    assert isinstance(mixer, DeltaRule)
    assert program.past is not None
    walk = walk_past(layer, cache, passed, mixer.length)
    inputs = cache.inputs[cache.places[layer]]
    state = cache.states[cache.places[layer], BASE]
    where = compiled.Cache(inputs=inputs.data_ptr(), inputs_width=inputs.shape[1], state=state.data_ptr())
    part, call = Part(cache=ctypes.addressof(where)), room.call
    _step(part, walk)
    call.rows, call.parts_count, call.parts, call.threads = 0, 1, ctypes.addressof(part), 1
    room.run(ctypes.byref(program.past))


def programs_of(pieces: Pieces, model: ModelSpec, dtype: torch.dtype) -> list[LayerProgram]:
    """Those of a slice's layers; none where something of them has no operation."""
    first, specs = pieces.span.first, model.layers[pieces.span.first : pieces.span.end]
    if compiled.library() is None or any(spec.dense is None for spec in specs):
        return []
    going = {}
    at = model.carried_at(pieces.span.end).embedding
    for source in model.carried_at(pieces.span.end).sources:
        going[source - first] = at
        at += model.layers[source].kv.numbers
    made = []
    for place, (layer, spec) in enumerate(zip(pieces.layers, specs, strict=True)):
        try:
            parts = dict(layer.named_modules())
            parts |= {name: parts[own] for name, own in pieces.family.layer_names.items() if own in parts}
            spec = replace(spec, source=spec.source - first)
            found = program_of(parts, spec, pieces.family.norm, dtype, place, going.get(place))
        except CannotProgramError:
            return []
        made.append(found)
    return made


def program_of(
    parts: Mapping[str, Any],
    spec: LayerSpec,
    norm: Norm,
    dtype: torch.dtype,
    place: int = 0,
    going: int | None = None,
) -> LayerProgram:
    """That of one layer, from its parts by their names in most families. Its spec's `source` counts from the
    slice's first layer, as its `place` does; its keys and values go on from number `going`, if they do.
    Raises `CannotProgramError`."""
    assert spec.dense is not None, "there is an operation for everything"
    maker = _Maker(parts, spec, norm, dtype)
    fields, held = maker.make(going, spec.source == place)
    past = None
    if isinstance(spec.dense.mixer, DeltaRule):
        past, more = maker.past()
        held += more
    view = spec.window or None, spec.dense.mixer
    return LayerProgram(view, spec.source, fields, ctypes.byref(fields), held, past)


class _Maker:
    def __init__(self, parts: Mapping[str, Any], spec: LayerSpec, how: Norm, dtype: torch.dtype) -> None:
        assert spec.dense is not None, "there is an operation for everything"
        self._parts, self._spec, self._dense, self._how, self._dtype = parts, spec, spec.dense, how, dtype
        self._held: list[Any] = []
        self._clear()

    def _clear(self) -> None:
        self._widths: list[int] = []
        self._starts: list[int] = []
        self._end = self._numbers = 0
        self._operations: list[Operation] = []
        self._sums = self._sums_most = self._products = 0
        self._stage, self._spread = "", 1

    def make(self, going: int | None, is_own: bool) -> tuple[ProgramFields, list[Any]]:
        """`is_own`: whether the layer has keys and values of its own."""
        dense = self._dense
        norm = self._parts[dense.norm_before_attention or dense.norm_after_attention]
        hidden = self._register(len(norm.weight))
        self._end = 0  # the hidden state is the caller's
        rows = self._normed(hidden, dense.norm_before_attention)
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
        if dense.has_factor and (factor := self._parts[""].layer_scalar.item()) != 1:
            self._add("scale", hidden, hidden, inputs=self._widths[hidden], factor=factor)
        assert len(self._widths) <= REGISTERS_MAX, "the source has no more room"
        return self._finished()

    def past(self) -> tuple[ProgramFields, list[Any]]:
        """That of the steps alone, of a layer with states."""
        self._clear()
        self._register(0)
        assert isinstance(self._dense.mixer, DeltaRule)
        self._steps(self._dense.mixer)
        return self._finished()

    def _finished(self) -> tuple[ProgramFields, list[Any]]:
        operations = (Operation * len(self._operations))(*self._operations)
        widths, starts = ((ctypes.c_int64 * len(each))(*each) for each in (self._widths, self._starts))
        mixture = self._dense.mixture
        fields = ProgramFields(
            ctypes.addressof(operations),
            ctypes.addressof(widths),
            ctypes.addressof(starts),
            len(operations),
            len(widths),
            self._numbers,
            self._sums_most,
            self._products,
            KINDS[self._dtype],
            0 if mixture is None else mixture.experts,
            0 if mixture is None else mixture.chosen,
        )
        return fields, [operations, widths, starts, *self._held]

    def _register(self, width: int) -> Register:
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
        spread = self._spread
        self._operations.append(
            Operation(
                code=CODES[name], source=source, to=to, other=other, waits=waits, spread=spread, **fields
            )
        )

    def _hold(self, tensor: torch.Tensor) -> int:
        if not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise CannotProgramError
        self._held.append(tensor)
        return tensor.data_ptr()

    # ------------------------------------------------------------------------------------------ norms

    def _normed(self, source: Register, name: str) -> Register:
        return self._norm(source, self._parts[name].weight, self._parts[name].eps, 1) if name else source

    def _norm(
        self,
        source: Register,
        weight: torch.Tensor,
        eps: float,
        heads: int,
        at: int = 0,
        how: Norm | None = None,
    ) -> Register:
        if weight.dtype != self._dtype:
            raise CannotProgramError
        width = len(weight)
        to = self._register(heads * width)
        self._add(
            "norm",
            source,
            to,
            from_at=at,
            weights=self._hold(weight),
            inputs=width,
            heads=heads,
            factor=1 / width,
            eps=eps,
            how=NORMS.index(how or self._how),
        )
        return to

    def _ones(self, width: int) -> torch.Tensor:
        return torch.ones(width, dtype=self._dtype)

    def _added(self, hidden: Register, source: Register, name: str) -> None:
        source = self._normed(source, name)
        self._add("add", source, hidden, inputs=self._widths[hidden], factor=self._dense.added_scale)

    # --------------------------------------------------------------------------------------- products

    def _multiplied(self, source: Register, *names: str) -> list[Register]:
        """What linear layers make of the same rows, one register each."""
        linears = [self._parts[name] for name in names]
        places = [(self._register(linear.out_features), 0) for linear in linears]
        self._multiply_by(source, linears, places)
        return [to for to, _ in places]

    def _multiply_by(
        self, source: Register, linears: Sequence[Any], places: Sequence[tuple[Register, int]]
    ) -> None:
        """By linear layers, whose results begin at these places of registers."""
        pending: list[tuple[Register, Any, Matrix]] = []
        for place, linear in zip(places, linears, strict=True):
            order = getattr(linear, "order", None)
            own = source
            if order is not None:
                own = self._register(len(order))
                self._add("copy", source, own, weights=self._hold(order.long()), inputs=len(order))
            pending += [(own, (place, linear), matrix) for matrix in self._matrices(linear)]
        while pending:
            own, _, first = pending[0]
            same = [each for each in pending if (each[0], each[2].prepared) == (own, first.prepared)]
            pending = [each for each in pending if each not in same]
            self._add(PREPARED_BY[first.how], own, inputs=first.inputs, kind=first.kind)
            self._sums = 0
            for _, ((to, at), linear), matrix in same:
                self._multiply(own, to, [matrix], linear.bias, at=at)

    def _multiply(
        self,
        source: Register,
        to: Register,
        own: Sequence[Matrix],
        bias: Any,
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
        if bias is not None and bias.dtype != self._dtype:
            raise CannotProgramError
        self._add(
            first.how,
            source,
            to,
            weights=weights,
            bias=None if bias is None else self._hold(bias) + first.first * bias.element_size(),
            scales=scales or None,
            inputs=first.inputs,
            outputs=first.outputs,
            to_at=at + first.first,
            kind=first.kind,
            experts=experts,
            sums_at=self._sums,
        )
        self._sums += self._spread * first.outputs
        self._sums_most = max(self._sums_most, self._sums)
        self._products += self._spread * first.inputs * first.outputs

    def _matrices(self, linear: Any) -> list[Matrix]:
        inputs, outputs = linear.in_features, linear.out_features
        if isinstance(linear, GgufLinear) and not isinstance(linear, PlainGgufLinear):
            found, first = [], 0
            for part in linear.parts:
                found.append(self._packed(part.kind, part.panels, inputs, part.outputs, first))
                first += part.outputs
            return found
        if isinstance(linear, PanelInt4Linear):
            return [self._packed("Q4_0", linear._panels, inputs, outputs, 0)]
        if isinstance(linear, PanelInt8Linear):
            where = self._hold(linear._panels)
            scales = self._hold(linear._scales)
            return [Matrix("digits", 0, where, inputs, outputs, 0, ("digits", 0, False), scales)]
        product = linear.__dict__.get("product")
        if isinstance(linear, QuantisedLinear) or product not in (lanes16, pairs16):
            raise CannotProgramError
        weights = self._hold(linear.weight)
        if product is pairs16:
            if self._dtype != torch.bfloat16 or linear.weight.dtype != torch.bfloat16:
                raise CannotProgramError
            return [Matrix("pairs", 0, weights, inputs, outputs, 0, ("pairs", 0, False))]
        kind = KINDS[linear.weight.dtype]
        return [Matrix("linear", kind, weights, inputs, outputs, 0, ("linear", 0, False))]

    def _packed(self, name: str, panels: torch.Tensor, inputs: int, outputs: int, first: int) -> Matrix:
        form = FORMS[name]
        is_signed = bool(form.table) or form.bits == 8
        prepared = "packed", -1 if is_signed else form.offset, form.halves > 1
        return Matrix("packed", form.number, self._hold(panels), inputs, outputs, first, prepared)

    # -------------------------------------------------------------------------- attention, and in its place

    def _attention(self, rows: Register, going: int | None, is_own: bool) -> Register:
        spec, dense, name = self._spec, self._dense, "self_attn."
        width, query_width = spec.kv.width, spec.heads * spec.kv.width
        key_width = spec.kv.count * width
        gates: Register | None = None
        found: list[tuple[Register, int]]
        if name + "qkv_proj" in self._parts:
            (joined,) = self._multiplied(rows, name + "qkv_proj")
            found = [(joined, 0), (joined, query_width), (joined, query_width + key_width)]
        else:
            names = [name + each for each in ("q_proj", "k_proj", "v_proj") if name + each in self._parts]
            made = [(each, 0) for each in self._multiplied(rows, *names)]
            found = [made[0], made[1], made[-1]] if is_own else made[:1]  # keys may be values, too
        if dense.is_gated:
            both, alone, gates = found[0][0], self._register(query_width), self._register(query_width)
            for to, at in ((alone, 0), (gates, width)):
                self._add("copy", both, to, from_at=at, inputs=width, outputs=2 * width, heads=spec.heads)
            found[0] = alone, 0
        found = self._ready(found)
        queries = found[0]
        if is_own:
            self._store(found[1], found[2], going)
        if self._widths[queries[0]] != query_width:
            alone = self._register(query_width)
            self._add("copy", queries[0], alone, from_at=queries[1], inputs=query_width, heads=1)
            queries = alone, 0
        attended = self._register(query_width)
        sinks = self._parts["self_attn"].sinks.float() if dense.has_sinks else None
        self._add(
            "attend",
            queries[0],
            attended,
            inputs=width,
            heads=spec.heads,
            kv_heads=spec.kv.count,
            bias=None if sinks is None else self._hold(sinks),
            factor=dense.scale,
            cap=dense.cap,
        )
        if gates is not None:
            ungated, attended = attended, self._register(query_width)
            how = compiled.FUNCTIONS.index("sigmoid")
            self._add("gate", gates, attended, other=ungated, inputs=query_width, how=how)
        return self._multiplied(attended, name + "o_proj")[0]

    def _ready(self, given: Sequence[tuple[Register, int]]) -> list[tuple[Register, int]]:
        """Queries, and keys and values if any, each from a number of a register on, as they meet."""
        spec, dense = self._spec, self._dense
        counts = spec.heads, spec.kv.count, spec.kv.count
        found = list(given)
        for place, name in enumerate(("self_attn.q_norm", "self_attn.k_norm")[: len(given)]):
            if dense.query_norm:
                norm, (source, at) = self._parts[name], found[place]
                heads = counts[place] if dense.query_norm == "head" else 1
                found[place] = self._norm(source, norm.weight, norm.eps, heads, at), 0
        if dense.has_value_norm and len(given) > 1:
            (source, at), eps = found[2], self._parts["self_attn.v_norm"].eps
            found[2] = self._norm(source, self._ones(spec.kv.width), eps, spec.kv.count, at), 0
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
                self._add("carry", source, from_at=at, to_at=to_at, inputs=count * width)
        where = {"from_at": keys_at, "with_at": values_at}
        self._add("store", of_keys, other=of_values, inputs=width, kv_heads=count, **where)

    def _convolution(self, mixer: Convolution, rows: Register) -> Register:
        (joined,) = self._multiplied(rows, "conv.in_proj")
        width = self._widths[joined] // 3
        inputs, mixed, found = (self._register(width) for _ in range(3))
        self._add("multiply", joined, inputs, other=joined, with_at=2 * width, inputs=width, how=NO_FUNCTION)
        self._add("hold", inputs, inputs=width)
        own = self._parts["conv.conv"]
        self._add(
            "convolve",
            inputs,
            mixed,
            weights=self._hold(_oldest_first(own)),
            bias=None if own.bias is None else self._hold(own.bias.float()),
            inputs=width,
            outputs=mixer.length,
        )
        self._add("multiply", joined, found, other=mixed, from_at=width, inputs=width, how=NO_FUNCTION)
        return self._multiplied(found, "conv.out_proj")[0]

    def _delta_rule(self, mixer: DeltaRule, rows: Register) -> Register:
        name, own = "linear_attn.", self._parts["linear_attn"]
        linears = [
            self._parts[name + each] for each in ("in_proj_qkv", "in_proj_b", "in_proj_a", "in_proj_z")
        ]
        widths = [linear.out_features for linear in linears]
        inputs, gates = self._register(sum(widths[:3])), self._register(widths[3])
        starts = itertools.accumulate(widths[:2], initial=0)
        self._multiply_by(rows, linears, [*((inputs, at) for at in starts), (gates, 0)])
        self._add("hold", inputs, inputs=sum(widths[:3]))
        found, gated = self._steps(mixer), self._register(widths[3])
        eps = own.norm.variance_epsilon
        normal = self._norm(found, own.norm.weight, eps, mixer.heads, how="cast, scale")
        how = compiled.FUNCTIONS.index("silu")
        self._add("multiply", gates, gated, other=normal, inputs=widths[3], how=how)
        return self._multiplied(gated, name + "out_proj")[0]

    def _steps(self, mixer: DeltaRule) -> Register:
        """What rows read from their states."""
        own = self._parts["linear_attn"]
        values = mixer.heads * mixer.value_width
        shape: dict[str, Any] = {
            "inputs": mixer.key_width,
            "outputs": mixer.value_width,
            "heads": mixer.heads,
            "kv_heads": mixer.key_heads,
        }
        rates = torch.cat([fading(own), own.dt_bias.float()])
        weights, scales = self._hold(_oldest_first(own.conv1d)), self._hold(rates)
        factor = mixer.key_width**-0.5
        more = {"how": mixer.length, "factor": factor, "eps": UNIT_EPS}
        self._add("recall", 0, weights=weights, scales=scales, **shape, **more)
        found = self._register(values)
        self._sums_most = max(self._sums_most, values)
        self._add("step_states", 0, found, **shape)
        return found

    def _turned(self, source: Register, at: int, heads: int) -> tuple[Register, int]:
        to = self._register(heads * self._spec.kv.width)
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
        to = self._register(width)
        how = compiled.FUNCTIONS.index(self._dense.activation)
        self._add("gate", gate[0], to, other=up[0], from_at=gate[1], with_at=up[1], inputs=width, how=how)
        return self._multiplied(to, f"{name}.down_proj")[0]

    def _input(self, hidden: Register) -> None:
        """What a layer takes of a token beside its hidden state: of a table, and of the token's embedding."""
        own, width = self._parts[LAYER_INPUT], self._dense.input_width
        embedding, looked_up = self._register(self._widths[hidden]), self._register(width)
        self._add("load", 0, embedding, inputs=self._widths[hidden])
        (projected,) = self._multiplied(embedding, f"{LAYER_INPUT}.projection")
        self._add("scale", projected, projected, inputs=width, factor=own.projection_scale)
        projected = self._norm(projected, own.norm.weight, own.norm.eps, 1)
        if isinstance(own.table, GgufEmbedding):
            (part,) = own.table.parts
            table: dict[str, Any] = {
                "weights": self._hold(part.panels),
                "kind": FORMS[part.kind].number,
                "how": 1,
            }
        else:
            weight = own.table.weight
            table = {"weights": self._hold(weight), "kind": KINDS[weight.dtype], "how": 0}
        self._add("look_up", 0, looked_up, inputs=width, **table)
        factor = torch.tensor(own.table_scale).to(self._dtype).item()
        self._add("add", looked_up, projected, inputs=width, factor=factor)
        self._add("scale", projected, projected, inputs=width, factor=2.0**-0.5)
        (gates,) = self._multiplied(hidden, "per_layer_input_gate")
        gated, how = self._register(width), compiled.FUNCTIONS.index(self._dense.activation)
        self._add("gate", gates, gated, other=projected, inputs=width, how=how)
        (found,) = self._multiplied(gated, "per_layer_projection")
        self._added(hidden, found, "post_per_layer_input_norm")

    def _mixture(self, mixture: Mixture, name: str, of: Register, rows: Register) -> Register:
        """Rows choose experts by what they are `of`, are sorted by them, run through each expert's MLP, and
        are added up."""
        router = self._parts[f"{name}router" if f"{name}router" in self._parts else f"{name}gate"]
        experts, scaling = self._parts[f"{name}experts"], None
        if mixture.router == "scaled softmax to 1":
            scale, scaling = router.scale, router.per_expert_scale.float()
            of = self._norm(of, scale.detach(), router.norm.eps, 1, how="cast, scale")
            self._add("scale", of, of, inputs=self._widths[of], factor=router.scalar_root_size)
            router = router.proj
        own = getattr(router, "bias", None)
        how = next((place for place, names in enumerate(ROUTERS) if mixture.router in names), None)
        if how is None or router.weight.dtype not in KINDS:
            raise CannotProgramError
        if own is not None and own.dtype != router.weight.dtype:
            raise CannotProgramError
        hidden, chosen = self._widths[rows], mixture.chosen
        self._add("widen", of, inputs=hidden)
        self._add(
            "halves",
            of,
            weights=self._hold(router.weight),
            bias=None if own is None else self._hold(own),
            inputs=hidden,
            outputs=mixture.experts,
            kind=KINDS[router.weight.dtype],
            how=KINDS[torch.float32 if mixture.router == "sigmoid" else self._dtype],
        )
        self._sums_most = max(self._sums_most, mixture.experts)
        bias = getattr(router, "e_score_correction_bias", None)
        if bias is not None and bias.dtype != torch.float32:
            raise CannotProgramError
        self._add(
            "choose",
            rows,
            weights=None if bias is None else self._hold(bias),
            scales=None if scaling is None else self._hold(scaling),
            inputs=mixture.experts,
            outputs=mixture.open,
            how=how,
            heads=mixture.is_normed,
            kv_heads=mixture.groups,
            factor=mixture.factor,
        )
        self._add("sort", rows)
        self._spread = chosen
        sorted_rows = self._register(chosen * hidden)
        self._add("gather", rows, sorted_rows, inputs=hidden)
        joined = self._each(sorted_rows, experts, "gate_up_proj")
        width = self._widths[joined] // chosen // 2
        gated, how = self._register(chosen * width), compiled.FUNCTIONS.index(self._dense.activation)
        self._add(
            "gate",
            joined,
            gated,
            other=joined,
            with_at=width,
            inputs=width,
            how=how,
            cap=mixture.limit,
            factor=mixture.slope,
        )
        found = self._each(gated, experts, "down_proj")
        self._spread = 1
        mixed = self._register(hidden)
        self._add("mix", found, mixed, inputs=hidden)
        if mixture.has_shared:
            shared = self._mlp(f"{name}shared_expert" + "s" * (not mixture.is_shared_gated), rows)
            if mixture.is_shared_gated:
                (gate,) = self._multiplied(rows, f"{name}shared_expert_gate")
                how = compiled.FUNCTIONS.index("sigmoid")
                self._add("scale", shared, shared, other=gate, inputs=hidden, how=how)
            self._add("add", shared, mixed, inputs=hidden, factor=1.0)
        return mixed

    def _each(self, source: Register, experts: Any, name: str) -> Register:
        """What each expert's matrices make of its own rows."""
        given, biases = getattr(experts, name), getattr(experts, f"{name}_bias", None)
        if isinstance(given, torch.nn.ModuleList):
            made = [self._matrices(linear) for linear in given]
            if any(getattr(linear, "order", None) is not None for linear in given):
                raise CannotProgramError
        else:
            made = [[matrix] for matrix in self._stack(experts.product, given)]
        pending = [list(each) for each in itertools.zip_longest(*made)]
        if not all(all(map(own[0].is_like, own)) for own in pending):
            raise CannotProgramError
        to = self._register(self._spread * sum(own[0].outputs for own in pending))
        while pending:
            first = pending[0][0]
            same = [own for own in pending if own[0].prepared == first.prepared]
            pending = [own for own in pending if own not in same]
            name = PREPARED_BY[first.how]
            self._add(name, source, inputs=first.inputs, kind=first.kind, experts=len(made))
            self._sums = 0
            for own in same:
                self._multiply(source, to, own, biases, len(own))
        return to

    def _stack(self, product: Any, weights: torch.Tensor) -> list[Matrix]:
        """The matrices of a parameter `[experts, out, in]`."""
        if product not in (lanes16, pairs16):
            raise CannotProgramError
        count, outputs, inputs = weights.shape
        how = "pairs" if product is pairs16 else "linear"
        kind = 0 if how == "pairs" else KINDS[weights.dtype]
        begin, size = self._hold(weights.detach()), outputs * inputs * weights.element_size()
        return [
            Matrix(how, kind, begin + place * size, inputs, outputs, 0, (how, 0, False))
            for place in range(count)
        ]


def _oldest_first(convolution: Any) -> torch.Tensor:
    """Its weights in float32, `[length, width]`."""
    found: torch.Tensor = convolution.weight[:, 0].float().t().contiguous()
    return found
