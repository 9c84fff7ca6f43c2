"""What can multiply the matrices of a precision. A process uses the first that is right where it runs.

Nothing is used because of its name. An engine that is called `x86` was seen in builds of torch for ARM,
where it runs instructions that a Raspberry Pi lacks; another gives right results for the first number of
rows that it meets, and garbage for all others.

Each kernel states its *arithmetic*, a name of the bits that it computes. Kernels of one arithmetic give the
same bits, so a process uses the fastest of them, and devices that compute one model together agree on one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flowspec.core.protocol.precision import FILED, Q8_0, is_packed
from flowspec.errors import InputError, first_line
from flowspec.model.accelerator import accelerator_of
from flowspec.model.arithmetic import compiled, compiled_cuda
from flowspec.model.gguf_layers import GgufLinear, PlainGgufLinear
from flowspec.model.half import (
    FbgemmHalfLinear,
    PlainHalfLinear,
    has_instructions,
    has_products,
    has_tiles,
)
from flowspec.model.products import Product, filled, in_blocks, lanes16, pairs16, row_by_row
from flowspec.model.quantised import (
    LINEARS,
    PanelInt4Linear,
    PanelInt8Linear,
    PlainInt4Linear,
    PlainInt8Linear,
    QuantisedLinear,
)
from flowspec.model.quantised_cuda import INT4_CAPABILITY, CudaInt4Linear, CudaInt8Linear
from flowspec.model.trials import run_trial, tried

log = logging.getLogger("flowspec.kernels")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CACHE_DTYPES = {**DTYPES, Q8_0: torch.int8}
"""Of keys and values, by how they are held."""
"""Of what is not packed, by name."""
Packing = type[QuantisedLinear] | type[GgufLinear]
"""What packs the matrices of linear layers, or keeps them as a file packs them."""
PACKINGS: dict[str, Packing] = {**LINEARS, FILED: GgufLinear}
"""By precision, as on most devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One way to multiply the matrices of a precision.

    `linear` packs them (None: they stay as they are), `product` multiplies those that it does not pack. Both
    give the same bits for a row whatever rows run beside it; each is held to that before it is used.

    `arithmetic` names its bits. One with an `@` has those of a processor and a torch: what its trial computed
    is hashed, and the hash ends the name (`kernel_checks.py`).
    """

    name: str
    linear: Packing | None = None
    product: Product = filled
    arithmetic: str


LANES16 = "lanes16"
"""The arithmetic of our own products: the same bits on every processor that has a compiler."""
PAIRS16 = "pairs16"
"""The arithmetic of our own products of bfloat16 in pairs: the same bits on every processor that has the
instruction, since the trial holds it to a definition."""
DIGITS = "digits"
"""The arithmetic of int8: products and sums of integers, the same bits everywhere."""
GROUPS32 = "groups32"
"""The arithmetic of int4 and of packed GGUF files: rows and weights are rounded in groups of 32, of which
each is summed in integers: the same bits on every processor, with or without a compiler."""
_PLAIN_INT8 = Kernel(name="plain", linear=PlainInt8Linear, arithmetic=DIGITS)
"""Needs float32 products only, on whatever device."""
_SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def kernels_of(dtype: str, device: torch.device) -> tuple[Kernel, ...]:
    """Those that this torch has for a precision, the best first.

    The last one of a packed precision needs nothing but float32. Raises `InputError` where there is none.
    """
    if device.type == "cpu":
        return _cpu_kernels(dtype)
    if not is_packed(dtype):
        arithmetic = _local("torch-in-blocks", dtype, device)
        return (Kernel(name="torch-in-blocks", product=in_blocks, arithmetic=arithmetic),)
    if device.type != "cuda":
        raise InputError(f"{dtype} runs on CPUs and CUDA, not on {device.type}; use --dtype bfloat16")
    if dtype == FILED:
        return (Kernel(name="plain", linear=PlainGgufLinear, arithmetic=_local("plain", dtype, device)),)
    if dtype == "int8":
        by_gpu = Kernel(name="torch._int_mm", linear=CudaInt8Linear, arithmetic=DIGITS)
        return (by_gpu, _PLAIN_INT8)
    plain = Kernel(name="plain", linear=PlainInt4Linear, arithmetic=_local("plain", dtype, device))
    if (accelerator_of(device).capability or (0, 0)) < INT4_CAPABILITY:
        return (plain,)
    arithmetic = _local("tinygemm", dtype, device)
    return (Kernel(name="tinygemm", linear=CudaInt4Linear, arithmetic=arithmetic), plain)


def _cpu_kernels(dtype: str) -> tuple[Kernel, ...]:
    engines, cpu = _engines(), torch.device("cpu")
    if dtype == "int8":
        panels = Kernel(name="panels", linear=PanelInt8Linear, arithmetic=DIGITS)
        return (panels, _PLAIN_INT8) if compiled.library() else (_PLAIN_INT8,)
    if dtype == "int4":
        return (Kernel(name="panels", linear=PanelInt4Linear, arithmetic=GROUPS32),)
    if dtype == FILED:
        return (Kernel(name="panels", linear=GgufLinear, arithmetic=GROUPS32),)
    torch_own = Kernel(name="torch", arithmetic=_local("torch", dtype, cpu))
    lanes = (Kernel(name=LANES16, product=lanes16, arithmetic=LANES16),) if compiled.library() else ()
    if dtype == "float32":
        if lanes:
            return (*lanes, torch_own)
        arithmetic = _local("torch-row-by-row", dtype, cpu)
        return (torch_own, Kernel(name="torch-row-by-row", product=row_by_row, arithmetic=arithmetic))
    plain = Kernel(name="plain", linear=PlainHalfLinear, arithmetic=_plain_arithmetic(dtype))
    pairs: tuple[Kernel, ...] = ()
    if dtype == "bfloat16" and (library := compiled.library()) is not None and library.has_pairs:
        pairs = (Kernel(name=PAIRS16, product=pairs16, arithmetic=PAIRS16),)
    if has_tiles(dtype):
        return (*pairs, *lanes, plain)  # torch's sums in tiles depend on how many rows run
    if has_products(dtype):
        return (*pairs, torch_own, *lanes, plain)
    fbgemm: tuple[Kernel, ...] = ()
    if (
        "fbgemm" in engines
        and hasattr(torch.ops.quantized, "linear_prepack_fp16")
        and not has_instructions(dtype)
    ):
        arithmetic = _local(
            "fbgemm", dtype, cpu
        )  # with torch's own layers where it would take too much memory
        fbgemm = (Kernel(name="fbgemm", linear=FbgemmHalfLinear, arithmetic=arithmetic),)
    return (*lanes, *fbgemm, torch_own, plain)


def _plain_arithmetic(dtype: str) -> str:
    """Of kernels that widen weights and leave the product to `float_product`, on a CPU."""
    return LANES16 if compiled.library() else _local("plain", dtype, torch.device("cpu"))


def _local(kernel: str, dtype: str, device: torch.device) -> str:
    """The arithmetic of a kernel whose bits belong to what the processor can do, and to torch's version."""
    version = ".".join(torch.__version__.split("+")[0].split(".")[:2])
    return f"{kernel}-{_SHORT.get(dtype, dtype)}@{capability(device)}-torch{version}"


def capability(device: torch.device) -> str:
    """What of a processor decides which code torch runs there: `avx2`, `avx512_bf16`, `default`, `sm87`."""
    if device.type == "cuda":
        major, minor = accelerator_of(device).capability or (0, 0)
        return f"sm{major}{minor}"
    if device.type != "cpu":
        return device.type
    level = torch.backends.cpu.get_cpu_capability().lower().replace(" ", "_")
    flags = (("amx", "_is_amx_tile_supported"), ("bf16", "_is_avx512_bf16_supported"))
    there = [
        flag for flag, name in flags if (asked := getattr(torch.cpu, name, None)) is not None and asked()
    ]
    return "_".join([level, *there])


def _engines() -> Sequence[str]:
    """What this torch was built with; which of it runs right is another question."""
    found: Sequence[str] = torch.backends.quantized.supported_engines
    return found


def kernel_of(dtype: str, device: torch.device, arithmetic: str = "") -> Kernel:
    """What multiplies a model's matrices in this precision: the best that computes this `arithmetic` (empty:
    of all) there.

    The first use of a precision on a device tries its kernels, which takes some seconds. Raises `InputError`
    for a device that has no right one.
    """
    trial = tried(dtype, str(device))
    if trial.kernel_of(arithmetic) not in [kernel.name for kernel in kernels_of(dtype, device)]:
        trial = run_trial(dtype, str(device), is_anew=True)
    if trial.has_compiled_for_gpu and compiled_cuda.library(device) is None:
        try:
            allow_gpu_library(device)
        except OSError as error:  # torch's operations have the same bits
            log.warning(
                "kernels for %s were built when they were tried, and cannot be now: %s; torch's operations "
                "take their place, which is slower",
                device,
                first_line(error),
            )
    name = trial.kernel_of(arithmetic)
    return next(kernel for kernel in kernels_of(dtype, device) if kernel.name == name)


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
