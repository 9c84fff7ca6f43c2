"""What a layer is made of: by its `LayerSpec` the shapes of its parameters and what files call them, and with
their values the parts by which it is computed.

Arrays are numpy's on a CPU, where bfloat16 is held as uint16, and an engine's own elsewhere (`engine.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from flowspec.core.protocol.model_spec import Convolution, DeltaRule, Dense, LayerSpec, Mixture
from flowspec.model.arithmetic.arrays import Array
from flowspec.model.arithmetic.packed import FORMS
from flowspec.model.families import Family

Role = Literal["matrix", "experts", "table", "vector", "widened", "exact", "number"]
"""What a parameter is: the matrix of a linear layer or those of experts, which may be packed; a table, which
is only as files have it; or numbers, rounded to the precision's activations, and then `widened` to float32;
those that are `exact` are not rounded, and a `number` is a single one of them."""
RowsFunction = Callable[[Array], Array]
"""From rows `[rows, inputs]` to `[rows, outputs]`."""
LAYER_INPUT = "layer_input"
"""What makes a layer's own input (Gemma 4)."""


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

    @property
    def arrays(self) -> tuple[Array, ...]:
        return (self.weights,)


@dataclass(frozen=True, slots=True, eq=False)
class Digits:
    """A matrix of int8 in panels (`packed.int8_panels`), with a scale for each output that these have."""

    panels: Array
    scales: Array
    outputs: int

    @property
    def arrays(self) -> tuple[Array, ...]:
        return self.panels, self.scales


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A matrix, or a table, in panels of a form."""

    form: str
    panels: Array
    outputs: int

    @property
    def inputs(self) -> int:
        return int(self.panels.shape[1]) * FORMS[self.form].unit

    @property
    def arrays(self) -> tuple[Array, ...]:
        return (self.panels,)


Matrix = Any
"""One of these, or an engine's own, which has `outputs` and `arrays`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Linear:
    """A layer's matrices, one below another; `order`: which of its inputs each of theirs is, int64."""

    inputs: int
    matrices: tuple[Matrix, ...]
    bias: Array | None = None
    order: Array | None = None

    @property
    def outputs(self) -> int:
        return sum(matrix.outputs for matrix in self.matrices)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stack:
    """Linear layers of experts, which are alike; their biases `[experts, outputs]`."""

    linears: tuple[Linear, ...]
    bias: Array | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NormPart:
    """`weights` are ones where the norm `has_weights` not."""

    weights: Array
    eps: float
    has_weights: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RouterPart:
    """By what rows choose experts: `weights` `[experts, hidden]`. `correction`: what is added in choosing,
    float32. Rows may go through a `norm` first, and a `factor`; chosen shares be multiplied by `scales`,
    float32."""

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


Part = Linear | Stack | NormPart | RouterPart | Table | Array | float
Parts = Mapping[str, Part]
"""Of a layer, by the names of most families. Beside what files have, `{mixer}.taps` are a convolution's
weights `[length, width]`, float32, and `linear_attn.rates` how fast each head's state fades, then what is
added to its rate, float32."""


# --------------------------------------------------------------------------------------------- shapes


class Arrays(Protocol):
    """What makes parts of values, where these are."""

    def ones(self, count: int) -> Array:
        """In the dtype of rows."""

    def float32(self, x: Array) -> Array: ...
    def rounded(self, value: float) -> float:
        """To the dtype of rows."""

    def taps(self, weight: Array) -> Array:
        """`[length, width]` float32 of a convolution's `[width, 1, length]`."""

    def rates(self, fading: Array, is_logarithm: bool, added: Array) -> Array:
        """`linear_attn.rates`, from A_log or from -e^A_log."""

    def number(self, x: Array) -> float: ...


Values = Mapping[str, Any]
"""Of a part's parameters, by the ends of their names: arrays; of packed ones a tuple of matrices, of experts
one for each."""


class Shape(Protocol):
    """Of a part."""

    def parameters(self) -> Mapping[str, Parameter]:
        """By the ends of their names."""

    def part(self, values: Values, eps: float, arrays: Arrays) -> Part: ...


@dataclass(frozen=True, slots=True)
class LinearShape:
    outputs: int
    inputs: int
    has_bias: bool = False

    def parameters(self) -> Mapping[str, Parameter]:
        bias = {".bias": Parameter((self.outputs,))} if self.has_bias else {}
        return {".weight": Parameter((self.outputs, self.inputs), "matrix"), **bias}

    def part(self, values: Values, eps: float, arrays: Arrays) -> Part:
        order = values.get(".order")
        return Linear(inputs=self.inputs, matrices=values[".weight"], bias=values.get(".bias"), order=order)


@dataclass(frozen=True, slots=True)
class NormShape:
    width: int
    has_weight: bool = True

    def parameters(self) -> Mapping[str, Parameter]:
        return {".weight": Parameter((self.width,))} if self.has_weight else {}

    def part(self, values: Values, eps: float, arrays: Arrays) -> Part:
        weights = values[".weight"] if self.has_weight else arrays.ones(self.width)
        return NormPart(weights=weights, eps=eps, has_weights=self.has_weight)


@dataclass(frozen=True, slots=True)
class StackShape:
    experts: int
    outputs: int
    inputs: int
    has_biases: bool

    def parameters(self) -> Mapping[str, Parameter]:
        biases = {"_bias": Parameter((self.experts, self.outputs))} if self.has_biases else {}
        return {"": Parameter((self.experts, self.outputs, self.inputs), "experts"), **biases}

    def part(self, values: Values, eps: float, arrays: Arrays) -> Part:
        linears = tuple(Linear(inputs=self.inputs, matrices=each) for each in values[""])
        return Stack(linears=linears, bias=values.get("_bias"))


@dataclass(frozen=True, slots=True)
class RouterShape:
    mixture: Mixture
    hidden: int

    def parameters(self) -> Mapping[str, Parameter]:
        experts = (self.mixture.experts,)
        weights = Parameter((*experts, self.hidden))
        if self.mixture.is_parallel:
            scales = {".scale": Parameter((self.hidden,)), ".per_expert_scale": Parameter(experts, "widened")}
            return {".proj.weight": weights, **scales}
        more = {".bias": Parameter(experts)} if self.mixture.has_biases else {}
        if self.mixture.router == "sigmoid":
            more[".e_score_correction_bias"] = Parameter(experts, "exact")
        return {".weight": weights, **more}

    def part(self, values: Values, eps: float, arrays: Arrays) -> Part:
        if not self.mixture.is_parallel:
            bias, correction = values.get(".bias"), values.get(".e_score_correction_bias")
            return RouterPart(weights=values[".weight"], bias=bias, correction=correction)
        return RouterPart(
            weights=values[".proj.weight"],
            norm=NormPart(weights=values[".scale"], eps=eps),
            factor=self.hidden**-0.5,
            scales=arrays.float32(values[".per_expert_scale"]),
        )


@dataclass(frozen=True, slots=True)
class TableShape:
    rows: int
    width: int

    def parameters(self) -> Mapping[str, Parameter]:
        return {".weight": Parameter((self.rows, self.width), "table")}

    def part(self, values: Values, eps: float, arrays: Arrays) -> Part:
        given = values[".weight"]
        matrix = given[0] if isinstance(given, tuple) else Plain(given)
        return Table(matrix=matrix, factor=arrays.rounded(self.width**0.5))


@dataclass(frozen=True, slots=True)
class VectorShape:
    """Numbers that become float32, or of a single one a float."""

    parameter: Parameter

    def parameters(self) -> Mapping[str, Parameter]:
        return {"": self.parameter}

    def part(self, values: Values, eps: float, arrays: Arrays) -> Part:
        is_one = self.parameter.role == "number"
        return arrays.number(values[""]) if is_one else arrays.float32(values[""])


@dataclass(frozen=True, slots=True)
class TapsShape:
    """A convolution's weights."""

    width: int
    length: int

    def parameters(self) -> Mapping[str, Parameter]:
        return {".weight": Parameter((self.width, 1, self.length), "widened")}

    def part(self, values: Values, eps: float, arrays: Arrays) -> Part:
        return arrays.taps(values[".weight"])


@dataclass(frozen=True, slots=True)
class RatesShape:
    heads: int
    has_fading: bool
    """Whether files have -e^A_log."""

    def parameters(self) -> Mapping[str, Parameter]:
        numbers = (self.heads,)
        role: Role = "exact" if self.has_fading else "widened"
        fading = {".A" if self.has_fading else ".A_log": Parameter(numbers, role)}
        return {**fading, ".dt_bias": Parameter(numbers, "widened")}

    def part(self, values: Values, eps: float, arrays: Arrays) -> Part:
        stored = values[".A" if self.has_fading else ".A_log"]
        return arrays.rates(stored, not self.has_fading, values[".dt_bias"])


@dataclass(frozen=True, slots=True)
class Place:
    """A part, by what files call it."""

    stem: str
    shape: Shape

    def parameters(self) -> Iterator[tuple[str, str, Parameter]]:
        """The end of each name, the name, and what is meant."""
        for end, parameter in self.shape.parameters().items():
            yield end, self.stem + end, parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """The parts of a layer by the names of most families. Its rows are `hidden` wide, and attention reads
    `read` numbers of them, or as many. `is_own`: it has keys and values of its own. `has_fading` as
    `RatesShape`."""

    spec: LayerSpec
    family: Family
    hidden: int
    is_own: bool = True
    has_fading: bool = False
    table_rows: int = 0
    read: int = 0
    places: dict[str, Place] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        names, found = self.family.layer_names, dict[str, Place]()
        for name, stem, shape in self._find():
            found[name] = Place(names.get(stem, stem), shape)
        object.__setattr__(self, "places", found)

    def parameters(self) -> dict[str, Parameter]:
        """By their names in files."""
        found: dict[str, Parameter] = {}
        for place in self.places.values():
            found |= {name: parameter for _, name, parameter in place.parameters()}
        return found

    def parts(self, values: Mapping[str, Any], eps: float, arrays: Arrays) -> dict[str, Part]:
        """From values by the names of parameters; `{linear layer}.order` may be there, too."""
        found: dict[str, Part] = {}
        for name, place in self.places.items():
            own = {end: values[full] for end, full, _ in place.parameters()}
            if (order := values.get(f"{place.stem}.order")) is not None:
                own[".order"] = order
            found[name] = place.shape.part(own, eps, arrays)
        return found

    def _find(self) -> Iterator[tuple[str, str, Shape]]:
        """Each part's name, what most files call it, and its shape."""
        dense, hidden = self.spec.dense, self.hidden
        assert dense is not None, "there is an operation for everything"
        norms = (
            *(dense.norm_before_attention, dense.norm_after_attention),
            *(dense.norm_before_mlp, dense.norm_after_mlp, dense.embedding_norm),
        )
        for name in filter(None, norms):
            yield name, name, NormShape(hidden)
        if isinstance(dense.mixer, Convolution):
            yield from self._convolution(dense, dense.mixer)
        elif dense.mixer is not None:
            yield from self._delta_rule(dense.mixer)
        else:
            yield from self._attention(dense)
        if dense.mixture is None or dense.mixture.is_parallel:
            yield from self._mlp(dense, "mlp", dense.neurons)
        if dense.mixture is not None:
            yield from self._mixture(dense, dense.mixture)
        if dense.input_width:
            yield from self._input(dense.input_width)
        if dense.has_entry:
            yield "entry.embedding", "entry.embedding", NormShape(hidden)
            yield "entry.feature", "entry.feature", NormShape(hidden)
            yield self._linear("entry.projection", hidden, 2 * hidden)
        if dense.has_factor:
            yield "layer_scalar", "layer_scalar", VectorShape(Parameter((1,), "number"))

    def _linear(self, name: str, outputs: int, inputs: int) -> tuple[str, str, Shape]:
        dense = self.spec.dense
        assert dense is not None
        return name, name, LinearShape(outputs, inputs, name in dense.biases)

    def _attention(self, dense: Dense) -> Iterator[tuple[str, str, Shape]]:
        spec, own, read = self.spec, "self_attn.", self.read or self.hidden
        width, queries, keys = spec.kv.width, spec.heads * spec.kv.width, spec.kv.count * spec.kv.width
        if dense.is_joined:
            yield self._linear(f"{own}qkv_proj", queries + 2 * keys, read)
        else:
            yield self._linear(f"{own}q_proj", queries * (1 + dense.is_gated), read)
            if self.is_own:
                yield self._linear(f"{own}k_proj", keys, read)
            if self.is_own and dense.has_values:
                yield self._linear(f"{own}v_proj", keys, read)
        yield self._linear(f"{own}o_proj", self.hidden, queries)
        if dense.query_norm:
            sizes = (width, width) if dense.query_norm == "head" else (queries, keys)
            for name, size in zip(("q_norm", "k_norm")[: 1 + self.is_own], sizes, strict=False):
                yield own + name, own + name, NormShape(size)
        if dense.has_value_norm:
            yield f"{own}v_norm", f"{own}v_norm", NormShape(width, has_weight=False)
        if dense.has_sinks:
            yield f"{own}sinks", f"{own}sinks", VectorShape(Parameter((spec.heads,), "widened"))

    def _convolution(self, dense: Dense, mixer: Convolution) -> Iterator[tuple[str, str, Shape]]:
        width = self.hidden
        yield self._linear("conv.in_proj", 3 * width, width)
        yield self._linear("conv.out_proj", width, width)
        yield "conv.taps", "conv.conv", TapsShape(width, mixer.length)
        if "conv" in dense.biases:
            yield "conv.bias", "conv.conv.bias", VectorShape(Parameter((width,), "widened"))

    def _delta_rule(self, mixer: DeltaRule) -> Iterator[tuple[str, str, Shape]]:
        own, values = "linear_attn.", mixer.value_numbers
        mixed = 2 * mixer.key_numbers + values
        sizes = {"qkv": mixed, "z": values, "b": mixer.heads, "a": mixer.heads}
        for name, size in sizes.items():
            yield self._linear(f"{own}in_proj_{name}", size, self.hidden)
        yield self._linear(f"{own}out_proj", self.hidden, values)
        yield f"{own}norm", f"{own}norm", NormShape(mixer.value_width)
        yield f"{own}taps", f"{own}conv1d", TapsShape(mixed, mixer.length)
        yield f"{own}rates", own.rstrip("."), RatesShape(mixer.heads, self.has_fading)

    def _mlp(self, dense: Dense, name: str, neurons: int) -> Iterator[tuple[str, str, Shape]]:
        if dense.is_joined:
            yield self._linear(f"{name}.gate_up_proj", 2 * neurons, self.hidden)
        else:
            yield self._linear(f"{name}.gate_proj", neurons, self.hidden)
            yield self._linear(f"{name}.up_proj", neurons, self.hidden)
        yield self._linear(f"{name}.down_proj", self.hidden, neurons)

    def _mixture(self, dense: Dense, mixture: Mixture) -> Iterator[tuple[str, str, Shape]]:
        own, hidden, neurons = "" if mixture.is_parallel else "mlp.", self.hidden, mixture.neurons
        is_gate = not mixture.is_parallel and not mixture.has_biases
        yield f"{own}router", f"{own}gate" if is_gate else f"{own}router", RouterShape(mixture, hidden)
        for name, sizes in (("gate_up_proj", (2 * neurons, hidden)), ("down_proj", (hidden, neurons))):
            stem = f"{own}experts.{name}"
            yield stem, stem, StackShape(mixture.experts, *sizes, mixture.has_biases)
        if mixture.has_shared:
            name = "mlp.shared_expert" + "s" * (not mixture.is_shared_gated)
            yield from self._mlp(dense, name, mixture.shared_neurons)
        if mixture.is_shared_gated:
            yield self._linear("mlp.shared_expert_gate", 1, hidden)
        if mixture.is_parallel:
            for place in ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2"):
                yield place, place, NormShape(hidden)
            yield "post_feedforward_layernorm_2", "post_feedforward_layernorm_2", NormShape(hidden)

    def _input(self, width: int) -> Iterator[tuple[str, str, Shape]]:
        yield self._linear("per_layer_input_gate", width, self.hidden)
        yield self._linear("per_layer_projection", self.hidden, width)
        yield "post_per_layer_input_norm", "post_per_layer_input_norm", NormShape(self.hidden)
        table = f"{LAYER_INPUT}.table"
        yield table, table, TableShape(self.table_rows, width)
        yield self._linear(f"{LAYER_INPUT}.projection", width, self.hidden)
        yield f"{LAYER_INPUT}.norm", f"{LAYER_INPUT}.norm", NormShape(width)
