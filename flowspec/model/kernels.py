"""What can multiply the matrices of a precision. A process uses the first that is right where it runs.

Nothing is used because of its name. An engine that is called `x86` was seen in builds of torch for ARM,
where it runs instructions that a Raspberry Pi lacks; another gives right results for the first number of
rows that it meets, and garbage for all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flowspec.errors import InputError
from flowspec.model.accelerator import accelerator_of
from flowspec.model.half import FbgemmHalfLinear, PlainHalfLinear, has_instructions
from flowspec.model.quantised import (
    OnednnInt8Linear,
    PlainInt4Linear,
    PlainInt8Linear,
    QnnpackInt8Linear,
    QuantisedLinear,
    TorchInt4Linear,
    X86Int8Linear,
)
from flowspec.model.quantised_cuda import INT4_CAPABILITY, CudaInt4Linear, CudaInt8Linear
from flowspec.model.trials import tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One way to multiply the matrices of a precision.

    `linear` packs them (None: torch's own layers, as they are). `rows_alone`: it promises the same bits for a
    row whatever rows run beside it.
    """

    name: str
    linear: type[QuantisedLinear] | None
    rows_alone: bool


_TORCH = Kernel(name="torch", linear=None, rows_alone=False)
_PLAIN_INT8 = Kernel(name="plain", linear=PlainInt8Linear, rows_alone=True)
_PLAIN_INT4 = Kernel(name="plain", linear=PlainInt4Linear, rows_alone=False)
"""These two need float32 products only, on whatever device."""
_INT8 = (
    Kernel(name="x86", linear=X86Int8Linear, rows_alone=True),
    Kernel(name="qnnpack", linear=QnnpackInt8Linear, rows_alone=True),
    Kernel(name="onednn", linear=OnednnInt8Linear, rows_alone=True),
)
"""Engines of torch; it says which ones it was built with."""


def kernels_of(dtype: str, device: torch.device) -> tuple[Kernel, ...]:
    """Those that this torch has for a precision, the best first.

    The last one of a packed precision needs nothing but float32. Raises `InputError` where there is none.
    """
    if device.type == "cpu":
        return _cpu_kernels(dtype)
    if dtype not in ("int8", "int4"):
        return (_TORCH,)
    if device.type != "cuda":
        raise InputError(f"{dtype} runs on CPUs and CUDA, not on {device.type}; use --dtype bfloat16")
    if dtype == "int8":
        return (Kernel(name="torch._int_mm", linear=CudaInt8Linear, rows_alone=True), _PLAIN_INT8)
    if (accelerator_of(device).capability or (0, 0)) < INT4_CAPABILITY:
        return (_PLAIN_INT4,)
    return (Kernel(name="tinygemm", linear=CudaInt4Linear, rows_alone=True), _PLAIN_INT4)


def _cpu_kernels(dtype: str) -> tuple[Kernel, ...]:
    engines = _engines()
    if dtype == "int8":
        built_in = tuple(kernel for kernel in _INT8 if kernel.name in engines)
        return (*built_in, _PLAIN_INT8)
    if dtype == "int4":
        own = Kernel(name="torch", linear=TorchInt4Linear, rows_alone=True)
        return (own, _PLAIN_INT4)
    if dtype == "float32":
        return (_TORCH,)
    plain = Kernel(name="plain", linear=PlainHalfLinear, rows_alone=False)
    has_fbgemm = "fbgemm" in engines and hasattr(torch.ops.quantized, "linear_prepack_fp16")
    if has_fbgemm and not has_instructions(dtype):
        return (Kernel(name="fbgemm", linear=FbgemmHalfLinear, rows_alone=True), _TORCH, plain)
    return (_TORCH, plain)


def _engines() -> Sequence[str]:
    """What this torch was built with; which of it runs right is another question."""
    found: Sequence[str] = torch.backends.quantized.supported_engines
    return found


def packing_of(dtype: str, device: torch.device) -> type[QuantisedLinear] | None:
    """What packs the linear layers of a model in this precision; None where torch runs them well as they are.

    The first use of a precision on a device tries its kernels, which takes some seconds. Raises `InputError`
    for a device that has no right one.
    """
    kernels = {kernel.name: kernel for kernel in kernels_of(dtype, device)}
    return kernels[tried(dtype, str(device)).kernel].linear
