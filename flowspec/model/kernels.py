"""What multiplies the matrices of a precision, by its *arithmetic*: a name of the bits that it computes.

Devices that compute one model together agree on one. On CPUs all are our own, with the same bits everywhere
(`trials.py`). On GPUs it is torch that computes: the name says what its bits depend on.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from flowspec.core.protocol.precision import FILED, Q8_0, is_packed
from flowspec.errors import InputError, first_line
from flowspec.model.accelerator import accelerator_of
from flowspec.model.arithmetic import compiled_cuda
from flowspec.model.gguf_layers import GgufLinear, PlainGgufLinear
from flowspec.model.products import Product, in_blocks, lanes16, pairs16
from flowspec.model.quantised import (
    LINEARS,
    PanelInt4Linear,
    PanelInt8Linear,
    PlainInt4Linear,
    QuantisedLinear,
)
from flowspec.model.quantised_cuda import INT4_CAPABILITY, CudaInt4Linear, CudaInt8Linear
from flowspec.model.trials import DIGITS, GROUPS32, LANES16, PAIRS16, run_trial

log = logging.getLogger("flowspec.kernels")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Of what is not packed, by name."""
CACHE_DTYPES = {**DTYPES, Q8_0: torch.int8}
"""Of keys and values, by how they are held."""
Packing = type[QuantisedLinear] | type[GgufLinear]
"""What packs the matrices of linear layers, or keeps them as a file packs them."""
PACKINGS: dict[str, Packing] = {**LINEARS, FILED: GgufLinear}
"""By precision, as on most devices."""
_SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One way to multiply the matrices of a precision: `linear` packs them (None: they stay as they are),
    `product` multiplies those that it does not pack. Both give the same bits for a row whatever rows run
    beside it."""

    arithmetic: str
    linear: Packing | None = None
    product: Product = lanes16


_CPU: dict[str, tuple[Kernel, ...]] = {
    "int8": (Kernel(arithmetic=DIGITS, linear=PanelInt8Linear),),
    "int4": (Kernel(arithmetic=GROUPS32, linear=PanelInt4Linear),),
    FILED: (Kernel(arithmetic=GROUPS32, linear=GgufLinear),),
    "bfloat16": (Kernel(arithmetic=PAIRS16, product=pairs16), Kernel(arithmetic=LANES16)),
}


def kernels_of(dtype: str, device: torch.device) -> tuple[Kernel, ...]:
    """Those of a precision, the best first. Raises `InputError` where there is none."""
    if device.type == "cpu":
        return _CPU.get(dtype, (Kernel(arithmetic=LANES16),))
    if is_packed(dtype) and device.type != "cuda":
        raise InputError(f"{dtype} runs on CPUs and CUDA, not on {device.type}; use --dtype bfloat16")
    if dtype == "int8":
        return (Kernel(arithmetic=DIGITS, linear=CudaInt8Linear, product=in_blocks),)
    if dtype == "int4" and (accelerator_of(device).capability or (0, 0)) >= INT4_CAPABILITY:
        return (_of_gpu("tinygemm", dtype, device, CudaInt4Linear),)
    if is_packed(dtype):
        return (_of_gpu("plain", dtype, device, PlainInt4Linear if dtype == "int4" else PlainGgufLinear),)
    return (_of_gpu("torch-in-blocks", dtype, device, None),)


def _of_gpu(name: str, dtype: str, device: torch.device, linear: Packing | None) -> Kernel:
    """Bits of torch belong to its version and to what the GPU can do."""
    version = ".".join(torch.__version__.split("+")[0].split(".")[:2])
    arithmetic = f"{name}-{_SHORT.get(dtype, dtype)}@{capability(device)}-torch{version}"
    return Kernel(arithmetic=arithmetic, linear=linear, product=in_blocks)


def capability(device: torch.device) -> str:
    """What of a GPU decides which code torch runs there: `sm87`."""
    if device.type != "cuda":
        return device.type
    major, minor = accelerator_of(device).capability or (0, 0)
    return f"sm{major}{minor}"


def kernel_of(dtype: str, device: torch.device, arithmetic: str = "") -> Kernel:
    """What multiplies a model's matrices in this precision: the best that computes this `arithmetic` (empty:
    of all) there. Raises `InputError` where nothing does."""
    trial = run_trial(dtype, str(device))
    trial.check(arithmetic)
    if device.type == "cuda" and compiled_cuda.library(device) is None:
        try:
            allow_gpu_library(device)
        except OSError as error:  # torch's operations have the same bits
            log.warning(
                "kernels for %s cannot be built: %s; torch's operations take their place, which is slower",
                device,
                first_line(error),
            )
    wanted = arithmetic or trial.arithmetics[0]
    return next(kernel for kernel in kernels_of(dtype, device) if kernel.arithmetic == wanted)


def allow_gpu_library(device: torch.device) -> compiled_cuda.CudaLibrary:
    """Builds `canonical.cu` for a GPU, and has this process use it there. Raises `OSError` where it cannot be
    built."""
    module = compiled_cuda.CudaModule(device, accelerator_of(device).capability or (0, 0))
    library = compiled_cuda.CudaLibrary(module)
    compiled_cuda.allow(device, library)
    return library


def packing_of(dtype: str, device: torch.device, arithmetic: str = "") -> Packing | None:
    """What packs the linear layers of a model for `kernel_of`; None where they stay as they are."""
    return kernel_of(dtype, device, arithmetic).linear
