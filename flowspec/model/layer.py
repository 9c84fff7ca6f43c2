"""What a layer is: the parts by which it is computed, of which parameters in files they are made, and the
steps by which they compute. C runs steps in one call on a CPU (`cpu.py`), torch one by one on a GPU
(`gpu.py`).

Arrays are numpy's on a CPU, where bfloat16 is held as uint16, and an engine's own elsewhere. Rows stay in
registers, each a float32 matrix `[rows, width]`; what comes to a layer and leaves it is in the dtype in which
hidden states travel.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import numpy as np

from flowspec.core.protocol.model_spec import Convolution, DeltaRule, Dense, LayerSpec, Mixture, Norm
from flowspec.model.arithmetic import plain
from flowspec.model.arithmetic.arrays import Array, Memory, contiguous, namespace
from flowspec.model.arithmetic.packed import FORMS
from flowspec.model.families import Family

Role = Literal["matrix", "experts", "table", "vector", "number"]
"""The matrix of a linear layer or those of experts, which may be packed; a table, which is only as files have
it; or numbers in float32, of which a `number` is a single one."""
RowsFunction = Callable[[Array], Array]  # from rows `[rows, inputs]` to `[rows, outputs]`
MATRICES = ("matrix", "experts", "table")  # those that are held in the precision
LAYER_INPUT = "layer_input"  # what makes a layer's own input (Gemma 4)


@dataclass(frozen=True, slots=True)
class Parameter:
    shape: tuple[int, ...]
    role: Role = "vector"


# ------------------------------------------------------------------------------------------------ parts


@dataclass(frozen=True, slots=True, eq=False)
class Plain:
    """A matrix as it is, `[outputs, inputs]`."""

    weights: Array

    @property
    def outputs(self) -> int:
        return len(self.weights)


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A matrix, or a table, in panels of a form."""

    form: str
    panels: Array
    outputs: int

    @property
    def inputs(self) -> int:
        return int(self.panels.shape[1]) * FORMS[self.form].unit


Matrix = Any  # one of these, or an engine's own, which has `outputs` and `__slots__`


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Linear:
    """A layer's matrices, one below another; `order`: which of its inputs each of theirs is, int64. Rows that
    a packed matrix multiplies are rounded finely where it `is_fine`."""

    inputs: int
    matrices: tuple[Matrix, ...]
    bias: Array | None = None
    order: Array | None = None
    is_fine: bool = False

    @property
    def outputs(self) -> int:
        return sum(matrix.outputs for matrix in self.matrices)


Experts = tuple[Linear, ...]  # alike; their biases are one after another in memory


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NormPart:
    """`weights` are ones where the norm `has_weights` not."""

    weights: Array
    eps: float
    has_weights: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RouterPart:
    """By what rows choose experts, in float32: `weights` `[experts, hidden]`, the `correction` added in
    choosing, and `scales` of chosen shares. Rows may go through a `norm` first, and a `factor`."""

    weights: Array
    bias: Array | None = None
    correction: Array | None = None
    norm: NormPart | None = None
    factor: float = 1.0
    scales: Array | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """Of rows, one for each token: `Plain` or `Packed`; `factor`: what a row is multiplied by."""

    matrix: Matrix
    factor: float = 1.0


Part = Linear | Experts | NormPart | RouterPart | Table | Array | float
Parts = Mapping[str, Part]
"""Of a layer, by the names of most families. Beside what files have, `{mixer}.taps` are a convolution's
weights `[length, width]`, and `linear_attn.rates` how fast each head's state fades, then what is added to its
rate. But for matrices all is float32."""


# --------------------------------------------------------------------------------------------- shapes


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a part: what it is, and its parameters by the ends of their names. `width`: the inputs of matrices,
    or the numbers of a row that it takes or has."""

    kind: Literal["linear", "stack", "norm", "router", "table", "wide", "rates", "number"]
    parameters: Mapping[str, Parameter]
    width: int = 0
    is_fine: bool = False

    def part(self, values: Mapping[str, Any], eps: float, memory: Memory) -> Part:
        """From values by the ends of names: arrays; of packed ones a tuple of matrices, of experts one for
        each. `eps` is of norms."""
        given = values.get(".weight", values.get(""))
        match self.kind:
            case "linear":
                bias, order, is_fine = values.get(".bias"), values.get(".order"), self.is_fine
                return Linear(inputs=self.width, matrices=given, bias=bias, order=order, is_fine=is_fine)
            case "stack":
                biases = values.get("_bias", (None,) * len(given))
                both = zip(given, biases, strict=True)
                return tuple(Linear(inputs=self.width, matrices=each, bias=bias) for each, bias in both)
            case "norm":
                weights = memory.array(np.ones(self.width, np.float32)) if given is None else given
                return NormPart(weights=weights, eps=eps, has_weights=given is not None)
            case "router":
                norm = NormPart(weights=values[".scale"], eps=eps) if ".scale" in values else None
                own = {"norm": norm, "factor": self.width**-0.5, "scales": values.get(".per_expert_scale")}
                own |= {"bias": values.get(".bias"), "correction": values.get(".e_score_correction_bias")}
                return RouterPart(weights=values.get(".proj.weight", given), **own)
            case "table":
                matrix = given[0] if isinstance(given, tuple) else Plain(given)
                return Table(matrix=matrix, factor=self.width**0.5)
            case "wide":
                return contiguous(given if given.ndim == 1 else given[:, 0].T)
            case "rates":
                fast = -values[".A"] if ".A" in values else plain.exp(values[".A_log"])
                return namespace(fast).concatenate([fast, values[".dt_bias"]])
            case "number":
                return float(given.item())


def linear_shape(outputs: int, inputs: int, has_bias: bool = False, is_fine: bool = False) -> Shape:
    bias = {".bias": Parameter((outputs,))} if has_bias else {}
    return Shape("linear", {".weight": Parameter((outputs, inputs), "matrix"), **bias}, inputs, is_fine)


def norm_shape(width: int, has_weight: bool = True) -> Shape:
    return Shape("norm", {".weight": Parameter((width,))} if has_weight else {}, width)


def table_shape(rows: int, width: int) -> Shape:
    return Shape("table", {".weight": Parameter((rows, width), "table")}, width)


def router_shape(mixture: Mixture, hidden: int) -> Shape:
    of_experts = Parameter((mixture.experts,))
    found = {".proj.weight" if mixture.is_parallel else ".weight": Parameter((mixture.experts, hidden))}
    if mixture.is_parallel:
        found |= {".scale": Parameter((hidden,)), ".per_expert_scale": of_experts}
    if mixture.has_biases:
        found[".bias"] = of_experts
    if mixture.router == "sigmoid":
        found[".e_score_correction_bias"] = of_experts
    return Shape("router", found, hidden)


# -------------------------------------------------------------------------------------------- steps


class View(NamedTuple):
    """Numbers `[at, at + width)` of each row of a register."""

    register: int
    at: int
    width: int

    def split(self, *widths: int) -> list[View]:
        """So many numbers each, one after another."""
        starts = itertools.accumulate(widths, initial=self.at)
        return [View(self.register, at, width) for at, width in zip(starts, widths, strict=False)]


NOWHERE = View(-1, 0, 0)  # what a step does without
_NO_PART = SimpleNamespace(weights=None, eps=0.0, norm=None, matrix=None, factor=1.0)


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
    heads: int = 1
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


_ALONE = Place()


class Program:
    """Steps on registers, of which `widths` says how many numbers each has for a row. A layer's attends to
    keys and values of a `source`, through a `window` if any. Hidden states travel in a `dtype`."""

    def __init__(self, dtype: str, norm: Norm) -> None:
        self.dtype, self._norm = dtype, norm
        self.steps: list[Step] = []
        self.widths: list[int] = []
        self.mixture: Mixture | None = None
        self.mixer: Convolution | DeltaRule | None = None
        self.source = 0
        self.window: int | None = None
        self._spread = 1

    def register(self, width: int) -> View:
        """Of so many numbers for a row, or for a row of each expert that it chose."""
        self.widths.append(self._spread * width)
        return View(len(self.widths) - 1, 0, width)

    def add(self, name: str, source: View = NOWHERE, to: View = NOWHERE, **more: Any) -> View:
        """A step; gives where it writes `to`."""
        self.steps.append(Step(name, source, to, spread=self._spread, **more))
        return to

    def carry(self, source: View, at: int = 0, dtype: str = "") -> None:
        """To what goes on of rows, from a number on."""
        self.add("carry", source, View(0, at, source.width), how=dtype or self.dtype)

    def norm(self, source: View, norm: NormPart, width: int = 0, how: Norm | None = None) -> View:
        """Of heads so wide, or of whole rows."""
        width, to = width or source.width, self.register(source.width)
        own = {"weights": norm.weights, "eps": norm.eps, "how": how or self._norm, "factor": 1 / width}
        return self.add("norm", source, to, inputs=width, heads=source.width // width, **own)

    def gate(self, name: str, gates: View, values: View, **more: Any) -> View:
        """A function of `gates` times `values`."""
        return self.add("gate", gates, self.register(gates.width), other=values, how=name, **more)

    def multiply(self, source: View, part: Linear | Experts, to: View) -> View:
        """What a linear layer, or each expert's, makes of rows."""
        if (order := getattr(part, "order", None)) is not None:
            source = self.add("copy", source, self.register(len(order)), weights=order, inputs=len(order))
        return self.add("products", source, to, weights=part)


def rows_program(
    dtype: str, how: Norm, norm: NormPart | None, linear: Linear | None, are_logits: bool = False
) -> Program:
    """Of rows `[rows, inputs]` it makes rows `[rows, outputs]` that go on: by a norm, a linear layer, or
    both. Of logits, `are_logits`, rows are float32, and those that they are made of finely rounded."""
    made, given = Program(dtype, how), linear or norm
    assert given is not None, "there is something to do"
    width = given.inputs if isinstance(given, Linear) else len(given.weights)
    found = made.add("load", to=made.register(width))
    if norm is not None:
        found = made.norm(found, norm)
    if linear is not None:
        linear = replace(linear, is_fine=linear.is_fine or are_logits)
        found = made.multiply(found, linear, made.register(linear.outputs))
    made.carry(found, dtype="float32" if are_logits else dtype)
    return made


class Layer(Program):
    """What a layer is: its steps, and its parts, `places` by the names of most families: what files of its
    family call them, and their shapes."""

    def __init__(
        self,
        *,
        spec: LayerSpec,
        hidden: int,
        family: Family | None = None,
        dtype: str = "float32",
        norm: Norm = "weights",
        place: Place = _ALONE,
        parts: Parts | None = None,
        is_own: bool = True,
        has_fading: bool = False,
        table_rows: int = 0,
    ) -> None:
        """Its rows are `hidden` wide. `is_own`: it has keys and values of its own. `has_fading`: files have
        -e^A_log. Without `parts` there are only their shapes."""
        super().__init__(dtype, norm)
        assert spec.dense is not None, "there is a step for everything"
        self.places: dict[str, tuple[str, Shape]] = {}
        self._names = {} if family is None else family.layer_names
        self._spec, self._dense, self._hidden, self._place = spec, spec.dense, hidden, place
        self._parts, self._is_own = parts, is_own
        self._has_fading, self._table_rows = has_fading, table_rows
        self.mixture, self.mixer = spec.dense.mixture, spec.dense.mixer
        self.source, self.window = place.source, spec.window or None
        self._make(spec.dense)

    def parameters(self) -> dict[str, Parameter]:
        """By their names in files."""
        return {
            stem + end: parameter
            for stem, shape in self.places.values()
            for end, parameter in shape.parameters.items()
        }

    def parts(self, values: Mapping[str, Any], eps: float, memory: Memory) -> dict[str, Part]:
        """From values by the names of parameters; `{linear layer}.order` may be there, too."""
        found: dict[str, Part] = {}
        for name, (stem, shape) in self.places.items():
            own = {end: values[stem + end] for end in shape.parameters}
            found[name] = shape.part({**own, ".order": values.get(f"{stem}.order")}, eps, memory)
        return found

    def _make(self, dense: Dense) -> None:
        if dense.has_entry:  # what is done before the layer, by none of its steps
            shapes = {f"entry.{name}": norm_shape(self._hidden) for name in ("embedding", "feature")}
            shapes["entry.projection"] = linear_shape(self._hidden, 2 * self._hidden)
            self.places |= {name: (self._names.get(name, name), shape) for name, shape in shapes.items()}
        hidden = self.add("load", to=self.register(self._hidden))
        rows = self._normed(hidden, dense.norm_before_attention)
        if dense.is_residual_normed:
            self.add("copy", rows, hidden)
        if dense.embedding_norm:
            rows = self._joined(rows, dense.embedding_norm)
        if isinstance(dense.mixer, Convolution):
            found = self._convolution(dense.mixer, rows)
        elif dense.mixer is not None:
            found = self._delta_rule(dense.mixer, rows)
        else:
            found = self._attention(rows)
        self._added(hidden, found, dense.norm_after_attention)
        self.add("forget", hidden)
        rows = self._normed(hidden, dense.norm_before_mlp)
        if dense.mixture is None:
            found = self._mlp("mlp", rows, dense.neurons)
        elif dense.mixture.is_parallel:
            found = self._normed(self._mlp("mlp", rows, dense.neurons), "post_feedforward_layernorm_1")
            rows = self._normed(hidden, "pre_feedforward_layernorm_2")
            mixed = self._mixture(dense.mixture, "", hidden, rows)
            mixed = self._normed(mixed, "post_feedforward_layernorm_2")
            self.add("add", mixed, found, factor=1.0)
        else:
            found = self._mixture(dense.mixture, "mlp.", rows, rows)
        self._added(hidden, found, dense.norm_after_mlp)
        if dense.input_width:
            self._input(hidden, dense.input_width)
        number = {"": Parameter((1,), "number")}
        if dense.has_factor and (factor := self._part("layer_scalar", Shape("number", number))) != 1:
            self.add("scale", hidden, hidden, factor=factor)
        self.add("leave", hidden)

    def _part(self, name: str, shape: Shape, stem: str = "") -> Any:
        stem = stem or name
        self.places[name] = self._names.get(stem, stem), shape
        return _NO_PART if self._parts is None else self._parts[name]

    def _normed(self, source: View, name: str, width: int = 0, how: Norm | None = None) -> View:
        """After the norm of this name, if there is one, of heads so wide, or of whole rows."""
        if not name:
            return source
        return self.norm(source, self._part(name, norm_shape(width or source.width)), width, how)

    def _linear(
        self, source: View, name: str, outputs: int, *, is_fine: bool = False, to: View = NOWHERE
    ) -> View:
        shape = linear_shape(outputs, source.width, name in self._dense.biases, is_fine)
        return self.multiply(source, self._part(name, shape), to if to.width else self.register(outputs))

    def _added(self, hidden: View, source: View, name: str) -> None:
        """What attention or an MLP found, in the kind in which it could travel, after a norm of this name."""
        self._narrow(source)
        self.add("add", self._normed(source, name), hidden, factor=self._dense.added_scale)

    def _joined(self, rows: View, name: str) -> View:
        """A token's embedding after this norm, then `rows`."""
        embedding = self.add("load_embedding", to=self.register(rows.width))
        both = self.register(2 * rows.width)
        parts = self._normed(embedding, name), rows
        for part, to in zip(parts, both.split(rows.width, rows.width), strict=True):
            self.add("copy", part, to)
        return both

    def _narrow(self, *views: View) -> None:
        for each in views if self.dtype != "float32" else ():
            self.add("narrow", each, each)

    # -------------------------------------------------------------------------- attention, and in its place

    def _attention(self, rows: View) -> View:
        spec, dense, width = self._spec, self._dense, self._spec.kv.width
        queries, keys = spec.heads * width, spec.kv.count * width
        if dense.is_joined:
            joined = self._linear(rows, "self_attn.qkv_proj", queries + 2 * keys, is_fine=True)
            found = joined.split(queries, keys, keys)
        else:
            found = [self._linear(rows, "self_attn.q_proj", queries * (1 + dense.is_gated))]
            names = "kv"[: self._is_own * (1 + dense.has_values)]
            for name in names:  # the last makes values
                found.append(self._linear(rows, f"self_attn.{name}_proj", keys, is_fine=name == names[-1]))
            found += found[1:] * (len(found) == 2)  # keys are values, too
        gates = None
        if dense.is_gated:
            both, found[0], gates = found[0], self.register(queries), self.register(queries)
            for of, to in zip(both.split(width, width), (found[0], gates), strict=True):
                self.add("copy", of, to, outputs=2 * width, heads=spec.heads)
        sizes = {"": (), "head": (width, width), "width": (queries, keys)}[dense.query_norm]
        for place, (name, size) in enumerate(zip("qk"[: len(found)], sizes, strict=False)):
            found[place] = self._normed(found[place], f"self_attn.{name}_norm", size)
        if dense.has_value_norm and len(found) == 3:
            norm = self._part("self_attn.v_norm", norm_shape(width, has_weight=False))
            found[2] = self.norm(found[2], norm, width)
        for each in found if dense.clip else ():
            self.add("clip", each, each, cap=dense.clip)
        for place, count in enumerate((spec.heads, spec.kv.count)[: len(found)] if dense.is_turned else ()):
            to = self.register(count * width)
            found[place] = self.add("turn", found[place], to, inputs=width, heads=count)
        asked, *new = found
        if new:
            own_keys, values = new
            if self._place.is_source:
                self._narrow(*dict.fromkeys(new))
            if (going := self._place.going) is not None:
                self.carry(own_keys, going)
                self.carry(values, going + keys)
            self.add("store", own_keys, other=values, inputs=width, kv_heads=spec.kv.count)
        if queries != self.widths[asked.register]:  # they are read as they lie
            asked = self.add("copy", asked, self.register(queries))
        shape: dict[str, Any] = {"inputs": width, "heads": spec.heads, "kv_heads": spec.kv.count}
        if dense.has_sinks:
            shape["bias"] = self._part("self_attn.sinks", _vector(spec.heads))
        attended = self.register(queries)
        self.add("attend", asked, attended, factor=dense.scale, cap=dense.cap, **shape)
        if gates is not None:
            attended = self.gate("sigmoid", gates, attended)
        return self._linear(attended, "self_attn.o_proj", self._hidden)

    def _convolution(self, mixer: Convolution, rows: View) -> View:
        width = self._hidden
        joined = self._linear(rows, "conv.in_proj", 3 * width, is_fine=True)
        first, middle, last = joined.split(width, width, width)
        inputs = self.add("multiply", first, self.register(width), other=last)
        self.add("hold", inputs)
        weights = {"weights": self._part("conv.taps", _taps(width, mixer.length), "conv.conv")}
        if "conv" in self._dense.biases:
            weights["bias"] = self._part("conv.bias", _vector(width), "conv.conv.bias")
        mixed = self.add("convolve", inputs, self.register(width), outputs=mixer.length, **weights)
        found = self.add("multiply", middle, self.register(width), other=mixed)
        return self._linear(found, "conv.out_proj", width)

    def _delta_rule(self, mixer: DeltaRule, rows: View) -> View:
        own, heads, values = "linear_attn.", mixer.heads, mixer.value_numbers
        widths = 2 * mixer.key_numbers + values, heads, heads
        inputs = self.register(sum(widths))
        for name, to in zip(("qkv", "b", "a"), inputs.split(*widths), strict=True):
            self._linear(rows, f"{own}in_proj_{name}", to.width, is_fine=name == "qkv", to=to)
        gates = self._linear(rows, f"{own}in_proj_z", values)
        self.add("hold", inputs)
        taps = self._part(f"{own}taps", _taps(widths[0], mixer.length), f"{own}conv1d")
        each = Parameter((heads,))
        rates = Shape("rates", {".A" if self._has_fading else ".A_log": each, ".dt_bias": each})
        rates = self._part(f"{own}rates", rates, "linear_attn")
        read = self.add("sum_up", to=self.register(values), weights=taps, scales=rates)
        read = self._normed(read, f"{own}norm", mixer.value_width, "weights")
        return self._linear(self.gate("silu", gates, read), f"{own}out_proj", self._hidden)

    # ------------------------------------------------------------------------------------- MLPs, experts

    def _mlp(self, name: str, rows: View, neurons: int) -> View:
        if self._dense.is_joined:
            joined = self._linear(rows, f"{name}.gate_up_proj", 2 * neurons)
            gates, values = joined.split(neurons, neurons)
        else:
            gates, values = (self._linear(rows, f"{name}.{each}_proj", neurons) for each in ("gate", "up"))
        gated = self.gate(self._dense.activation, gates, values)
        return self._linear(gated, f"{name}.down_proj", self._hidden)

    def _input(self, hidden: View, width: int) -> None:
        """What a layer takes of a token beside its hidden state: of a table, and of the token's embedding."""
        table = self._part(f"{LAYER_INPUT}.table", table_shape(self._table_rows, width))
        embedding = self.add("load_embedding", to=self.register(hidden.width))
        projected = self._linear(embedding, f"{LAYER_INPUT}.projection", width)
        self.add("scale", projected, projected, factor=hidden.width**-0.5)
        projected = self._normed(projected, f"{LAYER_INPUT}.norm")
        looked_up = self.add("look_up", to=self.register(width), weights=table.matrix)
        self.add("add", looked_up, projected, factor=table.factor)
        self.add("scale", projected, projected, factor=2.0**-0.5)
        gates = self._linear(hidden, "per_layer_input_gate", width)
        gated = self.gate(self._dense.activation, gates, projected)
        found = self._linear(gated, "per_layer_projection", self._hidden)
        self.add("add", self._normed(found, "post_per_layer_input_norm"), hidden, factor=1.0)

    def _mixture(self, mixture: Mixture, name: str, of: View, rows: View) -> View:
        """Rows choose experts by what they are `of`, are sorted by them, run through MLPs, and added up."""
        neurons, shape = mixture.neurons, router_shape(mixture, self._hidden)
        stem = "" if mixture.is_parallel else "mlp.router" if mixture.has_biases else "mlp.gate"
        router = self._part(f"{name}router", shape, stem)
        if router.norm is not None:
            of = self.norm(of, router.norm, how="weights")
            self.add("scale", of, of, factor=router.factor)
        self.add("route", of, weights=router)
        self._spread = mixture.chosen
        rows_of = self.add("gather", rows, self.register(rows.width))
        joined = self._experts(mixture, rows_of, f"{name}experts.gate_up_proj", 2 * neurons)
        gates, values = joined.split(neurons, neurons)
        gated = self.gate(self._dense.activation, gates, values, cap=mixture.limit, factor=mixture.slope)
        found = self._experts(mixture, gated, f"{name}experts.down_proj", self._hidden)
        self._spread = 1
        mixed = self.add("mix", found, self.register(rows.width))
        if mixture.has_shared:
            own = f"{name}shared_expert" + "s" * (not mixture.is_shared_gated)
            shared = self._mlp(own, rows, mixture.shared_neurons)
            if mixture.is_shared_gated:
                gate = self._linear(rows, f"{name}shared_expert_gate", 1)
                self.add("scale", shared, shared, other=gate, how="sigmoid")
            self.add("add", shared, mixed, factor=1.0)
        return mixed

    def _experts(self, mixture: Mixture, source: View, name: str, outputs: int) -> View:
        own = {"": Parameter((mixture.experts, outputs, source.width), "experts")}
        if mixture.has_biases:
            own["_bias"] = Parameter((mixture.experts, outputs))
        part = self._part(name, Shape("stack", own, source.width))
        return self.multiply(source, part, self.register(outputs))


def _vector(count: int) -> Shape:
    return Shape("wide", {"": Parameter((count,))})


def _taps(width: int, length: int) -> Shape:
    """Of a convolution, whose weights become `[length, width]`."""
    return Shape("wide", {".weight": Parameter((width, 1, length))})


def program_of(parts: Parts, spec: LayerSpec, dtype: str, norm: Norm, place: Place) -> Program:
    """Of a layer."""
    dense: Any = spec.dense
    first: Any = parts[dense.norm_before_attention or dense.norm_after_attention or dense.norm_before_mlp]
    is_own = not {"self_attn.k_proj", "self_attn.qkv_proj"}.isdisjoint(parts)
    own: dict[str, Any] = {"dtype": dtype, "norm": norm, "place": place, "parts": parts}
    return Layer(spec=spec, hidden=len(first.weights), is_own=is_own, **own)
