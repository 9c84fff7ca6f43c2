"""A short look at how fast this machine is, for daemons whose board nobody measured: under half a second once
torch is there.

Measured are a product of one row with weights that fit no cache (reading), one of many rows (computing),
both again with packed weights by the kernels that slices use, and a chain of tiny operations (launching).
`flowspec profile` takes minutes and real layers instead, and is the better profile. Numbers are rounded to
steps of a fifth, so that boards that are alike look alike, and the same board tomorrow as today.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import nn

from flowspec.core.protocol.precision import FILED
from flowspec.model.accelerator import Accelerator, accelerator_of
from flowspec.model.arithmetic.packed import FORMS, PANEL
from flowspec.model.gguf_layers import GgufLinear, Part, PlainGgufLinear, stay_packed
from flowspec.plan.profile import EXPERT_SHARE_CPU, EXPERT_SHARE_GPU, DeviceProfile, KernelRates

RUNS, ENOUGH_S = 5, 0.05
"""Of each product the fastest of so many runs counts, or of those that so much time allows."""
WIDTH_READ = {"cpu": 4096, "gpu": 8192}
"""64 and 128 MiB of weights."""
WIDTH_COMPUTE, ROWS = {"cpu": 1024, "gpu": 4096}, {"cpu": 32, "gpu": 512}
LAYER_OPERATIONS, PASS_OPERATIONS = 60, 100
"""Operations of torch in a layer and beside the layers, as devices/*.toml estimate them."""
STEPS = 4
"""Rounding: so many steps to a factor of two."""
COMPUTING_SHARE_MIN = 0.1
"""Of a product's time, should reading seem to take all of it."""
READ_DTYPE = {"cpu": torch.float32, "gpu": torch.float16}
PACKED_FORMS = {"int4": "Q4_0", FILED: "Q4_K"}
"""As int4 packs matrices, and as most of a file in Q4_K_M are."""
PACKED_WIDTH = 4096
PACKED_OUTPUTS = {"cpu": 7 * PACKED_WIDTH, "gpu": PACKED_WIDTH}
"""Of what is read: 64 MiB and more on CPUs. On a GPU the kernel unpacks to numbers, which fit no cache."""
PACKED_BYTE = 17
"""All bytes of what is packed: scales are then small numbers."""


@torch.inference_mode()
def probe(device: torch.device) -> DeviceProfile:
    """The device as a profile; its memory is left at a nominal 1 GB. On CPUs computing comes on top of
    reading, as in devices/*.toml."""
    here = accelerator_of(device)
    kind = "cpu" if here.is_cpu else "gpu"
    byte_s = _reading_s(here, kind)
    tflops = {
        str(dtype).removeprefix("torch."): _tflops(here, kind, dtype, byte_s) for dtype in _dtypes(here)
    }
    packed = {dtype: _packed_rates(here, kind, dtype) for dtype in _packed_dtypes(here)}
    operation_s = _operation_s(here)
    expert_share = EXPERT_SHARE_CPU if here.is_cpu else EXPERT_SHARE_GPU
    return DeviceProfile(
        name=here.name,
        memory_gb=1.0,
        memory_gb_per_s=rounded(1e-9 / byte_s),
        memory_efficiency=1.0,
        tflops={name: rounded(value) for name, value in tflops.items()},
        compute_efficiency=1.0,
        serial=1.0 if here.is_cpu else 0.0,
        packed=packed,
        layer_us=rounded(1e6 * LAYER_OPERATIONS * operation_s),
        expert_us=rounded(1e6 * expert_share * LAYER_OPERATIONS * operation_s),
        pass_us=rounded(1e6 * PASS_OPERATIONS * operation_s),
    )


def rounded(value: float) -> float:
    """The nearest of `STEPS` steps to a factor of two, with four digits."""
    return float(f"{2 ** (round(STEPS * math.log2(value)) / STEPS):.4g}")


def _dtypes(here: Accelerator) -> tuple[torch.dtype, ...]:
    """bfloat16 is left out where a GPU would only emulate it."""
    always = (torch.float32, torch.float16)
    return (*always, torch.bfloat16) if here.has_bfloat16 else always


def _reading_s(here: Accelerator, kind: str) -> float:
    """Seconds for a byte of weights."""
    width, dtype = WIDTH_READ[kind], READ_DTYPE[kind]
    weights = torch.full((width, width), 0.5, dtype=dtype, device=here.device)
    row = torch.full((1, width), 0.5, dtype=dtype, device=here.device)
    return _fastest_s(lambda: torch.nn.functional.linear(row, weights), here) / weights.nbytes


def _tflops(here: Accelerator, kind: str, dtype: torch.dtype, byte_s: float) -> float:
    """Of a product of many rows, what reading its weights takes left out where a CPU does one after the
    other."""
    width, count = WIDTH_COMPUTE[kind], ROWS[kind]
    weights = torch.full((width, width), 0.5, dtype=dtype, device=here.device)
    rows = torch.full((count, width), 0.5, dtype=dtype, device=here.device)
    spent_s = _fastest_s(lambda: torch.nn.functional.linear(rows, weights), here)
    if kind == "cpu":
        spent_s = max(spent_s - byte_s * weights.nbytes, COMPUTING_SHARE_MIN * spent_s)
    return 1e-12 * 2 * count * width * width / spent_s


def _packed_dtypes(here: Accelerator) -> tuple[str, ...]:
    """Packed precisions whose kernel is known to be right: the library's, which was tried, and on CUDA what
    needs nothing but float32 products."""
    if here.is_cpu:
        return tuple(PACKED_FORMS)
    return (FILED,) if here.device.type == "cuda" else ()


def _packed_rates(here: Accelerator, kind: str, dtype: str) -> KernelRates:
    """Of packed weights, in bytes as they lie in memory. One row after the other, as our kernels compute them
    on CPUs and the plain one does on a GPU."""
    outputs, width, count = PACKED_OUTPUTS[kind], WIDTH_COMPUTE[kind], ROWS[kind]
    read, read_bytes = _packed_layer(here, dtype, PACKED_WIDTH, outputs)
    row = torch.full((1, PACKED_WIDTH), 0.5, dtype=torch.bfloat16, device=here.device)
    byte_s = _fastest_s(lambda: read(row), here) / read_bytes
    many, many_bytes = _packed_layer(here, dtype, width, width)
    rows = torch.full((count, width), 0.5, dtype=torch.bfloat16, device=here.device)
    spent_s = _fastest_s(lambda: many(rows), here)
    spent_s = max(spent_s - byte_s * many_bytes, COMPUTING_SHARE_MIN * spent_s)
    tflops = 1e-12 * 2 * count * width * width / spent_s
    return KernelRates(gb_per_s=rounded(1e-9 / byte_s), tflops=rounded(tflops), serial=1.0)


def _packed_layer(here: Accelerator, dtype: str, inputs: int, outputs: int) -> tuple[nn.Linear, int]:
    """A layer with packed weights, and what these take."""
    form = FORMS[PACKED_FORMS[dtype]]
    shape = outputs // PANEL, inputs // form.unit, form.unit_bytes
    panels = torch.full(shape, PACKED_BYTE, dtype=torch.uint8, device=here.device)
    layer = nn.Linear(inputs, outputs, bias=False, device="meta")
    part = Part(PACKED_FORMS[dtype], panels, outputs)
    stay_packed(layer, (part,), GgufLinear if here.is_cpu else PlainGgufLinear, torch.bfloat16)
    return layer, panels.nbytes


def _operation_s(here: Accelerator) -> float:
    small = torch.zeros(1, 64, device=here.device)

    def run() -> None:
        for _ in range(LAYER_OPERATIONS):
            small.add_(1)

    return _fastest_s(run, here) / LAYER_OPERATIONS


def _fastest_s(task: Callable[[], object], here: Accelerator) -> float:
    """The fastest of some runs after a first one: what else runs on a machine only ever adds time."""
    found, begun_s = [], time.perf_counter()
    for number in range(RUNS + 1):
        started_s = time.perf_counter()
        task()
        here.wait()
        ended_s = time.perf_counter()
        if number:
            found.append(ended_s - started_s)
        if found and ended_s - begun_s > ENOUGH_S:
            break
    return min(found)
