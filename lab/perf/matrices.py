"""How long a matrix takes in each precision, by the rows that are multiplied at once: `python -m
lab.perf.matrices`.

All precisions take turns, and so do the forms in which GGUF files pack matrices (`--forms Q4_0,Q4_K`);
matrices are more than a cache holds, and the least time counts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from flowspec.bench.random_panels import random_panels
from flowspec.core.protocol.precision import ACTIVATIONS, FILED
from flowspec.model.arithmetic.packed import FORMS
from flowspec.model.gguf_layers import GgufLinear, Part, stay_packed
from flowspec.model.kernels import DTYPES, kernel_of
from flowspec.model.quantised import QuantisedLinear, quantise
from flowspec.model.trials import run_trial

MATRIX_BYTES = 256 << 20
"""So many bytes of float32 are multiplied before the same matrix comes again."""
Product = Callable[[torch.Tensor, int], Any]
"""Of rows `[rows, in]` by the matrix of that number."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=4096)
    parser.add_argument("--outputs", type=int, default=4096)
    parser.add_argument("--rows", default="1,4,8,16,32,512")
    parser.add_argument("--dtypes", default="bfloat16,int8,int4")
    parser.add_argument("--forms", default="Q4_0", help=f"of {', '.join(FORMS)}")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    shape = args.outputs, args.inputs
    count = max(2, MATRIX_BYTES // (4 * args.outputs * args.inputs))
    products = {dtype: _ours(dtype, shape, count) for dtype in filter(None, args.dtypes.split(","))}
    for form in args.forms.split(","):
        products[form] = _packed(form, shape, count)
    found = []
    for rows in map(int, args.rows.split(",")):
        least = dict.fromkeys(products, float("inf"))
        for turn in range(args.rounds if rows < 100 else max(3, args.rounds // 10)):
            for name, product in products.items():
                x = torch.randn(rows, args.inputs).to(DTYPES[ACTIVATIONS.get(name, "float32")])
                started = time.process_time()
                product(x, turn % count)
                least[name] = min(least[name], time.process_time() - started)
        found.append({"rows": rows, **{name: round(1e3 * s, 3) for name, s in least.items()}})
        if not args.json:
            print(f"{rows} rows:", *(f"{name} {ms} ms" for name, ms in list(found[-1].items())[1:]), sep="  ")
    if args.json:
        print(json.dumps({"inputs": args.inputs, "outputs": args.outputs, "ms": found}))


@torch.inference_mode()
def _ours(dtype: str, shape: tuple[int, int], count: int) -> Product:
    """By the kernel that is used here."""
    run_trial(dtype, "cpu")
    kernel = kernel_of(dtype, torch.device("cpu"))
    layers = []
    for _ in range(count):
        layer = nn.Linear(shape[1], shape[0], bias=False, device="meta")
        weight = torch.randn(shape).to(DTYPES[ACTIVATIONS[dtype]])
        if kernel.linear is None:
            layer.weight = nn.Parameter(weight, requires_grad=False)
        else:
            assert issubclass(kernel.linear, QuantisedLinear), "others are not made of numbers"
            quantise(layer, weight, kernel.linear)
        layers.append(layer)

    @torch.inference_mode()
    def product(x: torch.Tensor, number: int) -> torch.Tensor:
        layer = layers[number]
        found: torch.Tensor = kernel.product(x, layer.weight, None) if kernel.linear is None else layer(x)
        return found

    return product


@torch.inference_mode()
def _packed(name: str, shape: tuple[int, int], count: int) -> Product:
    """By the kernel that is used here, of random levels and scales."""
    run_trial(FILED, "cpu")
    form, (outputs, inputs) = FORMS[name], shape
    layers = []
    for _ in range(count):
        panels = random_panels(form, outputs, inputs)
        layer = nn.Linear(inputs, outputs, bias=False, device="meta")
        stay_packed(layer, (Part(name, panels, outputs),), GgufLinear, torch.bfloat16)
        layers.append(layer)

    @torch.inference_mode()
    def product(x: torch.Tensor, number: int) -> torch.Tensor:
        found: torch.Tensor = layers[number](x)
        return found

    return product


if __name__ == "__main__":
    main()
