"""The engine of a GPU: torch runs a program step by step (`Steps`), with torch's products and, where there
are such, kernels of our own (`arithmetic/canonical.cu`), which have the bits of `arithmetic/plain.py`.

torch's libraries choose a kernel by the number of rows, so products are always of one number of rows. Our
kernels are compiled by NVRTC where they run, which comes with CUDA and with torch's builds for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from flowspec.core.protocol.model_spec import NORMS, DeltaRule, LayerSpec, Norm, Rotary
from flowspec.core.protocol.precision import ACTIVATIONS, is_packed
from flowspec.errors import first_line
from flowspec.model.accelerator import accelerator_of
from flowspec.model.arithmetic import compiled, plain
from flowspec.model.arithmetic.arrays import I64, Array, Memory
from flowspec.model.arithmetic.compiled import FUNCTIONS, StoredFields, TurnFields, fields, kind_of
from flowspec.model.arithmetic.packed import FORMS, GROUP, PANEL, Panels, groups_of, numbers_of
from flowspec.model.arithmetic.plain import BLOCK, Held
from flowspec.model.attention import BASE, NEAR, Angles, TreeBatch, TreeCache, TreeRows, Walk
from flowspec.model.layer import (
    NOWHERE,
    Linear,
    Matrix,
    NormPart,
    Packed,
    Parts,
    Place,
    Plain,
    Program,
    RowsFunction,
    Step,
    View,
    program_of,
    rows_program,
)

log = logging.getLogger("flowspec.kernels")

Tensor = torch.Tensor
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BLOCKS = {torch.float32: 32, torch.bfloat16: 64, torch.float16: 64}  # rows: reading weights takes as long
WIDENED = 1024  # outputs whose weights are widened at once
INT4_TILES, INT4_CAPABILITY = 2, (8, 0)  # of 16 inputs, as tinygemm takes them from the Orins on
_SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
SOURCE = Path(compiled.__file__).with_name("canonical.cu")
FLAGS = ("--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")  # as IEEE 754 has it
THREADS, BLOCKS_MAX = 128, 1 << 16  # of a block; and blocks where threads divide all numbers among themselves
ROOM_MAX = 12288  # numbers that a block has room for on every GPU, 48 KiB
WIDTH_MAX, POSITIONS_MAX = 16384, ROOM_MAX * BLOCK
"""Numbers that are summed in halves, half of which need room; and attention's, where each block needs
some."""
SCORES_MAX = 1 << 22  # numbers of rows, heads and positions that are held at once


def tensor_of(x: npt.NDArray[Any]) -> Tensor:
    """A copy; bfloat16 is uint16 in numpy."""
    if x.dtype == np.uint16:
        return torch.tensor(x.view(np.int16)).view(torch.bfloat16)
    return torch.tensor(x)


def array_of(x: Tensor) -> npt.NDArray[Any]:
    """As `tensor_of`, backwards."""
    here = x.detach().cpu().contiguous()
    return here.view(torch.int16).numpy().view(np.uint16) if x.dtype == torch.bfloat16 else here.numpy()


def arithmetic_of(dtype: str, device: str) -> str:
    """Of a precision. Raises `InputError` for a device that is unknown."""
    major, minor = accelerator_of(device).capability
    name = "plain" if is_packed(dtype) else "torch-in-blocks"
    if dtype == "int4" and (major, minor) >= INT4_CAPABILITY:
        name = "tinygemm"
    version = ".".join(torch.__version__.split(".")[:2])
    return f"{name}-{_SHORT.get(dtype, dtype)}@sm{major}{minor}-torch{version}"


# ------------------------------------------------------------------------------------------ products


def in_blocks(x: Tensor, weights: Tensor) -> Tensor:
    """Float32 `x W^T` by torch, in the dtype of weights, for always the same number of rows."""
    count, size = len(x), BLOCKS[weights.dtype]
    filled = F.pad(x.to(weights.dtype), (0, 0, 0, -count % size))
    made = [F.linear(part, weights) for part in torch.split(filled, size)]
    return (torch.cat(made) if len(made) > 1 else made[0])[:count].float()


class _Int4:
    """As tinygemm has them, of panels of Q4_0."""

    __slots__ = ("_packed", "_scales", "outputs")

    def __init__(self, panels: Tensor, outputs: int) -> None:
        self.outputs, form = outputs, FORMS["Q4_0"]
        pairs, scales = list[Tensor](), list[Tensor]()
        for some in torch.split(panels, WIDENED // PANEL):
            weights, of_groups, _ = groups_of(form, some)
            levels = (weights + form.offset).flatten(1).to(torch.uint8)
            pairs.append(levels[:, ::2] << 4 | levels[:, 1::2])  # the first of two is in the high bits
            scales.append(of_groups[..., 0].bfloat16())  # which has all their digits
        self._packed = torch._convert_weight_to_int4pack(torch.cat(pairs), INT4_TILES)
        both = torch.stack([torch.cat(scales), torch.zeros_like(torch.cat(scales))], dim=2)
        self._scales = both.transpose(0, 1).contiguous()  # [groups, out, 2]

    def multiply(self, rows: Tensor) -> Tensor:
        filled = F.pad(rows.bfloat16(), (0, -rows.shape[1] % GROUP))
        found: Tensor = torch._weight_int4pack_mm(filled, self._packed, GROUP, self._scales)
        return found[:, : self.outputs].float()


def _products(rows: Tensor, matrix: Matrix) -> Iterator[Tensor]:
    """By a block of outputs after another: of what is packed, the weights are widened to float32."""
    if isinstance(matrix, Plain):
        yield in_blocks(rows, matrix.weights)
    elif isinstance(matrix, _Int4):
        yield matrix.multiply(rows)
    else:
        given = F.pad(rows, (0, matrix.inputs - rows.shape[1]))
        for first in range(0, matrix.outputs, WIDENED):
            last = min(matrix.outputs, first + WIDENED)
            panels = matrix.panels[first // PANEL : -(-last // PANEL)]
            yield in_blocks(given, numbers_of(FORMS[matrix.form], panels)[: last - first])


def multiplied(rows: Tensor, linear: Linear) -> Tensor:
    """Float32 rows, with inputs as its matrices have them, by a linear layer; none is rounded to levels."""
    found = torch.cat([made for matrix in linear.matrices for made in _products(rows, matrix)], dim=1)
    return found if linear.bias is None else found + linear.bias


# ----------------------------------------------------------------------------------------------------- engine


class Gpu(Memory):
    """As `Cpu` is. Raises `InputError` for a device that cannot be used."""

    def __init__(self, dtype: str, arithmetic: str, how: Norm, device: str) -> None:
        self.dtype, self.device = ACTIVATIONS[dtype], device
        self._dtype, self._there = DTYPES[self.dtype], torch.device(device)
        self._norm, self._is_tiny = how, arithmetic.startswith("tinygemm")
        self.ops: Any = plain
        accelerator_of(device)  # products of float32 are in float32 from then on
        if self._there.type == "cuda":
            try:
                self.ops = cuda_library(device)
            except OSError as error:  # torch's operations have the same bits
                text = "kernels for %s cannot be built: %s; torch's operations take their place, slower"
                log.warning(text, device, first_line(error))

    # ---------------------------------------------------------------------------------------- arrays

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Array:
        return torch.zeros(shape, dtype=torch.int8 if dtype == "int8" else DTYPES[dtype], device=self._there)

    def array(self, x: Array) -> Array:
        return tensor_of(x).to(self._there)

    def copied(self, x: Array) -> Array:
        return x.clone(memory_format=torch.contiguous_format)

    def numpy(self, x: Array) -> Array:
        return array_of(x)

    def wide(self, x: Array) -> Array:
        return x.float()

    def narrow(self, x: Array) -> Array:
        return x.to(self._dtype)

    def packed_matrix(self, form: str, panels: Panels, outputs: int) -> Matrix:
        there = self.array(panels)
        return _Int4(there, outputs) if self._is_tiny else Packed(form, there, outputs)

    # ------------------------------------------------------------------------------------- computing

    def layer(self, parts: Parts, spec: LayerSpec, place: Place) -> Any:
        return program_of(parts, spec, self.dtype, self._norm, place)

    def rows(
        self, *, norm: NormPart | None = None, linear: Linear | None = None, are_logits: bool = False
    ) -> RowsFunction:
        program = rows_program(self.dtype, self._norm, norm, linear, are_logits)
        last = program.steps[-1]

        def run(x: Array) -> Array:
            going = x.new_empty((len(x), last.source.width), dtype=DTYPES[last.how])
            Steps(self.ops, x, TreeBatch([], going=going)).run(program)
            return going

        return run

    def take(self, table: Matrix, rows: I64) -> Array:
        return self.narrow(_rows_of(table, torch.from_numpy(rows).to(self._there)))

    def function(self, x: Array, name: str) -> Array:
        return self.ops.function(x, name)

    def angles(self, positions: I64, rotary: Rotary) -> Angles:
        places = torch.from_numpy(positions).to(self._there)[None]
        frequencies = torch.tensor(rotary.frequencies, dtype=torch.float32, device=self._there)
        return plain.angles(places, frequencies, rotary.scale)

    def turn(self, x: Array, angles: Angles) -> Array:
        return self.ops.turned(x.float(), *angles)

    def store(self, slots: I64, keys: Array, values: Array, to: Held) -> None:
        there = torch.from_numpy(slots).to(self._there)
        self.ops.store(there, keys.float().transpose(0, 1), values.float().transpose(0, 1), to)

    def begin(self, hidden: Array, batch: TreeBatch) -> Steps:
        return Steps(self.ops, hidden, batch)

    def pass_by(self, layer: Program, cache: TreeCache, passed: Sequence[int]) -> None:
        mixer, source = layer.mixer, layer.source
        assert isinstance(mixer, DeltaRule)
        walk = cache.walk_past(source, passed, mixer.length)
        step = next(step for step in layer.steps if step.name == "sum_up")
        _walk(walk, mixer, step, cache.inputs(source), cache.states[source][BASE][None])


def _rows_of(table: Matrix, ids: Tensor) -> Tensor:
    if isinstance(table, Packed):
        return plain.packed_rows(FORMS[table.form], table.panels, ids)
    return table.weights[ids]


def _walk(walk: Walk, mixer: DeltaRule, step: Step, held: Tensor, states: Tensor) -> Tensor:
    """What is read from states, which are changed in place, in the steps of a walk over what is held."""
    lines = torch.from_numpy(walk.lines).to(held.device)
    rows = plain.delta_rows(mixer, held, lines, step.weights, step.scales)
    return plain.delta_rule(rows, states, torch.from_numpy(walk.steps))


# --------------------------------------------------------------------------------------------- steps


def _heads(x: Tensor, width: int) -> Tensor:
    """`[rows, heads, width]` of `[rows, numbers]`."""
    return x.reshape(len(x), x.shape[1] // width, width)


class Steps:
    """A pass: what each step of a program means, by its name. Registers are tensors `[rows, numbers]`,
    float32; a method takes a step and what is in its source, and gives what comes to where it writes, if
    anything. `ops`: `plain`, or what has its functions."""

    hidden: Array
    _program: Program
    _angles: Any

    def __init__(self, ops: Any, hidden: Tensor, batch: TreeBatch) -> None:
        self.hidden, self._ops, self._batch = hidden, ops, batch
        self._registers: dict[int, Tensor] = {}
        self._sent: dict[int, tuple[I64, Tensor]] = {}

    def run(self, layer: Program, angles: Angles | None = None) -> None:
        self._program, self._angles = layer, angles
        for step in layer.steps:
            x = None if step.source is NOWHERE else self._read(step.source)
            found = getattr(self, step.name)(step, x)
            if found is not None:
                self._write(step, found)
        self._registers.clear()

    def _read(self, view: View) -> Tensor:
        whole = self._registers[view.register]
        return whole if view.width == whole.shape[1] else whole[:, view.at : view.at + view.width]

    def _write(self, step: Step, found: Tensor) -> None:
        (register, at, width), whole = step.to, self._program.widths[step.to.register] // step.spread
        if width == whole:
            self._registers[register] = found
            return
        if register not in self._registers:
            self._registers[register] = found.new_empty((len(found), whole))
        self._registers[register][:, at : at + width] = found

    def _there(self, x: I64) -> Tensor:
        """What rows keep, sent to the device once for all layers."""
        if id(x) not in self._sent:
            self._sent[id(x)] = x, torch.from_numpy(x).to(self.hidden.device)
        return self._sent[id(x)][1]

    def _requests(self) -> Iterator[tuple[TreeRows, slice]]:
        return self._batch.of(self._program.source)

    # ------------------------------------------------------------------------- what comes, goes, and moves

    def load(self, step: Step, _: None) -> Tensor:
        return self.hidden.float()

    def load_embedding(self, step: Step, _: None) -> Tensor:
        assert self._batch.embedding is not None
        return self._batch.embedding.float()

    def look_up(self, step: Step, _: None) -> Tensor:
        """Of the rows' tokens in a table."""
        assert self._batch.tokens is not None
        return _rows_of(step.weights, self._there(self._batch.tokens)).float()

    def leave(self, step: Step, x: Tensor) -> None:
        self.hidden = x.to(self.hidden.dtype)

    def carry(self, step: Step, x: Tensor) -> None:
        """To the next slice, or to who asked."""
        assert self._batch.going is not None
        self._batch.going[:, step.to.at : step.to.at + step.to.width] = x

    def forget(self, step: Step, x: Tensor) -> None:
        """All but this."""
        self._registers = {step.source.register: x}

    def narrow(self, step: Step, x: Tensor) -> Tensor:
        """As rows could travel."""
        return x.to(self.hidden.dtype).float()

    def copy(self, step: Step, x: Tensor) -> Tensor:
        """In an order; or of each head so many numbers."""
        if step.weights is not None:
            return x[:, step.weights]
        if not step.outputs:
            return x
        heads = _heads(self._registers[step.source.register], step.outputs)
        return heads[..., step.source.at : step.source.at + step.source.width].flatten(1)

    # --------------------------------------------------------------------------------- row by row

    def norm(self, step: Step, x: Tensor) -> Tensor:
        heads = _heads(x, step.inputs)
        return self._ops.norm(heads, step.weights, step.eps, step.how).flatten(1)

    def products(self, step: Step, x: Tensor) -> Tensor:
        """By a linear layer, or of each expert's rows by its own."""
        if isinstance(step.weights, Linear):
            return multiplied(x, step.weights)
        each = zip(torch.split(x, self._counts), step.weights, strict=True)
        return torch.cat([multiplied(own, expert) for own, expert in each if len(own)])

    def gate(self, step: Step, x: Tensor) -> Tensor:
        values = self._read(step.other)
        if step.cap:
            return plain.clamped(x, values, step.cap, step.factor, self._ops)
        return self._ops.gated(x, values, step.how)

    def add(self, step: Step, x: Tensor) -> Tensor:
        return self._read(step.to) + (x if step.factor == 1 else x * step.factor)

    def multiply(self, step: Step, x: Tensor) -> Tensor:
        return x * self._read(step.other)

    def scale(self, step: Step, x: Tensor) -> Tensor:
        """By a factor, or by a function of each row's number."""
        return x * (self._ops.function(self._read(step.other), step.how) if step.how else step.factor)

    def clip(self, step: Step, x: Tensor) -> Tensor:
        return x.clip(-step.cap, step.cap)

    # ------------------------------------------------------------------------------------------ experts

    def route(self, step: Step, x: Tensor) -> None:
        """To the experts that rows choose, sorted by expert and by row."""
        mixture = self._program.mixture
        assert mixture is not None
        chosen, shares = plain.choose(mixture, step.weights, x, self._ops)
        order = chosen.flatten().argsort(stable=True)
        self._row_of, self._shares = order // mixture.chosen, shares.flatten()[order, None]
        self._of_rows = order.argsort().view_as(chosen).sort(1).values.T
        self._counts = torch.bincount(chosen.flatten(), minlength=mixture.experts).tolist()

    def gather(self, step: Step, x: Tensor) -> Tensor:
        return x[self._row_of]

    def mix(self, step: Step, x: Tensor) -> Tensor:
        """A row's experts, each times its share, added in ascending order."""
        shared = x * self._shares
        found = torch.zeros_like(shared[: self._of_rows.shape[1]])
        for places in self._of_rows:
            found = found + shared[places]
        return found

    # ------------------------------------------------------------------- what requests hold of a layer

    def turn(self, step: Step, x: Tensor) -> Tensor:
        return self._ops.turned(_heads(x, step.inputs), *self._angles).flatten(1)

    def store(self, step: Step, x: Tensor) -> None:
        both = x, self._read(step.other)
        keys, values = (_heads(each, step.inputs).transpose(0, 1) for each in both)
        for rows, span in self._requests():
            held = rows.cache.of(self._program.source)
            self._ops.store(self._there(rows.slots), keys[:, span], values[:, span], held)

    def attend(self, step: Step, x: Tensor) -> Tensor:
        queries, outputs = _heads(x, step.inputs), []
        for rows, span in self._requests():
            paths, held = rows.sight(self._program.window).paths, rows.cache.of(self._program.source)
            how = step.factor, step.cap, step.bias
            outputs.append(self._ops.attention(queries[span], held, self._there(paths), *how))
        return torch.cat(outputs).flatten(1)

    def hold(self, step: Step, x: Tensor) -> None:
        for rows, span in self._requests():
            held = rows.cache.inputs(self._program.source)
            held[self._there(rows.slots)] = x[span].to(held.dtype)

    def convolve(self, step: Step, _: Tensor) -> Tensor:
        outputs, taps = [], step.weights
        for rows, _span in self._requests():
            held, lines = rows.cache.inputs(self._program.source), self._there(rows.line(len(taps)))
            outputs.append(plain.convolution(held, lines, taps, step.bias))
        return torch.cat(outputs)

    def sum_up(self, step: Step, _: None) -> Tensor:
        """What rows read from states, each from its own."""
        mixer, source, outputs = self._program.mixer, self._program.source, []
        assert isinstance(mixer, DeltaRule)
        for rows, _span in self._requests():
            walk, states = rows.walk(source, mixer.length), rows.cache.states[source]
            places = states.new_empty((walk.places, *states.shape[1:]))
            places[0] = states[NEAR]
            outputs.append(_walk(walk, mixer, step, rows.cache.inputs(source), places))
            states[NEAR] = places[0]
        return torch.cat(outputs).flatten(1)


# ---------------------------------------------------------------------------------------------------- kernels


def _structure(*names: str) -> Any:
    """As in the source (`compiled.fields`)."""
    return type("Given", (ctypes.Structure,), {"_fields_": fields(*names)})


KERNELS = {
    "function": _structure("x times y", "count", "function"),
    "norm": _structure("x weights y", "rows width", "how", "share eps"),
    "shares": _structure("x y", "width", "are_powers"),
    "halves": _structure("x w y", "inputs outputs"),
    "turn": TurnFields,
    "store": StoredFields,
} | dict.fromkeys(
    ("scores", "weigh", "sums", "values"),
    _structure(
        "queries keys values paths sinks shares weights sums found",
        "rows heads kv_heads width value_width slots positions",
        "cache_kind",
        "scale cap cap_inverse",
    ),
)
"""Of the source, where their names begin with `flowspec_`, and what they are given."""
Start = Callable[[str, ctypes.Structure, int, int], None]  # a kernel of so many blocks, with so many numbers


class CudaLibrary:
    """Functions of `plain` by kernels of the source, or by `plain` where these have no room or layout."""

    def __init__(self, start: Start) -> None:
        self._start = start

    def function(self, x: Tensor, name: str) -> Tensor:
        return self.gated(x, None, name)

    def gated(self, gate: Tensor, up: Tensor | None, name: str) -> Tensor:
        x, found = gate.contiguous(), gate.new_empty(gate.shape)
        given = x, None if up is None else up.contiguous(), found
        self._for_all("function", x.numel(), given, x.numel(), FUNCTIONS.index(name))
        return found

    def norm(self, x: Tensor, weights: Tensor, eps: float, how: Norm) -> Tensor:
        width = x.shape[-1]
        if width > WIDTH_MAX:
            return plain.norm(x, weights, eps, how)
        x, found, rows = x.contiguous(), x.new_empty(x.shape), x.numel() // width
        shape = rows, width, NORMS.index(how), 1 / width, eps
        self._by_block("norm", rows, width, (x, weights, found), *shape)
        return found

    def softmax(self, x: Tensor) -> Tensor:
        return self._shares(x, True) if x.shape[-1] <= WIDTH_MAX else plain.softmax(x)

    def over_their_sum(self, x: Tensor) -> Tensor:
        return self._shares(x, False) if x.shape[-1] <= WIDTH_MAX else plain.over_their_sum(x)

    def _shares(self, x: Tensor, are_powers: bool) -> Tensor:
        x, found, width = x.contiguous(), x.new_empty(x.shape), x.shape[-1]
        self._by_block("shares", x.numel() // width, width, (x, found), width, are_powers)
        return found

    def product(self, x: Tensor, weights: Tensor) -> Tensor:
        (rows, inputs), outputs = x.shape, len(weights)
        if inputs > WIDTH_MAX:
            return plain.product(x, weights)
        x, weights, found = x.contiguous(), weights.contiguous(), x.new_empty((rows, outputs))
        self._by_block("halves", rows * outputs, inputs, (x, weights, found), inputs, outputs)
        return found

    def turned(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        between_rows, between_heads, between = x.stride()
        if between != 1:
            return plain.turned(x, cosine, sine)
        assert all(each.is_contiguous() for each in (cosine, sine)), "the source reads them so"
        found = x.new_empty(x.shape)
        shape = *x.shape, cosine.shape[-1], between_rows, between_heads
        self._for_all("turn", x.numel(), (x, cosine, sine, found), *shape)
        return found

    def store(self, places: Tensor, keys: Tensor, values: Tensor, held: Held) -> None:
        to_keys, to_values, steps = held
        if steps is not None or keys.stride(2) != 1 or values.stride(2) != 1:
            plain.store(places, keys, values, held)
            return
        (kv_heads, rows, width), (_, slots, value_width) = keys.shape, to_values.shape
        (key_heads, key_rows, _), (value_heads, value_rows, _) = keys.stride(), values.stride()
        given = keys, values, places, to_keys, to_values, None, None
        shape = rows, kv_heads, width, value_width, slots, key_rows, key_heads, value_rows, value_heads
        self._for_all("store", keys.numel(), given, *shape, kind_of(to_keys.dtype))

    def attention(
        self,
        queries: Tensor,
        held: Held,
        paths: Tensor,
        scale: float,
        cap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        (keys, values, steps), positions = held, paths.shape[1]
        if steps is not None or positions > POSITIONS_MAX:
            return plain.attention(queries, held, paths, scale, cap, sinks)
        assert all(each.is_contiguous() for each in (keys, values, paths)), "the source reads them so"
        queries, found = queries.contiguous(), queries.new_empty(queries.shape)
        (rows, heads, width), blocks = queries.shape, -(-positions // BLOCK)
        most = max(1, min(rows, SCORES_MAX // max(1, heads * positions)))
        scratch = (most, heads, positions), (most, heads), (most, heads, blocks, width)
        shares, weights, sums = (queries.new_empty(shape) for shape in scratch)
        for first in range(0, rows, most):
            own, parts, to = (each[first : first + most] for each in (paths, queries, found))
            each = len(own) * heads
            tensors = parts, keys, values, own, sinks, shares, weights, sums, to
            shape = len(own), heads, len(keys), width, values.shape[2], values.shape[1], positions
            given = tensors, *shape, kind_of(keys.dtype), scale, cap, 1 / cap if cap else 0.0
            self._for_all("scores", each * positions, *given)
            self._run("weigh", each, max(THREADS, blocks), *given)
            self._for_all("sums", each * blocks * width, *given)
            self._for_all("values", each * width, *given)
        return found

    def _for_all(self, name: str, count: int, *given: Any) -> None:
        """With a thread for each of so many numbers, or for several."""
        self._run(name, min(BLOCKS_MAX, -(-count // THREADS)), 0, *given)

    def _by_block(self, name: str, blocks: int, width: int, *given: Any) -> None:
        """With room for half of the power of two that `width` is filled up to, and one number a thread."""
        self._run(name, blocks, max(THREADS, (1 << max(0, width - 1).bit_length()) // 2), *given)

    def _run(
        self, name: str, blocks: int, room: int, tensors: Sequence[Tensor | None], *numbers: float
    ) -> None:
        if blocks:
            addresses = (None if each is None else each.data_ptr() for each in tensors)
            self._start(name, KERNELS[name](*addresses, *numbers), blocks, room)


class _Module:
    """The kernels of the source, built for a GPU and loaded there."""

    def __init__(self, device: torch.device, capability: tuple[int, int]) -> None:
        self._index = device.index or 0
        self._driver = ctypes.CDLL("libcuda.so.1")
        pointer = ctypes.c_void_p
        self._driver.cuLaunchKernel.argtypes = [pointer, *[ctypes.c_uint] * 7, pointer, pointer, pointer]
        code, module = _compiled(capability), ctypes.c_void_p()
        self._call("loading", self._driver.cuModuleLoadData, ctypes.byref(module), code)
        self._functions = {name: ctypes.c_void_p() for name in KERNELS}
        for name, function in self._functions.items():
            asked = ctypes.byref(function), module, f"flowspec_{name}".encode()
            self._call(name, self._driver.cuModuleGetFunction, *asked)

    def start(self, name: str, given: ctypes.Structure, blocks: int, room: int) -> None:
        """In the order in which torch starts its own."""
        stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(self._index))
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(given))
        shape = blocks, 1, 1, THREADS, 1, 1, 4 * room  # of the grid and of a block, and the room
        self._call(name, self._driver.cuLaunchKernel, self._functions[name], *shape, stream, arguments, None)

    def _call(self, what: str, function: Any, *given: Any) -> None:
        """A function of CUDA's driver, which does it in this thread's context. Raises `RuntimeError` in the
        words in which torch does."""
        before = torch._C._cuda_exchangeDevice(self._index)
        try:
            status = function(*given)
        finally:
            torch._C._cuda_exchangeDevice(before)
        if status:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(status, ctypes.byref(text))
            said = (text.value or f"error {status}".encode()).decode("utf-8", "replace")
            raise RuntimeError(f"CUDA error: {said} (at {what})")


@functools.cache
def cuda_library(device: str) -> CudaLibrary:
    """For a GPU; built once. Raises `OSError` where that cannot be done."""
    there = torch.zeros(1, device=device).device  # so that torch's context is there, the driver's, too
    try:
        return CudaLibrary(_Module(there, accelerator_of(device).capability).start)
    except RuntimeError as error:
        raise OSError(f"CUDA's driver does not load it: {error}") from error


def _compiled(capability: tuple[int, int]) -> bytes:
    """The source for such a GPU."""
    nvrtc, program = _nvrtc(), ctypes.c_void_p()

    def text(what: str) -> bytes:
        size = ctypes.c_size_t()
        nvrtc[f"nvrtcGet{what}Size"](program, ctypes.byref(size))
        room = ctypes.create_string_buffer(size.value)
        nvrtc[f"nvrtcGet{what}"](program, room)
        return room.raw

    source, name = SOURCE.read_bytes(), SOURCE.name.encode()
    words = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}".encode(), *map(str.encode, FLAGS)]
    done = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, name, 0, None, None)
    done = done or nvrtc.nvrtcCompileProgram(program, len(words), (ctypes.c_char_p * len(words))(*words))
    try:
        if done:
            said = text("ProgramLog").decode("utf-8", "replace").strip("\0 \n").splitlines()
            raise OSError(f"NVRTC ended with {done}" + "".join(f": {line}" for line in said[:1]))
        return text("CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _nvrtc() -> ctypes.CDLL:
    own = f"libnvrtc.so.{(torch.version.cuda or '').split('.')[0]}"
    for name in (own, "libnvrtc.so"):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name)
    raise OSError(f"{own} is not there")
