"""How long a matrix takes in each precision, by the rows that are multiplied at once: `python -m
lab.perf.matrices`.

All precisions take turns, and so do the forms in which GGUF files pack matrices (`--forms Q4_0,Q4_K`);
matrices are more than a cache holds, and the least time counts.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from flowspec.bench.profile import random_panels
from flowspec.core.protocol.precision import FILED
from flowspec.model.arithmetic.arrays import Array, in_room
from flowspec.model.arithmetic.compiled import use_threads
from flowspec.model.arithmetic.packed import FORMS
from flowspec.model.engines import Engine, engine_of
from flowspec.model.layer import Linear, Matrix, Packed, Plain, RowsFunction
from flowspec.model.rounding import ROUNDINGS

MATRIX_BYTES = 256 << 20
"""So many bytes of float32 are multiplied before the same matrix comes again."""


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
    use_threads(1)
    shape = args.outputs, args.inputs
    count = max(2, MATRIX_BYTES // (4 * args.outputs * args.inputs))
    products = {name: _Product(name, name, shape, count) for name in filter(None, args.dtypes.split(","))}
    products |= {form: _Product(form, FILED, shape, count) for form in args.forms.split(",")}
    found = []
    for rows in map(int, args.rows.split(",")):
        least = dict.fromkeys(products, float("inf"))
        for turn in range(args.rounds if rows < 100 else max(3, args.rounds // 10)):
            for name, product in products.items():
                x = product.rows(rows)
                started = time.process_time()
                product.matrices[turn % count](x)
                least[name] = min(least[name], time.process_time() - started)
        found.append({"rows": rows, **{name: round(1e3 * s, 3) for name, s in least.items()}})
        if not args.json:
            print(f"{rows} rows:", *(f"{name} {ms} ms" for name, ms in list(found[-1].items())[1:]), sep="  ")
    if args.json:
        print(json.dumps({"inputs": args.inputs, "outputs": args.outputs, "ms": found}))


class _Product:
    """By so many matrices of a precision, or a form, as the kernels that are used here multiply by them."""

    def __init__(self, name: str, dtype: str, shape: tuple[int, int], count: int) -> None:
        self._random = np.random.default_rng(0)
        self._engine: Engine = engine_of(dtype, "cpu", "weights")
        self._inputs = shape[1]
        self.matrices: list[RowsFunction] = []
        for _ in range(count):
            linear = Linear(inputs=self._inputs, matrices=(self._matrix(name, shape),))
            self.matrices.append(self._engine.rows(linear=linear))

    def rows(self, count: int) -> Array:
        return self._numbers((count, self._inputs))

    def _matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        outputs, inputs = shape
        if name in FORMS:
            panels = random_panels(FORMS[name], outputs, inputs, self._random)
            return Packed(name, self._engine.array(panels), outputs)
        weights = in_room(self._numbers(shape))  # as those that are read from a file lie
        if name in ROUNDINGS:
            how = ROUNDINGS[name]
            return self._engine.packed_matrix(how.form, how.round(weights), outputs)
        return Plain(weights)

    def _numbers(self, shape: tuple[int, int]) -> Array:
        return self._engine.cast(self._random.standard_normal(shape, np.float32))


if __name__ == "__main__":
    main()
