"""How long a matrix takes in each precision, by the rows that are multiplied at once: `python -m
lab.perf.matrices`.

All precisions take turns, and so do the forms in which GGUF files pack matrices (`--forms Q4_0,Q4_K`);
matrices are more than a cache holds, and the least time counts. With the package `libggml` (`pip install
libggml-python`) ggml's own products in these forms take turns with them: the same shape and number of rows,
one thread, its weights repacked where it can.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType
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
    ggml = _ggml()
    for form in args.forms.split(","):
        products[form] = _packed(form, shape, count)
        if ggml is not None:
            products[f"ggml {form}"] = ggml.products(form, shape, count)
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


# ------------------------------------------------------------------------------------------------- ggml

FLOAT32, CPU_DEVICE = 0, 0
REPACKED = ("Q4_0", "Q4_K", "IQ4_NL")
"""What ggml lays out anew for its vectors, on x86."""


class _Params(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("has_no_data", ctypes.c_bool)]


class _Ggml:
    """As much of ggml's public API as multiplies by a matrix; a graph is made for each number of rows."""

    def __init__(self, folder: Path) -> None:
        self._libraries = [
            ctypes.CDLL(str(folder / f"lib{name}.so"), ctypes.RTLD_GLOBAL)
            for name in ("ggml-base", "ggml-cpu", "ggml")
        ]
        self._backend = self._call("ggml_backend_init_by_type", CPU_DEVICE, None)
        device = self._call("ggml_backend_dev_by_type", CPU_DEVICE)
        registry = self._call("ggml_backend_dev_backend_reg", ctypes.c_void_p(device))
        one = self._function(registry, b"ggml_backend_set_n_threads", None, ctypes.c_void_p, ctypes.c_int)
        one(self._backend, 1)
        extra = self._function(
            registry, b"ggml_backend_dev_get_extra_bufts", ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p
        )
        self._default = self._call("ggml_backend_get_default_buffer_type", ctypes.c_void_p(self._backend))
        self._kind = extra(device)[0] or self._default

    def _call(self, name: str, *given: Any, kind: Any = ctypes.c_void_p) -> Any:
        function = next(
            getattr(library, name) for library in reversed(self._libraries) if hasattr(library, name)
        )
        function.restype = kind
        return function(*given)

    def _function(self, registry: int, name: bytes, result: Any, *given: Any) -> Any:
        found = self._call("ggml_backend_reg_get_proc_address", ctypes.c_void_p(registry), name)
        return ctypes.CFUNCTYPE(result, *given)(found)

    def _context(self, size: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._call("ggml_init", _Params(size, None, True)))

    def _matrix(self, context: ctypes.c_void_p, kind: int, columns: int, rows: int) -> ctypes.c_void_p:
        shape = ctypes.c_int64(columns), ctypes.c_int64(rows)
        return ctypes.c_void_p(self._call("ggml_new_tensor_2d", context, kind, *shape))

    def products(self, form: str, shape: tuple[int, int], count: int) -> Product:
        kind, (outputs, inputs) = int(GGMLQuantizationType[form]), shape
        weights = []
        for _ in range(count):
            context = self._context(1 << 14)
            matrix = self._matrix(context, kind, inputs, outputs)
            place = self._kind if form in REPACKED else self._default
            self._call("ggml_backend_alloc_ctx_tensors_from_buft", context, ctypes.c_void_p(place))
            values = torch.randn(shape)
            size = self._call("ggml_nbytes", matrix, kind=ctypes.c_size_t)
            packed = torch.empty(size, dtype=torch.uint8)
            whole = ctypes.c_int64(0), ctypes.c_int64(outputs), ctypes.c_int64(inputs)
            where = ctypes.c_void_p(values.data_ptr()), ctypes.c_void_p(packed.data_ptr())
            self._call("ggml_quantize_chunk", kind, *where, *whole, None, kind=ctypes.c_size_t)
            data = ctypes.c_void_p(packed.data_ptr()), ctypes.c_size_t(0), ctypes.c_size_t(size)
            self._call("ggml_backend_tensor_set", matrix, *data, kind=None)
            weights.append(matrix)
        made: dict[tuple[int, int], tuple[ctypes.c_void_p, ctypes.c_void_p]] = {}

        def product(x: torch.Tensor, number: int) -> None:
            if (len(x), number) not in made:
                context = self._context(1 << 16)
                rows = self._matrix(context, FLOAT32, inputs, len(x))
                result = ctypes.c_void_p(self._call("ggml_mul_mat", context, weights[number], rows))
                graph = ctypes.c_void_p(
                    self._call("ggml_new_graph_custom", context, ctypes.c_size_t(4), ctypes.c_bool(False))
                )
                self._call("ggml_build_forward_expand", graph, result, kind=None)
                place = ctypes.c_void_p(self._default)
                self._call("ggml_backend_alloc_ctx_tensors_from_buft", context, place)
                given = ctypes.c_void_p(x.data_ptr()), ctypes.c_size_t(0), ctypes.c_size_t(4 * x.numel())
                self._call("ggml_backend_tensor_set", rows, *given, kind=None)
                backend = ctypes.c_void_p(self._backend)
                plan = self._call("ggml_backend_graph_plan_create", backend, graph)
                made[len(x), number] = backend, ctypes.c_void_p(plan)
            self._call("ggml_backend_graph_plan_compute", *made[len(x), number], kind=ctypes.c_int)

        return product


def _ggml() -> _Ggml | None:
    try:
        import libggml
    except ImportError:
        print("ggml is not timed: pip install libggml-python")
        return None
    assert libggml.__file__ is not None
    folders = Path(libggml.__file__).parent
    return _Ggml(next(path.parent for path in folders.glob("lib*/libggml-base.so")))


if __name__ == "__main__":
    main()
