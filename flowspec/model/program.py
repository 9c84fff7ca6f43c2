"""A layer as a list of steps, made when a slice is loaded, of its `LayerSpec` and of its parts. C runs it in
one call on a CPU (`operations.py`), and torch step by step on a GPU (`gpu.py`).

Rows stay in registers, each a float32 matrix `[rows, width]`; what comes to a layer and leaves it is in the
dtype in which hidden states travel.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from flowspec.core.protocol.model_spec import Convolution, DeltaRule, LayerSpec, Mixture, Norm
from flowspec.model.arithmetic.arrays import Array
from flowspec.model.parts import Linear, NormPart, Parts, RouterPart, Stack


class View(NamedTuple):
    """Numbers `[at, at + width)` of each row of a register."""

    register: int
    at: int
    width: int

    def split(self, *widths: int) -> list[View]:
        """So many numbers each, one after another."""
        starts = itertools.accumulate(widths, initial=self.at)
        return [View(self.register, at, width) for at, width in zip(starts, widths, strict=False)]


NOWHERE = View(-1, 0, 0)
"""What a step does without."""


class Step(NamedTuple):
    """What is done with rows: of numbers of a `source`, and of an `other` one, those of `to` are made. What a
    name means, and what of the rest it takes, `gpu.Steps` says.

    Its registers have `spread` rows for each: one, or one for each expert that the row chose. `weights` are
    an array, a part or a table's matrix; `inputs` the width of a head, which are `outputs` apart where they
    are copied; `how` names a function, a norm or a dtype.
    """

    name: str
    source: View = NOWHERE
    to: View = NOWHERE
    other: View = NOWHERE
    spread: int = 1
    weights: Any = None
    bias: Array | None = None
    scales: Array | None = None
    how: str = ""
    inputs: int = 0
    outputs: int = 0
    heads: int = 0
    kv_heads: int = 0
    factor: float = 0.0
    eps: float = 0.0
    cap: float = 0.0


class Place(NamedTuple):
    """A layer's in its slice. It attends to keys and values of a `source`, counted from the slice's first
    layer, mostly itself; to its own later layers do if it `is_source`, and they go on from number `going`, if
    they do."""

    source: int = 0
    going: int | None = None
    is_source: bool = False


class Arithmetic(NamedTuple):
    """How rows are computed: the dtype in which hidden states travel, and norms."""

    dtype: str
    norm: Norm


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """Steps, and how many numbers each register has for a row. A layer's attends to keys and values of a
    `source`, through a `window` if any."""

    dtype: str
    steps: Sequence[Step]
    widths: Sequence[int]
    mixture: Mixture | None = None
    mixer: Convolution | DeltaRule | None = None
    source: int = 0
    window: int | None = None


def program_of(parts: Parts, spec: LayerSpec, how: Arithmetic, place: Place) -> Program:
    """Of a layer."""
    return _LayerMaker(parts, spec, how, place).make()


def rows_program(
    how: Arithmetic, norm: NormPart | None, linear: Linear | None, are_logits: bool = False
) -> Program:
    """Of rows `[rows, inputs]` it makes rows `[rows, outputs]` that go on: by a norm, a linear layer, or
    both. Of logits, `are_logits`, rows are float32, and those that they are made of finely rounded."""
    maker = Maker(how)
    if linear is not None:
        width = linear.inputs
    else:
        assert norm is not None, "there is something to do"
        width = len(norm.weights)
    found = maker.add("load", to=maker.register(width))
    if norm is not None:
        found = maker.norm(found, norm)
    if linear is not None:
        (found,) = maker.multiply(found, replace(linear, is_fine=linear.is_fine or are_logits))
    maker.carry(found, dtype="float32" if are_logits else how.dtype)
    return maker.program()


class Maker:
    """Registers, and steps on them."""

    def __init__(self, how: Arithmetic) -> None:
        self.how = how
        self._steps: list[Step] = []
        self._widths: list[int] = []
        self._spread = 1

    def program(self, **more: Any) -> Program:
        return Program(dtype=self.how.dtype, steps=self._steps, widths=self._widths, **more)

    def register(self, width: int) -> View:
        """Of so many numbers for a row, or for a row of each expert that it chose."""
        self._widths.append(self._spread * width)
        return View(len(self._widths) - 1, 0, width)

    def add(self, name: str, source: View = NOWHERE, to: View = NOWHERE, **more: Any) -> View:
        """A step; gives where it writes `to`."""
        self._steps.append(Step(name, source, to, spread=self._spread, **more))
        return to

    def carry(self, source: View, at: int = 0, dtype: str = "") -> None:
        """To what goes on of rows, from a number on."""
        self.add("carry", source, View(0, at, source.width), how=dtype or self.how.dtype)

    def norm(self, source: View, norm: NormPart, how: Norm | None = None) -> View:
        """Of each head alone, as wide as the weights are."""
        to = self.register(source.width)
        return self.add("norm", source, to, weights=norm.weights, eps=norm.eps, how=how or self.how.norm)

    def gate(self, name: str, gates: View, values: View, **more: Any) -> View:
        """A function of `gates` times `values`."""
        return self.add("gate", gates, self.register(gates.width), other=values, how=name, **more)

    def multiply(self, source: View, *linears: Linear | Stack, to: Sequence[View] = ()) -> list[View]:
        """What linear layers, or each expert's, make of the same rows, each in a register of its own, or `to`
        these places."""
        places = [*to] or [self.register(linear.outputs) for linear in linears]
        for place, linear in zip(places, linears, strict=True):
            own, order = source, linear.order if isinstance(linear, Linear) else None
            if order is not None:
                own = self.add("copy", source, self.register(len(order)), weights=order, inputs=len(order))
            self.add("products", own, place, weights=linear)
        return places


class _LayerMaker(Maker):
    def __init__(self, parts: Parts, spec: LayerSpec, how: Arithmetic, place: Place) -> None:
        super().__init__(how)
        assert spec.dense is not None, "there is a step for everything"
        self._place = place
        self._parts: Mapping[str, Any] = parts
        self._spec, self.dense = spec, spec.dense

    def make(self) -> Program:
        dense = self.dense
        norm = self._parts[dense.norm_before_attention or dense.norm_after_attention or dense.norm_before_mlp]
        hidden = self.add("load", to=self.register(len(norm.weights)))
        rows = self._normed(hidden, dense.norm_before_attention)
        if dense.is_residual_normed:
            self.add("copy", rows, hidden)
        if dense.embedding_norm:
            rows = self._joined(rows, dense.embedding_norm)
        if isinstance(dense.mixer, Convolution):
            found = self._convolution(rows)
        elif dense.mixer is not None:
            found = self._delta_rule(dense.mixer, rows)
        else:
            found = self._attention(rows)
        self._added(hidden, found, dense.norm_after_attention)
        self.add("forget", hidden)
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
        own = {"source": self._place.source, "window": self._spec.window or None}
        return self.program(mixture=dense.mixture, mixer=dense.mixer, **own)

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
            self.add("copy", part, to)
        return both

    def _narrow(self, *views: View) -> None:
        for each in views if self.how.dtype != "float32" else ():
            self.add("narrow", each, each)

    def _multiplied(self, source: View, *names: str) -> list[View]:
        """By linear layers of these names."""
        return self.multiply(source, *(self._parts[name] for name in names))

    # -------------------------------------------------------------------------- attention, and in its place

    def _attention(self, rows: View) -> View:
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
            if self._place.is_source:
                self._narrow(*dict.fromkeys(new))
            if (going := self._place.going) is not None:
                self.carry(keys, going)
                self.carry(values, going + keys.width)
            self.add("store", keys, other=values, inputs=width, kv_heads=spec.kv.count)
        if queries.width != self._widths[queries.register]:  # they are read as they lie
            queries = self.add("copy", queries, self.register(queries.width))
        attended = self.register(queries.width)
        shape: dict[str, Any] = {"inputs": width, "heads": spec.heads, "kv_heads": spec.kv.count}
        sinks = self._parts["self_attn.sinks"] if dense.has_sinks else None
        self.add("attend", queries, attended, bias=sinks, factor=dense.scale, cap=dense.cap, **shape)
        if gates is not None:
            attended = self.gate("sigmoid", gates, attended)
        return self._multiplied(attended, "self_attn.o_proj")[0]

    def _convolution(self, rows: View) -> View:
        (joined,) = self._multiplied(rows, "conv.in_proj")
        width = joined.width // 3
        first, middle, last = joined.split(width, width, width)
        inputs = self.add("multiply", first, self.register(width), other=last)
        self.add("hold", inputs)
        own = {"weights": self._parts["conv.taps"], "bias": self._parts.get("conv.bias")}
        mixed = self.add("convolve", inputs, self.register(width), **own)
        found = self.add("multiply", middle, self.register(width), other=mixed)
        return self._multiplied(found, "conv.out_proj")[0]

    def _delta_rule(self, mixer: DeltaRule, rows: View) -> View:
        names = ("in_proj_qkv", "in_proj_b", "in_proj_a", "in_proj_z")
        linears = [self._parts[f"linear_attn.{name}"] for name in names]
        *widths, width = (linear.outputs for linear in linears)
        inputs, gates = self.register(sum(widths)), self.register(width)
        self.multiply(rows, *linears, to=[*inputs.split(*widths), gates])
        self.add("hold", inputs)
        taps, rates = (self._parts[f"linear_attn.{name}"] for name in ("taps", "rates"))
        read = self.add("sum_up", to=self.register(mixer.value_numbers), weights=taps, scales=rates)
        gated = self.gate("silu", gates, self.norm(read, self._parts["linear_attn.norm"], "weights"))
        return self._multiplied(gated, "linear_attn.out_proj")[0]

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
        looked_up = self.add("look_up", to=self.register(projected.width), weights=table.matrix)
        self.add("add", looked_up, projected, factor=table.factor)
        self.add("scale", projected, projected, factor=2.0**-0.5)
        (gates,) = self._multiplied(hidden, "per_layer_input_gate")
        gated = self.gate(self.dense.activation, gates, projected)
        (found,) = self._multiplied(gated, "per_layer_projection")
        self.add("add", self._normed(found, "post_per_layer_input_norm"), hidden, factor=1.0)

    def _mixture(self, mixture: Mixture, name: str, of: View, rows: View) -> View:
        """Rows choose experts by what they are `of`, are sorted by them, run through each expert's MLP, and
        are added up."""
        router: RouterPart = self._parts[f"{name}router"]
        if router.norm is not None:
            of = self.norm(of, router.norm, "weights")
            self.add("scale", of, of, factor=router.factor)
        self.add("route", of, weights=router)
        self._spread = mixture.chosen
        sorted_rows = self.add("gather", rows, self.register(rows.width))
        (joined,) = self._multiplied(sorted_rows, f"{name}experts.gate_up_proj")
        gates, values = joined.split(joined.width // 2, joined.width // 2)
        gated = self.gate(self.dense.activation, gates, values, cap=mixture.limit, factor=mixture.slope)
        (found,) = self._multiplied(gated, f"{name}experts.down_proj")
        self._spread = 1
        mixed = self.add("mix", found, self.register(rows.width))
        if mixture.has_shared:
            shared = self._mlp(f"{name}shared_expert" + "s" * (not mixture.is_shared_gated), rows)
            if mixture.is_shared_gated:
                (gate,) = self._multiplied(rows, f"{name}shared_expert_gate")
                self.add("scale", shared, shared, other=gate, how="sigmoid")
            self.add("add", shared, mixed, factor=1.0)
        return mixed
