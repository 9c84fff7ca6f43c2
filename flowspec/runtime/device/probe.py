"""A short look at how fast this machine is, for daemons whose board nobody measured: about half a second on a
CPU. `flowspec profile` takes minutes and real layers instead, and is better.

Measured are a product of one row with weights that fit no cache (reading), one of many rows (computing), both
again with packed weights, and what layers and passes cost without their weights (launching): on a CPU by the
kernels that slices use, on a GPU by torch. Numbers are rounded, so that boards that are alike look alike, and
the same board tomorrow as today.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from flowspec.core.protocol.model_spec import Dense, Heads, LayerSpec, ModelSpec, Rotary
from flowspec.core.protocol.precision import FILED, UNPACKED, is_packed
from flowspec.model.accelerator import Accelerator, accelerator_of
from flowspec.model.arithmetic.packed import FORMS, PANEL
from flowspec.model.engines import engine_of
from flowspec.model.families import FAMILIES
from flowspec.model.layer import Layer, Linear, Packed, Plain
from flowspec.model.slice import Slice
from flowspec.model.step_by_step import REQUEST, chain_of
from flowspec.model.weights import EMBEDDING, SliceParts, Span, held_bytes
from flowspec.plan.profile import EXPERT_SHARE_CPU, EXPERT_SHARE_GPU, DeviceProfile, KernelRates

RUNS, ENOUGH_S = 5, 0.05
"""Of each task the fastest of so many runs counts, or of those that so much time allows."""
COMPUTING_SHARE_MIN = 0.1
"""Of a product's time, should reading seem to take all of it."""
STEPS = 4
"""Rounding: so many steps to a factor of two."""
PACKED_FORMS = {"int4": "Q4_0", FILED: "Q4_K"}
"""As int4 packs matrices, and as most of a file in Q4_K_M are."""
PACKED_BYTE = 17
"""All bytes of what is packed: scales are then small numbers."""
TINY_WIDTH, TINY_LAYERS = 64, (2, 12)
"""Of models that are launched on a CPU: one layer more costs what a layer costs apart from its weights."""
LAUNCHING_S_MIN = 1e-7
"""Should the larger of them seem to take no longer."""
LAYER_OPERATIONS, PASS_OPERATIONS = 60, 100
"""Of torch on a GPU, in a layer, and in a pass outside its layers."""
Task = Callable[[], object]


class Sizes(NamedTuple):
    """Outputs and inputs of the matrices that are read, also of packed ones, and of those by which so many
    `rows` are computed."""

    read: tuple[int, int]
    packed: tuple[int, int]
    computed: tuple[int, int]
    rows: int


class _Cpu:
    """Computing comes on top of reading, as in devices/*.toml. Raises `InputError` without right kernels."""

    sizes = Sizes(read=(4096, 4096), packed=(7 * 4096, 4096), computed=(1024, 1024), rows=32)
    read_dtype, packed, serial, expert_share = "float32", tuple(PACKED_FORMS), 1.0, EXPERT_SHARE_CPU

    def product(self, dtype: str, rows: int, size: tuple[int, int]) -> tuple[Task, int]:
        """A product of rows with weights in a precision, and the bytes that these take."""
        engine, (outputs, inputs) = engine_of(dtype, "cpu", "weights"), size
        if is_packed(dtype):
            panels = np.full(_panels_shape(dtype, size), PACKED_BYTE, np.uint8)
            matrix: Packed | Plain = Packed(PACKED_FORMS[dtype], engine.array(panels), outputs)
        else:
            matrix = Plain(engine.cast(np.full(size, 0.5, np.float32)))
        run = engine.rows(linear=Linear(inputs=inputs, matrices=(matrix,)))
        given = engine.cast(np.full((rows, inputs), 0.5, np.float32))
        return partial(run, given), held_bytes(matrix)

    def overheads(self) -> tuple[float, float]:
        """Seconds that a layer takes apart from its weights, and a pass apart from its layers."""
        few, many = TINY_LAYERS
        few_s, many_s = (_fastest_s(_tiny_pass(layers)) for layers in TINY_LAYERS)
        layer_s = max((many_s - few_s) / (many - few), LAUNCHING_S_MIN)
        return layer_s, max(few_s - few * layer_s, LAUNCHING_S_MIN)


class _Gpu:
    """Reading and computing go on at the same time. Of packed precisions only what needs nothing but float32
    products is measured."""

    sizes = Sizes(read=(8192, 8192), packed=(4096, 4096), computed=(4096, 4096), rows=512)
    read_dtype, packed, serial, expert_share = "float16", (FILED,), 0.0, EXPERT_SHARE_GPU

    def __init__(self, here: Accelerator) -> None:
        import torch

        self._here, self._torch = here, torch

    def product(self, dtype: str, rows: int, size: tuple[int, int]) -> tuple[Task, int]:
        torch, (outputs, inputs) = self._torch, size
        if not is_packed(dtype):
            kind = getattr(torch, dtype)
            weights, numbers = self._full(size, kind), self._full((rows, inputs), kind)
            return partial(self._run, torch.nn.functional.linear, numbers, weights), weights.nbytes
        from flowspec.model.gpu import multiplied

        panels = self._full(_panels_shape(dtype, size), torch.uint8, PACKED_BYTE)
        linear = Linear(inputs=inputs, matrices=(Packed(PACKED_FORMS[dtype], panels, outputs),))
        numbers = self._full((rows, inputs), torch.float32)
        return partial(self._run, multiplied, numbers, linear), panels.nbytes

    def overheads(self) -> tuple[float, float]:
        small = self._full((1, 64), self._torch.float32)
        operation_s = _fastest_s(partial(self._run, _chain, small)) / LAYER_OPERATIONS
        return LAYER_OPERATIONS * operation_s, PASS_OPERATIONS * operation_s

    def _full(self, shape: tuple[int, ...], kind: Any, value: float = 0.5) -> Any:
        return self._torch.full(shape, value, dtype=kind, device=self._here.device)

    def _run(self, task: Callable[..., object], *given: Any) -> None:
        task(*given)
        self._here.wait()


def probe(device: str) -> DeviceProfile:
    """The device as a profile; its memory is left at a nominal 1 GB."""
    here = accelerator_of(device)
    measured = _Cpu() if here.is_cpu else _Gpu(here)
    sizes = measured.sizes
    byte_s = _reading_s(measured, measured.read_dtype, sizes.read)
    dtypes = [dtype for dtype in UNPACKED if dtype != "bfloat16" or here.has_bfloat16]
    tflops = {dtype: rounded(_tflops(measured, dtype, byte_s * measured.serial)) for dtype in dtypes}
    packed = {}
    for dtype in measured.packed:  # one row after the other, on a GPU, too
        packed_s = _reading_s(measured, dtype, sizes.packed)
        tflop = rounded(_tflops(measured, dtype, packed_s))
        packed[dtype] = KernelRates(gb_per_s=rounded(1e-9 / packed_s), tflops=tflop, serial=1.0)
    layer_s, pass_s = measured.overheads()
    return DeviceProfile(
        name=here.name,
        memory_gb=1.0,
        memory_gb_per_s=rounded(1e-9 / byte_s),
        memory_efficiency=1.0,
        tflops=tflops,
        compute_efficiency=1.0,
        serial=measured.serial,
        packed=packed,
        layer_us=rounded(1e6 * layer_s),
        expert_us=rounded(1e6 * measured.expert_share * layer_s),
        pass_us=rounded(1e6 * pass_s),
    )


def rounded(value: float) -> float:
    """The nearest of `STEPS` steps to a factor of two, with four digits."""
    return float(f"{2 ** (round(STEPS * math.log2(value)) / STEPS):.4g}")


def _reading_s(measured: _Cpu | _Gpu, dtype: str, size: tuple[int, int]) -> float:
    """Seconds for a byte of weights."""
    task, weight_bytes = measured.product(dtype, 1, size)
    return _fastest_s(task) / weight_bytes


def _tflops(measured: _Cpu | _Gpu, dtype: str, byte_s: float) -> float:
    """Of a product of many rows, without so much for each byte of its weights."""
    rows, size = measured.sizes.rows, measured.sizes.computed
    task, weight_bytes = measured.product(dtype, rows, size)
    spent_s = _fastest_s(task)
    spent_s = max(spent_s - byte_s * weight_bytes, COMPUTING_SHARE_MIN * spent_s)
    return 1e-12 * 2 * rows * math.prod(size) / spent_s


def _panels_shape(dtype: str, size: tuple[int, int]) -> tuple[int, int, int]:
    (outputs, inputs), form = size, FORMS[PACKED_FORMS[dtype]]
    return outputs // PANEL, inputs // form.unit, form.unit_bytes


def _tiny_pass(count: int) -> Task:
    """A row through so many layers that are too small to take time."""
    width, engine = TINY_WIDTH, engine_of("float32", "cpu", "weights")
    dense, heads = Dense(scale=width**-0.5, activation="silu", neurons=width), Heads(count=1, width=width)
    layers = [LayerSpec(heads=1, kv=heads, source=number, dense=dense) for number in range(count)]
    spec = ModelSpec(
        hidden=width,
        vocabulary=1,
        context_max=1,
        is_tied=True,
        rotaries=(Rotary(frequencies=(1.0,) * (width // 2)),),
        layers=tuple(layers),
    )
    shape, values = Layer(spec=layers[0], family=FAMILIES["llama"], hidden=width), dict[str, Any]()
    for name, parameter in shape.parameters().items():
        zeros = engine.zeros(parameter.shape, engine.dtype)
        values[name] = (Plain(zeros),) if parameter.role == "matrix" else zeros
    parts = SliceParts(dict.fromkeys(range(count), shape.parts(values, spec.eps, engine)))
    parts[EMBEDDING] = Plain(engine.zeros((1, width), engine.dtype))
    tiny = Slice(spec, Span(first=0, end=count, count=count + 1), parts, engine, engine.dtype)
    tiny.open_cache(REQUEST, 1)
    return partial(tiny.forward, chain_of([0]), None)


def _chain(small: Any) -> None:
    for _ in range(LAYER_OPERATIONS):
        small.add_(1)


def _fastest_s(task: Task) -> float:
    """The fastest of some runs after a first one: what else runs on a machine only ever adds time."""
    task()
    spent = list[float]()
    while len(spent) < RUNS and sum(spent) <= ENOUGH_S:
        started_s = time.perf_counter()
        task()
        spent.append(time.perf_counter() - started_s)
    return min(spent)
