"""A short look at how fast this machine is, for daemons whose board nobody measured: under half a second once torch is there.

Measured are a product of one row with weights that fit no cache (reading), one of many rows (computing), and a chain of tiny operations
(launching). `flowspec profile` takes minutes and real layers instead, and is the better profile. Numbers are rounded to steps of a
fifth, so that boards that are alike look alike, and the same board tomorrow as today.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable

import torch

from flowspec.plan.profile import DeviceProfile

RUNS, ENOUGH_S = 5, 0.05
"""Of each product the fastest of so many runs counts, or of those that so much time allows."""
WIDTH_READ = {"cpu": 4096, "cuda": 8192}
"""64 and 128 MiB of weights."""
WIDTH_COMPUTE, ROWS = {"cpu": 1024, "cuda": 4096}, {"cpu": 32, "cuda": 512}
LAYER_OPERATIONS, PASS_OPERATIONS = 60, 100
"""Operations of torch in a layer and beside the layers, as devices/*.toml estimate them."""
STEPS = 4
"""Rounding: so many steps to a factor of two."""
COMPUTING_SHARE_MIN = 0.1
"""Of a product's time, should reading seem to take all of it."""
READ_DTYPE = {"cpu": torch.float32, "cuda": torch.float16}


@torch.inference_mode()
def probe(device: torch.device) -> DeviceProfile:
    """The device as a profile; its memory is left at a nominal 1 GB. On CPUs computing comes on top of reading, as in devices/*.toml."""
    kind = "cuda" if device.type == "cuda" else "cpu"
    byte_s = _reading_s(device, kind)
    tflops = {str(dtype).removeprefix("torch."): _tflops(device, kind, dtype, byte_s) for dtype in _dtypes(kind)}
    operation_s = _operation_s(device)
    return DeviceProfile(
        name=torch.cuda.get_device_name(device) if kind == "cuda" else f"{platform.machine()} CPU",
        memory_gb=1.0,
        memory_gb_per_s=rounded(1e-9 / byte_s),
        memory_efficiency=1.0,
        tflops={name: rounded(value) for name, value in tflops.items()},
        compute_efficiency=1.0,
        serial=0.0 if kind == "cuda" else 1.0,
        layer_us=rounded(1e6 * LAYER_OPERATIONS * operation_s),
        pass_us=rounded(1e6 * PASS_OPERATIONS * operation_s),
    )


def rounded(value: float) -> float:
    """The nearest of `STEPS` steps to a factor of two, with four digits."""
    return float(f"{2 ** (round(STEPS * math.log2(value)) / STEPS):.4g}")


def _dtypes(kind: str) -> tuple[torch.dtype, ...]:
    """bfloat16 is left out where a GPU would only emulate it."""
    if kind == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return (torch.float32, torch.float16)
    return (torch.float32, torch.float16, torch.bfloat16)


def _reading_s(device: torch.device, kind: str) -> float:
    """Seconds for a byte of weights."""
    width, dtype = WIDTH_READ[kind], READ_DTYPE[kind]
    weights = torch.full((width, width), 0.5, dtype=dtype, device=device)
    row = torch.full((1, width), 0.5, dtype=dtype, device=device)
    return _fastest_s(lambda: torch.nn.functional.linear(row, weights), device) / weights.nbytes


def _tflops(device: torch.device, kind: str, dtype: torch.dtype, byte_s: float) -> float:
    """Of a product of many rows, what reading its weights takes left out where a CPU does one after the other."""
    width, count = WIDTH_COMPUTE[kind], ROWS[kind]
    weights = torch.full((width, width), 0.5, dtype=dtype, device=device)
    rows = torch.full((count, width), 0.5, dtype=dtype, device=device)
    spent_s = _fastest_s(lambda: torch.nn.functional.linear(rows, weights), device)
    if kind == "cpu":
        spent_s = max(spent_s - byte_s * weights.nbytes, COMPUTING_SHARE_MIN * spent_s)
    return 1e-12 * 2 * count * width * width / spent_s


def _operation_s(device: torch.device) -> float:
    small = torch.zeros(1, 64, device=device)

    def run() -> None:
        for _ in range(LAYER_OPERATIONS):
            small.add_(1)

    return _fastest_s(run, device) / LAYER_OPERATIONS


def _fastest_s(task: Callable[[], object], device: torch.device) -> float:
    """The fastest of some runs after a first one: what else runs on a machine only ever adds time."""
    found, begun_s = [], time.perf_counter()
    for number in range(RUNS + 1):
        started_s = time.perf_counter()
        task()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        ended_s = time.perf_counter()
        if number:
            found.append(ended_s - started_s)
        if found and ended_s - begun_s > ENOUGH_S:
            break
    return min(found)
