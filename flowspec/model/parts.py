"""What a layer is made of: by its `LayerSpec` the shapes of its parameters and what files call them, and with
their values the parts by which it is computed.

Arrays are numpy's on a CPU, where bfloat16 is held as uint16, and an engine's own elsewhere (`engine.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from flowspec.core.protocol.model_spec import Convolution, DeltaRule, LayerSpec, Mixture
from flowspec.model.arithmetic import plain
from flowspec.model.arithmetic.arrays import Array, Memory, contiguous, namespace
from flowspec.model.arithmetic.packed import FORMS
from flowspec.model.families import Family

Role = Literal["matrix", "experts", "table", "vector", "number"]
"""The matrix of a linear layer or those of experts, which may be packed; a table, which is only as files have
it; or numbers in float32, of which a `number` is a single one."""
RowsFunction = Callable[[Array], Array]
"""From rows `[rows, inputs]` to `[rows, outputs]`."""
MATRICES = ("matrix", "experts", "table")
"""Those that are held in the precision."""
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stack:
    """Linear layers of experts, which are alike; their biases `[experts, outputs]`."""

    linears: tuple[Linear, ...]
    bias: Array | None = None

    @property
    def outputs(self) -> int:
        return self.linears[0].outputs


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


Part = Linear | Stack | NormPart | RouterPart | Table | Array | float
Parts = Mapping[str, Part]
"""Of a layer, by the names of most families. Beside what files have, `{mixer}.taps` are a convolution's
weights `[length, width]`, and `linear_attn.rates` how fast each head's state fades, then what is added to its
rate. But for matrices all is float32."""


# --------------------------------------------------------------------------------------------- shapes


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a part: what it is, and its parameters by the ends of their names. `width`: the inputs of matrices,
    or the numbers of a row that it takes or has."""

    kind: Literal["linear", "stack", "norm", "router", "normed router", "table", "wide", "rates", "number"]
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
                linears = tuple(Linear(inputs=self.width, matrices=each) for each in given)
                return Stack(linears=linears, bias=values.get("_bias"))
            case "norm":
                weights = memory.array(np.ones(self.width, np.float32)) if given is None else given
                return NormPart(weights=weights, eps=eps, has_weights=given is not None)
            case "router":
                bias, correction = values.get(".bias"), values.get(".e_score_correction_bias")
                return RouterPart(weights=given, bias=bias, correction=correction)
            case "normed router":
                weights, scales = values[".proj.weight"], values[".per_expert_scale"]
                norm, factor = NormPart(weights=values[".scale"], eps=eps), self.width**-0.5
                return RouterPart(weights=weights, norm=norm, factor=factor, scales=scales)
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


def _router_shape(mixture: Mixture, hidden: int) -> Shape:
    weights, of_experts = Parameter((mixture.experts, hidden)), (mixture.experts,)
    if mixture.is_parallel:
        scales = {".scale": Parameter((hidden,)), ".per_expert_scale": Parameter(of_experts)}
        return Shape("normed router", {".proj.weight": weights, **scales}, hidden)
    found = {".weight": weights}
    if mixture.has_biases:
        found[".bias"] = Parameter(of_experts)
    if mixture.router == "sigmoid":
        found[".e_score_correction_bias"] = Parameter(of_experts)
    return Shape("router", found, hidden)


def _vector_shape(count: int) -> Shape:
    return Shape("wide", {"": Parameter((count,))})


def _taps_shape(width: int, length: int) -> Shape:
    """Of a convolution, whose weights become `[length, width]`."""
    return Shape("wide", {".weight": Parameter((width, 1, length))})


class LayerShape:
    """The parts of a layer, its `places`, by the names of most families: what files call them, and shapes."""

    def __init__(
        self,
        *,
        spec: LayerSpec,
        family: Family,
        hidden: int,
        is_own: bool = True,
        has_fading: bool = False,
        table_rows: int = 0,
    ) -> None:
        """Its rows are `hidden` wide. `is_own`: it has keys and values of its own. `has_fading`: files have
        -e^A_log."""
        assert spec.dense is not None, "there is an operation for everything"
        self._spec, self._dense, self._hidden = spec, spec.dense, hidden
        mixture, self._family = spec.dense.mixture, family
        self.places: dict[str, tuple[str, Shape]] = {}
        self._add_norms()
        if isinstance(spec.dense.mixer, Convolution):
            self._add_convolution(spec.dense.mixer)
        elif spec.dense.mixer is not None:
            self._add_delta_rule(spec.dense.mixer, has_fading)
        else:
            self._add_attention(is_own, hidden * (2 if spec.dense.embedding_norm else 1))
        if mixture is None or mixture.is_parallel:
            self._add_mlp("mlp", spec.dense.neurons)
        if mixture is not None:
            self._add_mixture(mixture)
        if spec.dense.input_width:
            self._add_input(spec.dense.input_width, table_rows)
        if spec.dense.has_entry:
            self._add_linear("entry.projection", hidden, 2 * hidden)
        if spec.dense.has_factor:
            self._add("layer_scalar", Shape("number", {"": Parameter((1,), "number")}))

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

    def _add(self, name: str, shape: Shape, stem: str = "") -> None:
        """`stem`: what files of most families call it, if otherwise."""
        stem = stem or name
        self.places[name] = self._family.layer_names.get(stem, stem), shape

    def _add_linear(self, name: str, outputs: int, inputs: int, is_fine: bool = False) -> None:
        self._add(name, linear_shape(outputs, inputs, name in self._dense.biases, is_fine))

    def _add_norms(self) -> None:
        """Those as wide as rows."""
        dense = self._dense
        names = [dense.norm_before_attention, dense.norm_after_attention]
        names += [dense.norm_before_mlp, dense.norm_after_mlp, dense.embedding_norm]
        names += ["entry.embedding", "entry.feature"] * dense.has_entry
        names += ["post_per_layer_input_norm"] * bool(dense.input_width)
        if dense.mixture is not None and dense.mixture.is_parallel:
            names += ["post_feedforward_layernorm_1", "pre_feedforward_layernorm_2"]
            names += ["post_feedforward_layernorm_2"]
        for name in filter(None, names):
            self._add(name, norm_shape(self._hidden))

    def _add_attention(self, is_own: bool, read: int) -> None:
        spec, dense, width = self._spec, self._dense, self._spec.kv.width
        queries, keys = spec.heads * width, spec.kv.count * width
        if dense.is_joined:
            self._add_linear("self_attn.qkv_proj", queries + 2 * keys, read, is_fine=True)
        else:
            self._add_linear("self_attn.q_proj", queries * (1 + dense.is_gated), read)
            names = "kv"[: is_own * (1 + dense.has_values)]
            for name in names:  # the last makes values
                self._add_linear(f"self_attn.{name}_proj", keys, read, is_fine=name == names[-1])
        self._add_linear("self_attn.o_proj", self._hidden, queries)
        if dense.query_norm:
            sizes = (width, width) if dense.query_norm == "head" else (queries, keys)
            for name, size in zip("qk"[: 1 + is_own], sizes, strict=False):
                self._add(f"self_attn.{name}_norm", norm_shape(size))
        if dense.has_value_norm:
            self._add("self_attn.v_norm", norm_shape(width, has_weight=False))
        if dense.has_sinks:
            self._add("self_attn.sinks", _vector_shape(spec.heads))

    def _add_convolution(self, mixer: Convolution) -> None:
        width = self._hidden
        self._add_linear("conv.in_proj", 3 * width, width, is_fine=True)
        self._add_linear("conv.out_proj", width, width)
        self._add("conv.taps", _taps_shape(width, mixer.length), "conv.conv")
        if "conv" in self._dense.biases:
            self._add("conv.bias", _vector_shape(width), "conv.conv.bias")

    def _add_delta_rule(self, mixer: DeltaRule, has_fading: bool) -> None:
        values, heads = mixer.value_numbers, mixer.heads
        mixed = 2 * mixer.key_numbers + values
        for name, size in {"qkv": mixed, "z": values, "b": heads, "a": heads}.items():
            self._add_linear(f"linear_attn.in_proj_{name}", size, self._hidden, is_fine=name == "qkv")
        self._add_linear("linear_attn.out_proj", self._hidden, values)
        self._add("linear_attn.norm", norm_shape(mixer.value_width))
        self._add("linear_attn.taps", _taps_shape(mixed, mixer.length), "linear_attn.conv1d")
        wide = Parameter((heads,))
        fading = {".A": Parameter((heads,))} if has_fading else {".A_log": wide}
        self._add("linear_attn.rates", Shape("rates", {**fading, ".dt_bias": wide}), "linear_attn")

    def _add_mlp(self, name: str, neurons: int) -> None:
        sizes = {"gate_up": 2 * neurons} if self._dense.is_joined else {"gate": neurons, "up": neurons}
        for kind, size in sizes.items():
            self._add_linear(f"{name}.{kind}_proj", size, self._hidden)
        self._add_linear(f"{name}.down_proj", self._hidden, neurons)

    def _add_mixture(self, mixture: Mixture) -> None:
        own, hidden, neurons = "" if mixture.is_parallel else "mlp.", self._hidden, mixture.neurons
        stem = "mlp.router" if mixture.has_biases else "mlp.gate"
        self._add(f"{own}router", _router_shape(mixture, hidden), "" if mixture.is_parallel else stem)
        for name, outputs, inputs in (("gate_up_proj", 2 * neurons, hidden), ("down_proj", hidden, neurons)):
            stack = {"": Parameter((mixture.experts, outputs, inputs), "experts")}
            if mixture.has_biases:
                stack["_bias"] = Parameter((mixture.experts, outputs))
            self._add(f"{own}experts.{name}", Shape("stack", stack, inputs))
        if mixture.has_shared:
            name = "mlp.shared_expert" + "s" * (not mixture.is_shared_gated)
            self._add_mlp(name, mixture.shared_neurons)
        if mixture.is_shared_gated:
            self._add_linear("mlp.shared_expert_gate", 1, hidden)

    def _add_input(self, width: int, table_rows: int) -> None:
        self._add_linear("per_layer_input_gate", width, self._hidden)
        self._add_linear("per_layer_projection", self._hidden, width)
        self._add(f"{LAYER_INPUT}.table", table_shape(table_rows, width))
        self._add_linear(f"{LAYER_INPUT}.projection", width, self._hidden)
        self._add(f"{LAYER_INPUT}.norm", norm_shape(width))
