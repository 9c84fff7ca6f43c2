"""What a layer is made of: by its `LayerSpec` the shapes of its parameters and what files call them, and with
their values the parts by which it is computed.

Arrays are numpy's on a CPU, where bfloat16 is held as uint16, and an engine's own elsewhere (`engine.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from flowspec.core.protocol.model_spec import Convolution, DeltaRule, Dense, LayerSpec, Mixture
from flowspec.model.arithmetic import plain
from flowspec.model.arithmetic.arrays import Array, contiguous, namespace
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


@dataclass(frozen=True, slots=True, eq=False)
class Digits:
    """A matrix of int8 in panels (`packed.int8_panels`), with a scale for each output that these have."""

    panels: Array
    scales: Array
    outputs: int


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A matrix, or a table, in panels of a form."""

    form: str
    panels: Array
    outputs: int

    @property
    def inputs(self) -> int:
        return int(self.panels.shape[1]) * FORMS[self.form].unit


Matrix = Any
"""One of these, or an engine's own, which has `outputs` and `__slots__`."""


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
    """An engine's."""

    def cast(self, x: npt.NDArray[Any]) -> Array:
        """On the device, in the dtype of rows."""

    def wide(self, x: Array) -> Array:
        """In float32."""


def rounded(value: float, arrays: Arrays) -> float:
    """To the dtype of rows."""
    return float(arrays.wide(arrays.cast(np.array([value], np.float32))).item())


Values = Mapping[str, Any]
"""Of a part's parameters, by the ends of their names: arrays; of packed ones a tuple of matrices, of experts
one for each."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a part: its parameters by the ends of their names, and what makes it of their values, with the
    constant of norms."""

    parameters: Mapping[str, Parameter]
    part: Callable[[Values, float, Arrays], Part]


def linear_shape(outputs: int, inputs: int, has_bias: bool = False) -> Shape:
    def part(values: Values, eps: float, arrays: Arrays) -> Part:
        bias, order = values.get(".bias"), values.get(".order")
        return Linear(inputs=inputs, matrices=values[".weight"], bias=bias, order=order)

    bias = {".bias": Parameter((outputs,))} if has_bias else {}
    return Shape({".weight": Parameter((outputs, inputs), "matrix"), **bias}, part)


def norm_shape(width: int, has_weight: bool = True) -> Shape:
    def part(values: Values, eps: float, arrays: Arrays) -> Part:
        weights = values[".weight"] if has_weight else arrays.cast(np.ones(width, np.float32))
        return NormPart(weights=weights, eps=eps, has_weights=has_weight)

    return Shape({".weight": Parameter((width,))} if has_weight else {}, part)


def table_shape(rows: int, width: int) -> Shape:
    def part(values: Values, eps: float, arrays: Arrays) -> Part:
        given = values[".weight"]
        matrix = given[0] if isinstance(given, tuple) else Plain(given)
        return Table(matrix=matrix, factor=rounded(width**0.5, arrays))

    return Shape({".weight": Parameter((rows, width), "table")}, part)


def _stack_shape(experts: int, outputs: int, inputs: int, has_biases: bool) -> Shape:
    def part(values: Values, eps: float, arrays: Arrays) -> Part:
        linears = tuple(Linear(inputs=inputs, matrices=each) for each in values[""])
        return Stack(linears=linears, bias=values.get("_bias"))

    biases = {"_bias": Parameter((experts, outputs))} if has_biases else {}
    return Shape({"": Parameter((experts, outputs, inputs), "experts"), **biases}, part)


def _router_shape(mixture: Mixture, hidden: int) -> Shape:
    weights, experts = Parameter((mixture.experts, hidden)), (mixture.experts,)

    def part(values: Values, eps: float, arrays: Arrays) -> Part:
        bias, correction = values.get(".bias"), values.get(".e_score_correction_bias")
        return RouterPart(weights=values[".weight"], bias=bias, correction=correction)

    def parallel_part(values: Values, eps: float, arrays: Arrays) -> Part:
        return RouterPart(
            weights=values[".proj.weight"],
            norm=NormPart(weights=values[".scale"], eps=eps),
            factor=hidden**-0.5,
            scales=contiguous(arrays.wide(values[".per_expert_scale"])),
        )

    if mixture.is_parallel:
        scales = {".scale": Parameter((hidden,)), ".per_expert_scale": Parameter(experts, "widened")}
        return Shape({".proj.weight": weights, **scales}, parallel_part)
    more = {".bias": Parameter(experts)} if mixture.has_biases else {}
    if mixture.router == "sigmoid":
        more[".e_score_correction_bias"] = Parameter(experts, "exact")
    return Shape({".weight": weights, **more}, part)


def _vector_shape(count: int) -> Shape:
    return Shape(
        {"": Parameter((count,), "widened")}, lambda values, eps, arrays: contiguous(arrays.wide(values[""]))
    )


def _taps_shape(width: int, length: int) -> Shape:
    """A convolution's weights."""
    return Shape(
        {".weight": Parameter((width, 1, length), "widened")},
        lambda values, eps, arrays: contiguous(arrays.wide(values[".weight"])[:, 0].T),
    )


def _rates_shape(heads: int, has_fading: bool) -> Shape:
    """`has_fading`: files have -e^A_log."""

    def part(values: Values, eps: float, arrays: Arrays) -> Part:
        fast = -values[".A"] if has_fading else plain.exp(arrays.wide(values[".A_log"]))
        return namespace(fast).concatenate([fast, arrays.wide(values[".dt_bias"])])

    fading = (
        {".A": Parameter((heads,), "exact")} if has_fading else {".A_log": Parameter((heads,), "widened")}
    )
    return Shape({**fading, ".dt_bias": Parameter((heads,), "widened")}, part)


_STEMS = {
    "conv.taps": "conv.conv",
    "conv.bias": "conv.conv.bias",
    "linear_attn.taps": "linear_attn.conv1d",
    "linear_attn.rates": "linear_attn",
}
"""What files call parts whose names are ours."""


class Place(NamedTuple):
    """A part, by what files call it."""

    stem: str
    shape: Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """The parts of a layer by the names of most families. Its rows are `hidden` wide, and attention reads
    `read` numbers of them, or as many. `is_own`: it has keys and values of its own. `has_fading`: files have
    -e^A_log."""

    spec: LayerSpec
    family: Family
    hidden: int
    is_own: bool = True
    has_fading: bool = False
    table_rows: int = 0
    read: int = 0
    places: dict[str, Place] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        stems, names = dict(_STEMS), self.family.layer_names
        mixture = None if self.spec.dense is None else self.spec.dense.mixture
        if mixture is not None and not mixture.has_biases:
            stems["mlp.router"] = "mlp.gate"
        found = dict[str, Place]()
        for name, shape in self._shapes():
            stem = stems.get(name, name)
            found[name] = Place(names.get(stem, stem), shape)
        object.__setattr__(self, "places", found)

    def parameters(self) -> dict[str, Parameter]:
        """By their names in files."""
        return {
            place.stem + end: parameter
            for place in self.places.values()
            for end, parameter in place.shape.parameters.items()
        }

    def parts(self, values: Mapping[str, Any], eps: float, arrays: Arrays) -> dict[str, Part]:
        """From values by the names of parameters; `{linear layer}.order` may be there, too."""
        found: dict[str, Part] = {}
        for name, (stem, shape) in self.places.items():
            own = {end: values[stem + end] for end in shape.parameters}
            found[name] = shape.part({**own, ".order": values.get(f"{stem}.order")}, eps, arrays)
        return found

    def _shapes(self) -> Iterator[tuple[str, Shape]]:
        """Of each part, by its name."""
        dense, hidden = self.spec.dense, self.hidden
        assert dense is not None, "there is an operation for everything"
        norms = (
            *(dense.norm_before_attention, dense.norm_after_attention),
            *(dense.norm_before_mlp, dense.norm_after_mlp, dense.embedding_norm),
        )
        for name in filter(None, norms):
            yield name, norm_shape(hidden)
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
            yield "entry.embedding", norm_shape(hidden)
            yield "entry.feature", norm_shape(hidden)
            yield self._linear("entry.projection", hidden, 2 * hidden)
        if dense.has_factor:
            factor = {"": Parameter((1,), "number")}
            yield "layer_scalar", Shape(factor, lambda values, eps, arrays: float(values[""].item()))

    def _linear(self, name: str, outputs: int, inputs: int) -> tuple[str, Shape]:
        dense = self.spec.dense
        assert dense is not None
        return name, linear_shape(outputs, inputs, name in dense.biases)

    def _attention(self, dense: Dense) -> Iterator[tuple[str, Shape]]:
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
                yield own + name, norm_shape(size)
        if dense.has_value_norm:
            yield f"{own}v_norm", norm_shape(width, has_weight=False)
        if dense.has_sinks:
            yield f"{own}sinks", _vector_shape(spec.heads)

    def _convolution(self, dense: Dense, mixer: Convolution) -> Iterator[tuple[str, Shape]]:
        width = self.hidden
        yield self._linear("conv.in_proj", 3 * width, width)
        yield self._linear("conv.out_proj", width, width)
        yield "conv.taps", _taps_shape(width, mixer.length)
        if "conv" in dense.biases:
            yield "conv.bias", _vector_shape(width)

    def _delta_rule(self, mixer: DeltaRule) -> Iterator[tuple[str, Shape]]:
        own, values = "linear_attn.", mixer.value_numbers
        mixed = 2 * mixer.key_numbers + values
        sizes = {"qkv": mixed, "z": values, "b": mixer.heads, "a": mixer.heads}
        for name, size in sizes.items():
            yield self._linear(f"{own}in_proj_{name}", size, self.hidden)
        yield self._linear(f"{own}out_proj", self.hidden, values)
        yield f"{own}norm", norm_shape(mixer.value_width)
        yield f"{own}taps", _taps_shape(mixed, mixer.length)
        yield f"{own}rates", _rates_shape(mixer.heads, self.has_fading)

    def _mlp(self, dense: Dense, name: str, neurons: int) -> Iterator[tuple[str, Shape]]:
        if dense.is_joined:
            yield self._linear(f"{name}.gate_up_proj", 2 * neurons, self.hidden)
        else:
            yield self._linear(f"{name}.gate_proj", neurons, self.hidden)
            yield self._linear(f"{name}.up_proj", neurons, self.hidden)
        yield self._linear(f"{name}.down_proj", self.hidden, neurons)

    def _mixture(self, dense: Dense, mixture: Mixture) -> Iterator[tuple[str, Shape]]:
        own, hidden, neurons = "" if mixture.is_parallel else "mlp.", self.hidden, mixture.neurons
        yield f"{own}router", _router_shape(mixture, hidden)
        for name, sizes in (("gate_up_proj", (2 * neurons, hidden)), ("down_proj", (hidden, neurons))):
            yield f"{own}experts.{name}", _stack_shape(mixture.experts, *sizes, mixture.has_biases)
        if mixture.has_shared:
            name = "mlp.shared_expert" + "s" * (not mixture.is_shared_gated)
            yield from self._mlp(dense, name, mixture.shared_neurons)
        if mixture.is_shared_gated:
            yield self._linear("mlp.shared_expert_gate", 1, hidden)
        if mixture.is_parallel:
            for place in ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2"):
                yield place, norm_shape(hidden)
            yield "post_feedforward_layernorm_2", norm_shape(hidden)

    def _input(self, width: int) -> Iterator[tuple[str, Shape]]:
        yield self._linear("per_layer_input_gate", width, self.hidden)
        yield self._linear("per_layer_projection", self.hidden, width)
        yield "post_per_layer_input_norm", norm_shape(self.hidden)
        yield f"{LAYER_INPUT}.table", table_shape(self.table_rows, width)
        yield self._linear(f"{LAYER_INPUT}.projection", width, self.hidden)
        yield f"{LAYER_INPUT}.norm", norm_shape(width)
