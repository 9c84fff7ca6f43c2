"""Tries what a GPU computes with: `python -m flowspec.model.gpu_trial DTYPE DEVICE`.

In a process of its own: after some of CUDA's errors nothing works any more. Our own kernels (`canonical.cu`)
must have the bits of the definition; torch's products must be near to those in float64, and give a row the
same bits whatever rows run beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from flowspec.core.protocol.model_spec import NORMS
from flowspec.core.protocol.precision import ACTIVATIONS, FILED, is_packed
from flowspec.errors import InputError, first_line
from flowspec.model.accelerator import compute_precisely, is_out_of_memory
from flowspec.model.arithmetic import plain
from flowspec.model.arithmetic.cases import say
from flowspec.model.gpu import DTYPES, CudaLibrary, Gpu, arithmetic_of, array_of, cuda_library, tensor_of
from flowspec.model.layer import Linear, Plain
from flowspec.model.rounding import ROUNDINGS

SHAPES = ((64, 48), (512, 320), (2080, 34), (4096, 32))  # inputs, outputs; with a rest and without
ROW_COUNTS = (1, 2, 3, 5, 8, 16, 17, 31, 32, 129)
TOLERANCE = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}  # of the largest exact product
PACKED_TOLERANCE = 4e-2  # where rows are rounded, too
WIDTHS = (1, 5, 64, 100, 896)


def main() -> None:
    dtype, device = sys.argv[1:]
    compute_precisely()  # as slices are computed
    say(share=0.0)
    try:
        arithmetic = arithmetic_of(dtype, device)
        fault = _library_fault(device) or product_fault(dtype, arithmetic, device)
    except InputError as error:
        say(fault=str(error))
    except (RuntimeError, MemoryError) as error:  # how torch tells what it cannot do here
        say(fault=f"it fails: {first_line(error)}", may_pass=is_out_of_memory(error))
    else:
        say(fault=fault, arithmetics=[arithmetic])


def _library_fault(device: str) -> str:
    try:
        return library_fault(cuda_library(device), torch.device(device))
    except OSError:  # torch's operations take its place, and have the same bits
        return ""


@torch.inference_mode()
def library_fault(library: CudaLibrary, device: torch.device) -> str:
    """Where it gives other bits than the definitions, or nothing."""
    for name, given in _calls(torch.Generator().manual_seed(1)):
        say(share=0.1)
        there = _copied(given, device)
        found, expected = (getattr(of, name)(*own) for of, own in ((library, there), (plain, given)))
        changed = zip(there[3][:2], given[3][:2], strict=True) if name == "store" else [(found, expected)]
        for one, right in changed:
            if not torch.equal(_bits(one.cpu()), _bits(right)):
                return f"its {name} in {right.dtype} differs from the definition"
    return ""


def _copied(given: Any, device: torch.device) -> Any:
    """Tensors, also of tuples, to a device."""
    if isinstance(given, tuple):
        return tuple(_copied(each, device) for each in given)
    return given.to(device, copy=True) if isinstance(given, torch.Tensor) else given


def _calls(generator: torch.Generator) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Names of functions of `plain`, and what these are given."""

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    numbers = torch.cat([20 * some(1007), torch.tensor([0.0, -86.1, 89.0, torch.inf, -torch.inf])])
    for function in plain.FUNCTIONS:
        yield "function", (numbers, function)
    for width in WIDTHS:
        rows, weights = some(7, width), some(width)
        for how in NORMS:
            yield "norm", (rows, weights, 1e-6, how)
    yield "turned", (some(7, 3, 24), some(1, 7, 16), some(1, 7, 16))
    for dtype in DTYPES.values():  # of what is held
        for width, cap, has_sinks in ((8, 0.0, False), (80, 30.0, False), (24, 0.0, True)):
            keys, values = some(2, 6, width, 16).to(dtype), some(2, 96, -(-width // 16) * 16).to(dtype)
            paths = torch.stack([torch.randperm(96, generator=generator)[:70] for _ in range(5)])
            paths[:, 30:40] = -1
            held, sinks = (keys, values, None), some(4) if has_sinks else None
            yield "attention", (some(5, 4, width), held, paths, width**-0.5, cap, sinks)
            yield "store", (torch.tensor([17, 0, 5, 31, 90]), some(2, 5, width), some(2, 5, width), held)
    for inputs, outputs in ((1, 3), (64, 40), (2880, 33)):
        rows, weights = some(3, inputs), some(outputs, inputs)
        yield "product", (rows, weights)
        yield "softmax", (rows,)


def _bits(x: torch.Tensor) -> torch.Tensor:
    """By which what is no number is equal to its like."""
    return torch.nan_to_num(x.float(), nan=1e4, posinf=3e38, neginf=-3e38)


@torch.inference_mode()
def product_fault(dtype: str, arithmetic: str, device: str) -> str:
    """What is wrong with the products of a precision, or nothing."""
    generator, activations = torch.Generator().manual_seed(1), ACTIVATIONS[dtype]
    own, engine = DTYPES[activations], Gpu(dtype, arithmetic, "weights", device)
    for place, (inputs, outputs) in enumerate(SHAPES):
        say(share=0.2 + 0.2 * place)
        weights = torch.randn((outputs, inputs), generator=generator) * inputs**-0.5
        rows = torch.randn((max(ROW_COUNTS), inputs), generator=generator).to(own)
        if is_packed(dtype):
            how = ROUNDINGS["int4" if dtype == FILED else dtype]  # which is one of the forms that files have
            panels = how.round(array_of(weights))
            weights = tensor_of(how.widen(panels, outputs, inputs))
            matrix = engine.packed_matrix(how.form, panels, outputs)
        else:
            matrix = Plain(weights.to(own).to(device))
        multiply = engine.rows(linear=Linear(inputs=inputs, matrices=(matrix,)))
        there, whole = rows.to(device), None
        for count in sorted(ROW_COUNTS, reverse=True):
            found = multiply(there[:count])
            if whole is None:
                whole, exact = found, rows.double() @ weights.double().T
                most = PACKED_TOLERANCE if is_packed(dtype) else TOLERANCE[activations]
                if (found.cpu().double() - exact).abs().max() > most * exact.abs().max():
                    return f"its product of {inputs} x {outputs} is not what it should be"
            elif not torch.equal(found, whole[:count]):
                return f"it makes a row depend on the rows beside it, {count} of {inputs} x {outputs}"
    return ""


if __name__ == "__main__":
    main()
