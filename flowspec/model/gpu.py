"""The engine of a GPU: torch computes a model's parts, layers as `plain.layer` defines them, with torch's
products and, where there are such, kernels of our own (`arithmetic/compiled_cuda.py`).

torch's libraries choose a kernel by the number of rows at every size (seen on an H200, where a float32 row
alone has other bits than among 16), so products are always of one number of rows, or of integers. int8: a row
is written as two digits of seven bits (`rounding.py`), and digits are rows of one product of integers, whose
order changes no bit. int4: torch's tinygemm kernel in bfloat16, on GPUs of compute capability 8.0 and newer
(from the Orins on), else in float32, as what files pack.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from flowspec.core.protocol.model_spec import DeltaRule, LayerSpec, Norm, Rotary
from flowspec.core.protocol.precision import ACTIVATIONS, is_packed
from flowspec.errors import InputError, first_line
from flowspec.model.accelerator import accelerator_of
from flowspec.model.arithmetic import compiled_cuda, plain
from flowspec.model.arithmetic.arrays import I64, Array
from flowspec.model.arithmetic.compiled_cuda import POSITIONS_MAX, WIDTH_MAX
from flowspec.model.arithmetic.packed import FORMS, GROUP, PANEL, Q4_0, numbers_of, packed
from flowspec.model.arithmetic.plain import DIGIT, TINY
from flowspec.model.attention import BASE, NEAR, Angles, Held, TreeBatch, TreeCache, TreeRows
from flowspec.model.engine import Engine
from flowspec.model.linear_attention import walk_of, walk_past
from flowspec.model.parts import (
    LAYER_INPUT,
    Linear,
    Matrix,
    NormPart,
    Packed,
    Parts,
    Plain,
    RouterPart,
    RowsFunction,
    Stack,
    Table,
)
from flowspec.model.rounding import Rounded, spread
from flowspec.model.trials import DIGITS

log = logging.getLogger("flowspec.kernels")

Tensor = torch.Tensor
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BLOCKS = {torch.float32: 32, torch.bfloat16: 64, torch.float16: 64}
"""Rows that a GPU multiplies at once, no more and no fewer. So many take hardly longer than one, by the
published speeds of Orins and of server GPUs: reading the weights takes as long."""
WIDENED = 1024
"""Outputs whose weights are widened at once."""
INTEGER_BLOCK, INTEGER_ROWS_MIN = 8, 32
"""`torch._int_mm` takes inputs and outputs in multiples of so many on GPUs, and more than 16 rows."""
INT4_OUTPUTS, INT4_TILES, INT4_CAPABILITY = 8, 2, (8, 0)
"""tinygemm takes outputs in blocks of so many, and inputs in so many tiles of 16: in groups of 32."""
_SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def tensor_of(x: npt.NDArray[Any]) -> Tensor:
    """A copy; bfloat16 is uint16 in numpy."""
    if x.dtype == np.uint16:
        return torch.tensor(x.view(np.int16)).view(torch.bfloat16)
    return torch.tensor(x)


def array_of(x: Tensor) -> npt.NDArray[Any]:
    """As `tensor_of`, backwards."""
    here = x.detach().cpu().contiguous()
    is_bfloat16 = here.dtype == torch.bfloat16
    bits: npt.NDArray[Any] = (here.view(torch.int16) if is_bfloat16 else here).numpy()
    return bits.view(np.uint16) if is_bfloat16 else bits


def arithmetics_of(dtype: str, device: str) -> tuple[str, ...]:
    """Those of a precision, the best first: bits of torch belong to its version and to what the GPU can
    do. Raises `InputError` where there is none."""
    if is_packed(dtype) and not device.startswith("cuda"):
        raise InputError(f"{dtype} runs on CPUs and CUDA, not on {device}; use --dtype bfloat16")
    if dtype == "int8":
        return (DIGITS,)
    capability = accelerator_of(device).capability
    name = "torch-in-blocks"
    if is_packed(dtype):
        name = "tinygemm" if dtype == "int4" and capability >= INT4_CAPABILITY else "plain"
    version = ".".join(torch.__version__.split("+")[0].split(".")[:2])
    major, minor = capability
    return (f"{name}-{_SHORT.get(dtype, dtype)}@sm{major}{minor}-torch{version}",)


def allow_library(device: str) -> compiled_cuda.CudaLibrary:
    """Builds `canonical.cu` for a GPU, and has this process use it there. Raises `OSError` where it cannot be
    built."""
    there = torch.device(device)
    module = compiled_cuda.CudaModule(there, accelerator_of(device).capability)
    library = compiled_cuda.CudaLibrary(module)
    compiled_cuda.allow(there, library)
    return library


# ---------------------------------------------------------------------------------------- operations


def _library(x: Tensor, width: int = 0) -> compiled_cuda.CudaLibrary | None:
    """What computes where a tensor is, for sums in halves of `width` numbers; None: the definitions do."""
    return compiled_cuda.library(x.device) if x.is_cuda and width <= WIDTH_MAX else None


class Operations:
    """Of rows, by the names that `plain` has for them: by kernels of our own where there are such."""

    @staticmethod
    def function(x: Tensor, name: str) -> Tensor:
        library = _library(x)
        return plain.function(x, name) if library is None else library.function(x.contiguous(), name)

    @staticmethod
    def gated(gate: Tensor, up: Tensor, name: str) -> Array:
        library = _library(gate)
        if library is None:
            return plain.gated(gate, up, name)
        return library.function(gate.contiguous(), name, up.contiguous())

    @staticmethod
    def turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Array:
        library = _library(x)
        turn = plain.turned if library is None or x.stride(3) != 1 else library.turned
        return turn(x, cosine, sine)

    @staticmethod
    def softmax(x: Tensor) -> Array:
        library = _library(x, x.shape[-1])
        return plain.softmax(x) if library is None else library.shares(x.contiguous(), are_powers=True)

    @staticmethod
    def over_their_sum(x: Tensor) -> Array:
        library = _library(x, x.shape[-1])
        if library is None:
            return plain.over_their_sum(x)
        return library.shares(x.contiguous(), are_powers=False)


def normed(x: Tensor, part: NormPart, how: Norm) -> Array:
    kernels: Any = _library(x, x.shape[-1]) or plain
    return kernels.norm(x.contiguous(), part.weights, part.eps, how)


def product(x: Tensor, weights: Tensor) -> Array:
    """`plain.product`."""
    library = _library(x, x.shape[-1])
    if library is None:
        return plain.product(x, weights)
    return library.halves(x.contiguous(), weights.contiguous())


def store(slots: Tensor, keys: Tensor, values: Tensor, to: Held) -> None:
    """Keys and values `[kv_heads, rows, width]` (`plain.store`)."""
    library, (to_keys, to_values, steps) = _library(keys), to
    lie_apart = keys.stride(2) != 1 or values.stride(2) != 1
    if library is not None and not lie_apart and steps is None:
        library.store(slots, keys, values, to_keys, to_values)
    else:
        plain.store(slots, keys, values, to_keys, to_values, steps)


def attention(
    queries: Tensor, held: Held, paths: Tensor, scale: float, cap: float | None, sinks: Tensor | None
) -> Array:
    """`[rows, heads, width]` from queries of that shape (`plain.attention`)."""
    library, (keys, values, steps) = _library(queries), held
    sinks = None if sinks is None else sinks.contiguous()
    if library is not None and steps is None and paths.shape[1] <= POSITIONS_MAX:
        return library.attention(queries.contiguous(), keys, values, paths, scale, cap, sinks)
    if steps is not None:
        keys, values = plain.of_levels(keys, steps[0], 2), plain.of_levels(values, steps[1], 2)
    values = values[..., : queries.shape[2]]
    return plain.attention(queries.float(), keys, values, paths, scale, cap, sinks).to(queries.dtype)


# ------------------------------------------------------------------------------------------ products


def in_blocks(x: Tensor, weights: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x W^T + b` by torch, for always the same number of rows."""
    count, size = len(x), BLOCKS[x.dtype]
    if count <= size:  # in fewer calls
        return F.linear(F.pad(x, (0, 0, 0, size - count)), weights, bias)[:count]
    parts = torch.split(F.pad(x, (0, 0, 0, -count % size)), size)
    return torch.cat([F.linear(part, weights, bias) for part in parts])[:count]


class _Int8:
    """Levels, filled up, and a scale for each output."""

    __slots__ = ("_inputs", "_levels", "_scales", "outputs")

    def __init__(self, levels: Tensor, scales: Tensor) -> None:
        self.outputs, self._inputs = levels.shape
        self._levels = F.pad(levels, (0, -self._inputs % INTEGER_BLOCK, 0, -self.outputs % INTEGER_BLOCK))
        self._scales = scales

    def multiply(self, given: Tensor) -> Tensor:
        rows = given.float()
        count = len(rows)
        peak = rows.abs().amax(dim=1, keepdim=True).clamp_min_(TINY)
        scaled = rows * (DIGIT / peak)
        digits = rows.new_empty((2 * count, self._inputs))
        first = torch.round(scaled, out=digits[:count])
        torch.round(scaled.sub_(first).mul_(2 * DIGIT), out=digits[count:])
        sums = self._products(digits)
        found = sums[count:].mul_(1 / (2 * DIGIT)).add_(sums[:count]).mul_(peak / DIGIT)
        return found.to(given.dtype)

    def _products(self, digits: Tensor) -> Tensor:
        rows = -(-max(len(digits), INTEGER_ROWS_MIN) // INTEGER_BLOCK) * INTEGER_BLOCK
        padded = digits.new_zeros((rows, self._levels.shape[1]), dtype=torch.int8)
        padded[: len(digits), : self._inputs] = digits
        sums: Tensor = torch._int_mm(padded, self._levels.t())  # [rows, out] int32
        return sums[: len(digits), : self.outputs].float().mul_(self._scales)


class _Int4:
    """As tinygemm has them."""

    __slots__ = ("_inputs", "_packed", "_scales", "outputs")

    def __init__(self, levels: Tensor, scales: Tensor, inputs: int) -> None:
        self.outputs, self._inputs = len(levels), inputs
        more = (0, 0, 0, -self.outputs % INT4_OUTPUTS)
        pairs = F.pad(levels, more)
        swapped = pairs << 4 | pairs >> 4  # this kernel wants the first of two inputs in the high bits
        self._packed = torch._convert_weight_to_int4pack(swapped, INT4_TILES)
        of_groups = F.pad(scales, more).bfloat16()  # which has all their digits
        both = torch.stack([of_groups, torch.zeros_like(of_groups)], dim=2)
        self._scales = both.transpose(0, 1).contiguous()  # [groups, out, 2]

    def multiply(self, rows: Tensor) -> Tensor:
        filled = F.pad(rows.bfloat16(), (0, -self._inputs % GROUP))
        found: Tensor = torch._weight_int4pack_mm(filled, self._packed, GROUP, self._scales)
        return found[:, : self.outputs].to(rows.dtype)


def _widened_product(rows: Tensor, matrix: Packed) -> Tensor:
    """In float32, the weights of a block of outputs at a time."""
    form, made, given = FORMS[matrix.form], [], F.pad(rows.float(), (0, matrix.inputs - rows.shape[1]))
    for first in range(0, matrix.outputs, WIDENED):
        last = min(matrix.outputs, first + WIDENED)
        weights = numbers_of(form, matrix.panels[first // PANEL : -(-last // PANEL)])[: last - first]
        made.append(in_blocks(given, weights))
    return torch.cat(made, dim=1).to(rows.dtype)


def multiplied(rows: Tensor, linear: Linear) -> Tensor:
    """By a linear layer, whose bias is added before the result is rounded."""
    (first, *others), bias = linear.matrices, linear.bias
    if isinstance(first, Plain):
        return in_blocks(rows, first.weights, bias)
    given = rows if linear.order is None else rows[:, linear.order]
    wide = given if bias is None else given.float()
    made = [
        _widened_product(wide, each) if isinstance(each, Packed) else each.multiply(wide)
        for each in (first, *others)
    ]
    found = torch.cat(made, dim=1)
    return found if bias is None else (found + bias).to(rows.dtype)


# -------------------------------------------------------------------------------------------- engine


class Gpu(Engine):
    """Raises `InputError` for a device that cannot be used."""

    def __init__(self, dtype: str, arithmetic: str, how: Norm, device: str) -> None:
        self.dtype, self.device = ACTIVATIONS[dtype], device
        self._dtype, self._there = DTYPES[self.dtype], torch.device(device)
        self._how, self._is_tiny = how, arithmetic.startswith("tinygemm")
        accelerator_of(device)  # products of float32 are in float32 from then on
        if self._there.type == "cuda" and compiled_cuda.library(self._there) is None:
            try:
                allow_library(device)
            except OSError as error:  # torch's operations have the same bits
                text = "kernels for %s cannot be built: %s; torch's operations take their place, slower"
                log.warning(text, device, first_line(error))

    # ---------------------------------------------------------------------------------------- arrays

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        return torch.zeros(shape, dtype=torch.int8 if dtype == "int8" else DTYPES[dtype], device=self._there)

    def array(self, x: npt.NDArray[Any]) -> Tensor:
        return tensor_of(x).to(self._there)

    def copied(self, x: Tensor) -> Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    def numpy(self, x: Tensor) -> npt.NDArray[Any]:
        return array_of(x)

    def wide(self, x: Tensor) -> Tensor:
        return x.float()

    def narrow(self, x: Tensor) -> Tensor:
        return x.to(self._dtype)

    def rounded_matrix(self, dtype: str, rounded: Rounded, inputs: int) -> Matrix:
        if dtype == "int4" and not self._is_tiny:
            return self.filed_matrix("Q4_0", packed(Q4_0, spread(rounded)), len(rounded["levels"]))
        levels, scales = (self.array(rounded[name]) for name in ("levels", "scales"))
        return _Int8(levels, scales) if dtype == "int8" else _Int4(levels, scales, inputs)

    # ------------------------------------------------------------------------------------- computing

    def layer(self, parts: Parts, spec: LayerSpec, source: int = 0, going: int | None = None) -> _Layer:
        return _Layer(_parts_of(parts, spec, self._how), parts, spec, source, going)

    def rows(
        self, inputs: int, *, norm: NormPart | None = None, linear: Linear | None = None
    ) -> RowsFunction:
        def run(x: Tensor) -> Array:
            x = x if norm is None else normed(x, norm, self._how)
            return x if linear is None else multiplied(x, linear)

        return run

    def take(self, table: Matrix, rows: I64) -> Tensor:
        return _looked_up(table, torch.from_numpy(rows).to(self._there), self._dtype)

    def function(self, x: Tensor, name: str) -> Tensor:
        return Operations.function(x, name)

    def angles(self, positions: I64, rotary: Rotary) -> Angles:
        places = torch.from_numpy(positions).to(self._there)[None]
        frequencies = torch.tensor(rotary.frequencies, dtype=torch.float32, device=self._there)
        return plain.angles(places, frequencies, rotary.scale, self._dtype)

    def turn(self, x: Tensor, angles: Angles) -> Tensor:
        return Operations.turned(x.transpose(0, 1)[None], *angles)[0].transpose(0, 1)

    def store(self, slots: I64, keys: Tensor, values: Tensor, to: Held) -> None:
        there = torch.from_numpy(slots).to(self._there)
        store(there, keys.transpose(0, 1), values.transpose(0, 1), to)

    def begin(self, hidden: Tensor, batch: TreeBatch) -> _Pass:
        return _Pass(hidden, batch)

    def pass_by(self, layer: _Layer, cache: TreeCache, passed: Sequence[int]) -> None:
        assert layer.spec.dense is not None
        mixer = layer.spec.dense.mixer
        assert isinstance(mixer, DeltaRule)
        walk = walk_past(layer.source, cache, passed, mixer.length)
        lines = torch.from_numpy(walk.lines).to(self._there)
        rows = plain.delta_rows(mixer, cache.inputs(layer.source), lines, layer.parts.vectors)
        plain.delta_rule(rows, cache.states[layer.source][BASE][None], torch.from_numpy(walk.steps))


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """It attends to keys and values of a `source`; its own go on from number `going`, if they do."""

    parts: plain.Parts
    given: Parts
    spec: LayerSpec
    source: int
    going: int | None


class _Pass:
    """A `Pass`, and what its requests hold of the layer that runs (`plain.Holder`)."""

    _layer: _Layer

    def __init__(self, hidden: Tensor, batch: TreeBatch) -> None:
        self.hidden, self._batch = hidden, batch
        self._slots: dict[int, Tensor] = {}
        self._paths: dict[tuple[int, int | None], Tensor] = {}

    def run(self, layer: _Layer, angles: Angles) -> None:
        token, batch, self._layer = None, self._batch, layer
        if batch.embedding is not None:
            token = plain.Token(batch.embedding)
            table = layer.given.get(f"{LAYER_INPUT}.table")
            if isinstance(table, Table) and batch.tokens is not None:
                ids = torch.from_numpy(batch.tokens).to(self.hidden.device)
                looked_up = _looked_up(table.matrix, ids, self.hidden.dtype)
                token = plain.Token(batch.embedding, looked_up, table.factor)
        self.hidden = plain.layer(layer.spec, layer.parts, self.hidden, angles, self, token)

    def _slots_of(self, rows: TreeRows) -> Tensor:
        """There, once for all layers."""
        if id(rows) not in self._slots:
            self._slots[id(rows)] = torch.from_numpy(rows.slots).to(self.hidden.device)
        return self._slots[id(rows)]

    def _paths_of(self, rows: TreeRows, window: int | None) -> Tensor:
        if (id(rows), window) not in self._paths:
            paths = rows.sight(window).paths
            self._paths[id(rows), window] = torch.from_numpy(paths).to(self.hidden.device)
        return self._paths[id(rows), window]

    def attend(
        self, queries: Tensor, keys: Tensor | None, values: Tensor | None, sinks: Tensor | None
    ) -> Tensor:
        spec, source = self._layer.spec, self._layer.source
        first, going = self._layer.going, self._batch.going
        assert spec.dense is not None
        if keys is not None and values is not None and going is not None and first is not None:
            both = torch.cat([keys.flatten(1), values.flatten(1)], dim=1)
            going[:, first : first + both.shape[1]] = both
        outputs = []
        for rows, span in self._batch.of(source):
            held = rows.cache.of(source)
            if keys is not None and values is not None:
                new = keys[span].transpose(0, 1), values[span].transpose(0, 1)
                store(self._slots_of(rows), *new, held)
            given = queries[span], held, self._paths_of(rows, spec.window or None)
            outputs.append(attention(*given, spec.dense.scale, spec.dense.cap or None, sinks))
        return torch.cat(outputs)

    def convolve(self, inputs: Tensor, taps: Tensor, bias: Tensor | None) -> Tensor:
        outputs = []
        for rows, span in self._batch.of(self._layer.source):
            held = rows.cache.inputs(self._layer.source)
            held[self._slots_of(rows)] = inputs[span]
            lines = torch.from_numpy(rows.line(taps.shape[1])).to(held.device)
            outputs.append(plain.convolution(plain.seen_inputs(held, lines), taps, bias))
        return torch.cat(outputs)

    def sum_up(self, inputs: Tensor, mixer: DeltaRule, vectors: Mapping[str, Any]) -> Tensor:
        outputs, layer = [], self._layer.source
        for rows, span in self._batch.of(layer):
            held, states = rows.cache.inputs(layer), rows.cache.states[layer]
            held[self._slots_of(rows)] = inputs[span]
            walk = walk_of(rows, layer, mixer.length)
            places = states.new_empty((walk.places, *states.shape[1:]))
            places[0] = states[NEAR]
            lines = torch.from_numpy(walk.lines).to(held.device)
            given = plain.delta_rows(mixer, held, lines, vectors)
            outputs.append(plain.delta_rule(given, places, torch.from_numpy(walk.steps)))
            states[NEAR] = places[0]
        return torch.cat(outputs)


def _looked_up(table: Matrix, ids: Tensor, dtype: torch.dtype) -> Array:
    if isinstance(table, Packed):
        return plain.packed_rows(FORMS[table.form], table.panels, ids).to(dtype)
    return table.weights[ids]


def _parts_of(parts: Parts, spec: LayerSpec, how: Norm) -> plain.Parts:
    """As the definition has them, by the last part of their names."""
    products: dict[str, RowsFunction] = {}
    norms: dict[str, RowsFunction] = {}
    vectors: dict[str, Any] = {"layer_scalar": parts.get("layer_scalar"), "conv.bias": parts.get("conv.bias")}
    experts: list[dict[str, RowsFunction]] = []
    for name, part in parts.items():
        leaf = name if name == f"{LAYER_INPUT}.norm" else name[name.rfind(".") + 1 :]
        if isinstance(part, Linear):
            products[leaf] = partial(multiplied, linear=part)
        elif isinstance(part, NormPart):
            own: Norm = "cast, scale" if name == "linear_attn.norm" else how
            norms[leaf] = partial(normed, part=part, how=own)
        elif isinstance(part, RouterPart):
            assert spec.dense is not None
            assert spec.dense.mixture is not None
            is_wide = spec.dense.mixture.router == "sigmoid"
            products["gate"] = partial(_routed, router=part, is_wide=is_wide)
            vectors |= {"e_score_correction_bias": part.correction, "per_expert_scale": part.scales}
        elif isinstance(part, Stack):
            for number, linear in enumerate(part.linears):
                if number == len(experts):
                    experts.append({})
                bias = None if part.bias is None else part.bias[number]
                with_bias = Linear(inputs=linear.inputs, matrices=linear.matrices, bias=bias)
                experts[number][leaf] = partial(multiplied, linear=with_bias)
        elif isinstance(part, Tensor) and leaf == "taps":
            vectors["conv"] = part.t()
        elif isinstance(part, Tensor) and leaf == "rates":
            half = len(part) // 2
            vectors |= {"fading": part[:half], "dt_bias": part[half:]}
        elif leaf == "sinks":
            vectors["sinks"] = part
    return plain.Parts(products=products, norms=norms, vectors=vectors, experts=experts, ops=Operations)


def _routed(rows: Tensor, router: RouterPart, is_wide: bool) -> Tensor:
    """Logits `[rows, experts]`, in float32 where they stay so."""
    if router.norm is not None:
        rows = normed(rows, router.norm, "cast, scale") * router.factor
    found = product(rows.float(), router.weights.float())
    found = found if router.bias is None else found + router.bias.float()
    return found if is_wide else found.to(rows.dtype)
