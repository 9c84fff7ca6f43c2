"""The engine of a GPU: torch computes a model's parts, layers as `plain.Layer` defines them, with torch's
products and, where there are such, kernels of our own (`arithmetic/compiled_cuda.py`).

torch's libraries choose a kernel by the number of rows, so products are always of one number of rows. int4:
torch's tinygemm kernel in bfloat16, on GPUs of compute capability 8.0 and newer (from the Orins on), else in
float32, as int8 and what files pack.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from flowspec.core.protocol.model_spec import DeltaRule, LayerSpec, Norm, Rotary
from flowspec.core.protocol.precision import ACTIVATIONS, is_packed
from flowspec.errors import first_line
from flowspec.model.accelerator import accelerator_of
from flowspec.model.arithmetic import plain
from flowspec.model.arithmetic.arrays import I64, Array
from flowspec.model.arithmetic.compiled_cuda import CudaLibrary, library_of
from flowspec.model.arithmetic.packed import FORMS, GROUP, PANEL, numbers_of, packed
from flowspec.model.arithmetic.plain import Held
from flowspec.model.attention import BASE, NEAR, Angles, TreeBatch, TreeCache, TreeRows
from flowspec.model.engine import Engine
from flowspec.model.linear_attention import Walk, walk_of, walk_past
from flowspec.model.parts import Linear, Matrix, NormPart, Packed, Parts, Plain, RowsFunction, Table
from flowspec.model.rounding import ROUNDINGS, Rounded

log = logging.getLogger("flowspec.kernels")

Tensor = torch.Tensor
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BLOCKS = {torch.float32: 32, torch.bfloat16: 64, torch.float16: 64}
"""Rows that a GPU multiplies at once, no more and no fewer: reading the weights takes as long."""
WIDENED = 1024
"""Outputs whose weights are widened at once."""
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
    return here.view(torch.int16).numpy().view(np.uint16) if x.dtype == torch.bfloat16 else here.numpy()


def arithmetics_of(dtype: str, device: str) -> tuple[str, ...]:
    """Of a precision, the best first. Raises `InputError` for a device that is unknown."""
    major, minor = accelerator_of(device).capability
    name = "plain" if is_packed(dtype) else "torch-in-blocks"
    if dtype == "int4" and (major, minor) >= INT4_CAPABILITY:
        name = "tinygemm"
    version = ".".join(torch.__version__.split(".")[:2])
    return (f"{name}-{_SHORT.get(dtype, dtype)}@sm{major}{minor}-torch{version}",)


def cuda_library(device: str) -> CudaLibrary:
    """`canonical.cu` for a GPU. Raises `OSError` where it cannot be built."""
    return library_of(torch.device(device), accelerator_of(device).capability)


# ------------------------------------------------------------------------------------------ products


def in_blocks(x: Tensor, weights: Tensor) -> Tensor:
    """Float32 `x W^T` by torch, in the dtype of weights, for always the same number of rows."""
    count, size = len(x), BLOCKS[weights.dtype]
    filled = F.pad(x.to(weights.dtype), (0, 0, 0, -count % size))
    if len(filled) == size:  # in fewer calls
        return F.linear(filled, weights)[:count].float()
    return torch.cat([F.linear(part, weights) for part in torch.split(filled, size)])[:count].float()


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
        return found[:, : self.outputs].float()


def _widened_product(rows: Tensor, matrix: Packed) -> Tensor:
    """In float32, the weights of a block of outputs at a time."""
    form, made, given = FORMS[matrix.form], [], F.pad(rows, (0, matrix.inputs - rows.shape[1]))
    for first in range(0, matrix.outputs, WIDENED):
        last = min(matrix.outputs, first + WIDENED)
        weights = numbers_of(form, matrix.panels[first // PANEL : -(-last // PANEL)])[: last - first]
        made.append(in_blocks(given, weights))
    return torch.cat(made, dim=1)


def multiplied(rows: Tensor, linear: Linear, bias: Tensor | None = None) -> Tensor:
    """Float32 rows by a linear layer, whose bias, or the one that is given, is added; none is rounded to
    levels."""
    bias = linear.bias if bias is None else bias
    given = rows if linear.order is None else rows[:, linear.order]
    made = []
    for each in linear.matrices:
        if isinstance(each, Plain):
            made.append(in_blocks(given, each.weights))
        else:
            made.append(_widened_product(given, each) if isinstance(each, Packed) else each.multiply(given))
    found = torch.cat(made, dim=1)
    return found if bias is None else found + bias


# -------------------------------------------------------------------------------------------- engine


class Gpu(Engine):
    """Raises `InputError` for a device that cannot be used."""

    def __init__(self, dtype: str, arithmetic: str, how: Norm, device: str) -> None:
        self.dtype, self.device = ACTIVATIONS[dtype], device
        self._dtype, self._there = DTYPES[self.dtype], torch.device(device)
        self._how, self._is_tiny = how, arithmetic.startswith("tinygemm")
        self._ops: Any = plain
        accelerator_of(device)  # products of float32 are in float32 from then on
        if self._there.type == "cuda":
            try:
                self._ops = cuda_library(device)
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
        if self._is_tiny:
            return _Int4(self.array(rounded["levels"]), self.array(rounded["scales"]), inputs)
        how = ROUNDINGS[dtype]
        panels = packed(FORMS[how.form], how.spread(rounded))
        return Packed(how.form, self.array(panels), len(rounded["levels"]))

    # ------------------------------------------------------------------------------------- computing

    def layer(
        self,
        parts: Parts,
        spec: LayerSpec,
        source: int = 0,
        going: int | None = None,
        is_source: bool = False,
    ) -> _Layer:
        return _Layer(spec, parts, self._how, multiplied, self._ops, is_source, source, going)

    def rows(
        self, *, norm: NormPart | None = None, linear: Linear | None = None, are_logits: bool = False
    ) -> RowsFunction:
        def run(x: Tensor) -> Array:
            found = x.float()
            found = found if norm is None else self._ops.norm(found, norm.weights, norm.eps, self._how)
            found = found if linear is None else multiplied(found, linear)
            return found if are_logits else found.to(x.dtype)

        return run

    def take(self, table: Matrix, rows: I64) -> Array:
        ids = torch.from_numpy(rows).to(self._there)
        if isinstance(table, Packed):
            return plain.packed_rows(FORMS[table.form], table.panels, ids).to(self._dtype)
        return table.weights[ids]

    def function(self, x: Tensor, name: str) -> Array:
        return self._ops.function(x, name)

    def angles(self, positions: I64, rotary: Rotary) -> Angles:
        places = torch.from_numpy(positions).to(self._there)[None]
        frequencies = torch.tensor(rotary.frequencies, dtype=torch.float32, device=self._there)
        return plain.angles(places, frequencies, rotary.scale)

    def turn(self, x: Tensor, angles: Angles) -> Array:
        return self._ops.turned(x.float(), *angles)

    def store(self, slots: I64, keys: Tensor, values: Tensor, to: Held) -> None:
        there = torch.from_numpy(slots).to(self._there)
        self._ops.store(there, keys.float().transpose(0, 1), values.float().transpose(0, 1), to)

    def begin(self, hidden: Tensor, batch: TreeBatch) -> _Pass:
        return _Pass(self, hidden, batch)

    def pass_by(self, layer: _Layer, cache: TreeCache, passed: Sequence[int]) -> None:
        mixer, source = layer.dense.mixer, layer.source
        assert isinstance(mixer, DeltaRule)
        walk = walk_past(source, cache, passed, mixer.length)
        taps, rates = layer.parts["linear_attn.taps"], layer.parts["linear_attn.rates"]
        _walk(walk, mixer, cache.inputs(source), taps, rates, cache.states[source][BASE][None])


@dataclass(frozen=True, slots=True, eq=False)
class _Layer(plain.Layer):
    """It attends to keys and values of a `source`; its own go on from number `going`, if they do."""

    source: int
    going: int | None


class _Pass:
    """A `Pass`, whose rows run one layer after another (`plain.Rows`)."""

    angles: Angles
    _layer: _Layer

    def __init__(self, engine: Gpu, hidden: Tensor, batch: TreeBatch) -> None:
        self._engine, self._batch = engine, batch
        self.hidden, self.embedding = hidden, batch.embedding
        self._sent: dict[int, tuple[I64, Tensor]] = {}

    def run(self, layer: _Layer, angles: Angles) -> None:
        self._layer, self.angles = layer, angles
        self.hidden = layer.run(self.hidden, self)

    def _there(self, x: I64) -> Tensor:
        """What rows keep, sent to the device once for all layers."""
        if id(x) not in self._sent:
            self._sent[id(x)] = x, torch.from_numpy(x).to(self.hidden.device)
        return self._sent[id(x)][1]

    def look_up(self, table: Table) -> Array:
        assert self._batch.tokens is not None
        matrix, ids = table.matrix, self._there(self._batch.tokens)
        if isinstance(matrix, Packed):
            return plain.packed_rows(FORMS[matrix.form], matrix.panels, ids)
        return matrix.weights[ids].float()

    def attend(
        self, queries: Tensor, keys: Tensor | None, values: Tensor | None, sinks: Tensor | None
    ) -> Tensor:
        layer, going, outputs = self._layer, self._batch.going, []
        if keys is not None and values is not None and going is not None and layer.going is not None:
            both = torch.cat([keys.flatten(1), values.flatten(1)], dim=1)
            going[:, layer.going : layer.going + both.shape[1]] = both
        for rows, span in self._batch.of(layer.source):
            held = rows.cache.of(layer.source)
            if keys is not None and values is not None:
                new = keys[span].transpose(0, 1), values[span].transpose(0, 1)
                layer.ops.store(self._there(rows.slots), *new, held)
            paths, dense = self._there(rows.sight(layer.spec.window or None).paths), layer.dense
            outputs.append(layer.ops.attention(queries[span], held, paths, dense.scale, dense.cap, sinks))
        return torch.cat(outputs)

    def convolve(self, inputs: Tensor, taps: Tensor, bias: Tensor | None) -> Tensor:
        of_requests = [(held, self._there(rows.line(len(taps)))) for rows, held in self._held(inputs)]
        return torch.cat([plain.convolution(*given, taps, bias) for given in of_requests])

    def sum_up(self, inputs: Tensor, mixer: DeltaRule, taps: Tensor, rates: Tensor) -> Tensor:
        outputs, layer = [], self._layer
        for rows, held in self._held(inputs):
            states = rows.cache.states[layer.source]
            walk = walk_of(rows, layer.source, mixer.length)
            places = states.new_empty((walk.places, *states.shape[1:]))
            places[0] = states[NEAR]
            outputs.append(_walk(walk, mixer, held, taps, rates, places))
            states[NEAR] = places[0]
        return torch.cat(outputs)

    def _held(self, inputs: Tensor) -> Iterator[tuple[TreeRows, Tensor]]:
        """Of each request its rows, and the inputs `[slots, width]` that are held of it, these now, too."""
        for rows, span in self._batch.of(self._layer.source):
            held = rows.cache.inputs(self._layer.source)
            held[self._there(rows.slots)] = inputs[span].to(held.dtype)
            yield rows, held


def _walk(walk: Walk, mixer: DeltaRule, held: Tensor, taps: Tensor, rates: Tensor, states: Tensor) -> Array:
    """What is read from states, which are changed in place, in the steps of a walk over what is held."""
    rows = plain.delta_rows(mixer, held, torch.from_numpy(walk.lines).to(held.device), taps, rates)
    return plain.delta_rule(rows, states, torch.from_numpy(walk.steps))
