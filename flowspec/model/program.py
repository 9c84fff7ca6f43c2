"""A layer as a list of operations that C runs in one call (`flowspec_run` in `arithmetic/canonical.c`).

The list is made when a slice is loaded, of the layer's `LayerSpec` and of its matrices and norms as they are
in memory. Rows stay in registers, each a matrix `[rows, width]`; register 0 is the hidden state, which the
operations add to in place. What a call gives beside: the angles of the rows' positions, and for each request
where its keys and values lie and what its rows see.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from flowspec.core.protocol.model_spec import LayerSpec, Mixture, ModelSpec, Router
from flowspec.model.arithmetic import compiled
from flowspec.model.arithmetic.compiled import KINDS, Call, Operation, Part, ProgramFields
from flowspec.model.arithmetic.norms import NORMS, Norm
from flowspec.model.arithmetic.packed import FORMS
from flowspec.model.attention import TreeBatch, TreeCache
from flowspec.model.gguf_layers import GgufLinear, PlainGgufLinear
from flowspec.model.products import lanes16, pairs16
from flowspec.model.quantised import PanelInt4Linear, PanelInt8Linear, QuantisedLinear

if TYPE_CHECKING:  # a trial of kernels would import transformers for nothing
    from flowspec.model.pieces import Angles, Pieces

_NAMES = (
    *("norm", "widen", "pair", "round", "split", "linear", "pairs", "packed", "digits", "halves"),
    *("turn", "store", "attend", "gate", "add", "copy", "clip", "choose", "sort", "gather", "mix"),
)
CODES = {name: code for code, name in enumerate(_NAMES)}
"""In the source's order."""
PREPARED_BY = {"linear": "widen", "pairs": "pair", "packed": "round", "digits": "split"}
"""What rows are made of before they are multiplied, by how they are."""
BY_OUTPUT = {*PREPARED_BY, "halves"}
ROUTERS: tuple[Router, ...] = ("softmax", "softmax to 1", "softmax of chosen", "sigmoid")
"""In the source's order."""
REGISTERS_MAX = 24
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

    def grow(self, needed: int) -> None:
        size = needed + needed // 4
        self._bytes = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
        self.call.room = -(-self._bytes.data_ptr() // ALIGNMENT) * ALIGNMENT
        self.call.room_bytes = size


@dataclass(slots=True)
class LayerProgram:
    """What a layer does, and a pointer to it; `held` is what of it has to stay in memory for that."""

    window: int | None
    fields: ProgramFields
    pointer: Any
    held: list[Any]


class Pass:
    """Runs programs with the same rows: hidden states `[1, rows, width]`, which they change in place, and
    what these see. There is one at a time in a room."""

    def __init__(self, room: Room, hidden: torch.Tensor, batch: TreeBatch) -> None:
        library = compiled.library()
        assert library is not None, "programs are made where it is there"
        self._run, self._room, self._batch = library.run, room, batch
        self._parts: dict[int | None, tuple[int, list[tuple[Part, TreeCache]]]] = {}
        self._angles: Angles | None = None
        call = room.call
        call.hidden, call.rows = hidden.data_ptr(), hidden.shape[1]
        call.parts_count, call.threads = len(batch.requests), torch.get_num_threads()

    def run(self, program: LayerProgram, angles: Angles, layer: int) -> None:
        """`layer` counts from the slice's first."""
        call = self._room.call
        if angles is not self._angles:
            cosine, sine = self._angles = angles
            call.cosine, call.sine, call.angles = cosine.data_ptr(), sine.data_ptr(), cosine.shape[2]
        parts = self._parts.get(program.window)
        if parts is None:
            parts = self._parts[program.window] = self._made(program.window, layer)
        call.parts, requests = parts
        for part, cache in requests:
            part.cache = cache.address(layer)
        while needed := self._run(program.pointer, self._room.pointer):
            self._room.grow(needed)

    def _made(self, window: int | None, layer: int) -> tuple[int, list[tuple[Part, TreeCache]]]:
        array = (Part * len(self._batch.requests))()
        found = []
        for part, request in zip(array, self._batch.requests, strict=True):
            rows = request.of(layer)
            assert rows is request or window is not None, "a layer without a window holds all"
            sight = rows.sight(window)
            order, ends = sight.order()
            part.places, part.seen = rows.slots.data_ptr(), sight.seen.data_ptr()
            part.order, part.ends = order.data_ptr(), ends.data_ptr()
            part.first, part.rows = rows.first, len(rows.slots)
            part.high, part.blocks = sight.seen.shape[1], len(ends)
            found.append((part, rows.cache))
        return ctypes.addressof(array), found  # a part holds the array that it is of


def programs_of(pieces: Pieces, model: ModelSpec, dtype: torch.dtype) -> list[LayerProgram]:
    """Those of a slice's layers; none where something of them has no operation."""
    specs = model.layers[pieces.span.first : pieces.span.end]
    if compiled.library() is None or any(spec.dense is None for spec in specs):
        return []
    made = []
    for layer, spec in zip(pieces.layers, specs, strict=True):
        try:
            made.append(program_of(layer, spec, pieces.family.norm, dtype))
        except CannotProgramError:
            return []
    return made


def program_of(layer: Any, spec: LayerSpec, how: Norm, dtype: torch.dtype) -> LayerProgram:
    """That of one layer. Raises `CannotProgramError`."""
    fields, held = _Maker(layer, spec, how, dtype).make()
    return LayerProgram(spec.window or None, fields, ctypes.byref(fields), held)


class _Maker:
    def __init__(self, layer: Any, spec: LayerSpec, how: Norm, dtype: torch.dtype) -> None:
        assert spec.dense is not None, "there is an operation for everything"
        self._layer, self._spec, self._dense, self._how, self._dtype = layer, spec, spec.dense, how, dtype
        self._widths: list[int] = []
        self._starts: list[int] = []
        self._end = self._numbers = 0
        self._operations: list[Operation] = []
        self._held: list[Any] = []
        self._sums = self._sums_most = self._products = 0
        self._stage, self._spread = "", 1

    def make(self) -> tuple[ProgramFields, list[Any]]:
        layer = self._layer
        attention = layer.self_attn
        hidden = self._register(attention.o_proj.out_features)
        self._end = 0  # the hidden state is the caller's
        found = self._attention(attention, self._normed(hidden, self._dense.norm_before_attention))
        self._added(hidden, found, self._dense.norm_after_attention)
        self._end, self._stage = 0, "anew"  # the MLP's registers lie where attention's did
        rows, mixture = self._normed(hidden, self._dense.norm_before_mlp), self._dense.mixture
        found = self._mlp(layer.mlp, rows) if mixture is None else self._mixture(mixture, layer.mlp, rows)
        self._added(hidden, found, self._dense.norm_after_mlp)
        assert len(self._widths) <= REGISTERS_MAX, "the source has no more room"
        operations = (Operation * len(self._operations))(*self._operations)
        widths, starts = ((ctypes.c_int64 * len(each))(*each) for each in (self._widths, self._starts))
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
            0 if self._dense.mixture is None else self._dense.mixture.experts,
            0 if self._dense.mixture is None else self._dense.mixture.chosen,
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
        stage = name if name in ("attend", "store", "sort") else "outputs" if name in BY_OUTPUT else by_row
        before, self._stage = self._stage, stage
        waits = before not in ("", stage) and {before, stage} != {"rows", "store"}
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
        return self._norm(source, getattr(self._layer, name), 1) if name else source

    def _norm(self, source: Register, norm: Any, heads: int, at: int = 0) -> Register:
        if norm.weight.dtype != self._dtype:
            raise CannotProgramError
        width = len(norm.weight)
        to = self._register(heads * width)
        self._add(
            "norm",
            source,
            to,
            from_at=at,
            weights=self._hold(norm.weight),
            inputs=width,
            heads=heads,
            factor=1 / width,
            eps=norm.eps,
            how=NORMS.index(self._how),
        )
        return to

    def _added(self, hidden: Register, source: Register, name: str) -> None:
        source = self._normed(source, name)
        self._add("add", source, hidden, inputs=self._widths[hidden], factor=self._dense.added_scale)

    # --------------------------------------------------------------------------------------- products

    def _multiplied(self, source: Register, *linears: Any) -> list[Register]:
        """What linear layers make of the same rows, one register each."""
        found = [self._register(linear.out_features) for linear in linears]
        pending: list[tuple[Register, Any, Matrix]] = []
        for to, linear in zip(found, linears, strict=True):
            order = getattr(linear, "order", None)
            own = source
            if order is not None:
                own = self._register(len(order))
                self._add("copy", source, own, weights=self._hold(order.long()), inputs=len(order))
            pending += [(own, (to, linear), matrix) for matrix in self._matrices(linear)]
        while pending:
            own, _, first = pending[0]
            same = [each for each in pending if (each[0], each[2].prepared) == (own, first.prepared)]
            pending = [each for each in pending if each not in same]
            self._add(PREPARED_BY[first.how], own, inputs=first.inputs, kind=first.kind)
            self._sums = 0
            for _, (to, linear), matrix in same:
                self._multiply(own, to, [matrix], linear.bias)
        return found

    def _multiply(
        self, source: Register, to: Register, own: Sequence[Matrix], bias: Any, experts: int = 0
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
            to_at=first.first,
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

    # ---------------------------------------------------------------------------------- attention, MLP

    def _attention(self, attention: Any, rows: Register) -> Register:
        spec = self._spec
        width, query_width = spec.kv.width, spec.heads * spec.kv.width
        key_width = spec.kv.count * width
        if hasattr(attention, "qkv_proj"):
            (joined,) = self._multiplied(rows, attention.qkv_proj)
            queries, keys, values = (joined, 0), (joined, query_width), (joined, query_width + key_width)
        else:
            made = self._multiplied(rows, attention.q_proj, attention.k_proj, attention.v_proj)
            queries, keys, values = ((each, 0) for each in made)
        if self._dense.query_norm == "head":
            queries = self._norm(queries[0], attention.q_norm, spec.heads, queries[1]), 0
            keys = self._norm(keys[0], attention.k_norm, spec.kv.count, keys[1]), 0
        elif self._dense.query_norm:
            queries, keys = (
                (self._norm(queries[0], attention.q_norm, 1, queries[1]), 0),
                (self._norm(keys[0], attention.k_norm, 1, keys[1]), 0),
            )
        for source, at in (queries, keys, values) if self._dense.clip else ():
            width_all = query_width if (source, at) == queries else key_width
            self._add("clip", source, source, to_at=at, inputs=width_all, cap=self._dense.clip)
        if self._dense.is_turned:
            queries, keys = self._turned(*queries, spec.heads), self._turned(*keys, spec.kv.count)
        elif self._widths[queries[0]] != query_width:
            alone = self._register(query_width)
            self._add("copy", queries[0], alone, from_at=queries[1], inputs=query_width)
            queries = alone, 0
        self._add(
            "store",
            keys[0],
            other=values[0],
            from_at=keys[1],
            with_at=values[1],
            inputs=width,
            kv_heads=spec.kv.count,
        )
        found = self._register(query_width)
        self._add(
            "attend",
            queries[0],
            found,
            inputs=width,
            heads=spec.heads,
            kv_heads=spec.kv.count,
            bias=self._hold(attention.sinks.float()) if self._dense.has_sinks else None,
            factor=self._dense.scale,
            cap=self._dense.cap,
        )
        return self._multiplied(found, attention.o_proj)[0]

    def _turned(self, source: Register, at: int, heads: int) -> tuple[Register, int]:
        to = self._register(heads * self._spec.kv.width)
        self._add("turn", source, to, from_at=at, inputs=self._spec.kv.width, heads=heads)
        return to, 0

    def _mlp(self, mlp: Any, rows: Register) -> Register:
        if hasattr(mlp, "gate_up_proj"):
            (joined,) = self._multiplied(rows, mlp.gate_up_proj)
            width = self._widths[joined] // 2
            gate, up = (joined, 0), (joined, width)
        else:
            gate, up = ((each, 0) for each in self._multiplied(rows, mlp.gate_proj, mlp.up_proj))
            width = self._widths[gate[0]]
        to = self._register(width)
        how = compiled.FUNCTIONS.index(self._dense.activation)
        self._add("gate", gate[0], to, other=up[0], from_at=gate[1], with_at=up[1], inputs=width, how=how)
        return self._multiplied(to, mlp.down_proj)[0]

    # ---------------------------------------------------------------------------------------- experts

    def _mixture(self, mixture: Mixture, mlp: Any, rows: Register) -> Register:
        """Rows choose experts and are sorted by them, run through each expert's MLP, and are added up."""
        router, experts = mlp.router if hasattr(mlp, "router") else mlp.gate, mlp.experts
        own = getattr(router, "bias", None)
        if mixture.router not in ROUTERS or router.weight.dtype not in KINDS:
            raise CannotProgramError
        if own is not None and own.dtype != router.weight.dtype:
            raise CannotProgramError
        hidden, chosen = self._widths[rows], mixture.chosen
        self._add("widen", rows, inputs=hidden)
        self._add(
            "halves",
            rows,
            weights=self._hold(router.weight),
            bias=None if own is None else self._hold(own),
            inputs=hidden,
            outputs=mixture.experts,
            kind=KINDS[router.weight.dtype],
            how=KINDS[torch.float32 if mixture.router == "sigmoid" else self._dtype],
        )
        self._sums_most = max(self._sums_most, mixture.experts)
        how = ROUTERS.index(mixture.router)
        bias = getattr(router, "e_score_correction_bias", None)
        if bias is not None and bias.dtype != torch.float32:
            raise CannotProgramError
        self._add(
            "choose",
            rows,
            weights=None if bias is None else self._hold(bias),
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
            shared = self._mlp(mlp.shared_experts, rows)
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
