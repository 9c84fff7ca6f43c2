"""What parts of layers, and `flowspec.model.arithmetic.cases`, give by the definition: `python -m
tests.model.definition` prints the hashes of all cases, as `golden.json` has them. Shares no kernel with what
is tried."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch

from flowspec.core.protocol.model_spec import LayerSpec, Norm
from flowspec.model.arithmetic import cases, plain
from flowspec.model.arithmetic.arrays import Array, namespace
from flowspec.model.arithmetic.cases import Case
from flowspec.model.arithmetic.packed import FORMS
from flowspec.model.layer import Linear, Matrix, Packed, Parts
from tests.model.defined_layer import Layer
from tests.model.defined_products import DefinedRows, lanes_product, packed_product, pairs_product

Product = Callable[[Array, Array], Array]


def tensor(x: np.ndarray) -> torch.Tensor:
    """Its own copy; the bits of bfloat16 are numbers again."""
    found = torch.from_numpy(x.copy())
    return found.view(torch.bfloat16) if x.dtype == np.uint16 else found


def array(x: torch.Tensor) -> np.ndarray:
    found: np.ndarray = (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()
    return found


def tensors(x: Any) -> Any:
    """Parts with tensors in the place of numpy's arrays."""
    if isinstance(x, dict):
        return {name: tensors(each) for name, each in x.items()}
    if isinstance(x, tuple):
        return tuple(map(tensors, x))
    if is_dataclass(x) and not isinstance(x, type):
        return replace(x, **{each.name: tensors(getattr(x, each.name)) for each in fields(x)})
    return tensor(x) if isinstance(x, np.ndarray) else x


def _times(rows: Array, matrix: Matrix, product: Product, is_fine: bool) -> Array:
    if isinstance(matrix, Packed):
        return packed_product(rows, FORMS[matrix.form], matrix.panels, matrix.outputs, is_fine)
    return (pairs_product if str(matrix.weights.dtype) == "torch.bfloat16" else product)(rows, matrix.weights)


def layer_of(spec: LayerSpec, parts: Parts, how: Norm, product: Product, is_source: bool = False) -> Layer:
    """`product` is that of plain matrices."""

    def multiply(rows: Array, of: Linear) -> Array:
        given = rows if of.order is None else rows[:, of.order]
        made = [_times(given, matrix, product, of.is_fine) for matrix in of.matrices]
        found = namespace(rows).concatenate(made, 1)
        return found if of.bias is None else found + of.bias

    return Layer(spec=spec, parts=parts, how=how, multiply=multiply, is_source=is_source)


def defined(case: Case, rows: int) -> str:
    """The digest of a case."""
    given, dense = cases.given_to(case, rows), case.spec.dense
    assert dense is not None
    names = "slots", "paths", "inputs", "lines", "states", "steps", "embedding", "tokens"
    steps = tensor(given.key_steps), tensor(given.value_steps)
    own = DefinedRows(
        dense=dense,
        angles=tensors(given.angles),
        held=(tensor(given.keys), tensor(given.values), steps if case.cached == "int8" else None),
        **{name: tensor(getattr(given, name)) for name in names},
    )
    layer = layer_of(case.spec, tensors(case.parts), case.how, lanes_product, case.is_source)
    hidden = layer.run(tensor(given.hidden), own)
    found = hidden, *own.held[:2], *steps, own.inputs, own.states[0]
    return cases.digest(tuple(map(array, found)))


def functions() -> Iterator[tuple[str, str]]:
    for name in plain.FUNCTIONS:
        yield name, cases.digest((array(plain.function(tensor(cases.special()), name)),))
    positions, frequencies = map(tensor, cases.turns())
    found = plain.angles(positions[None], frequencies, 1.25)
    yield "angles", cases.digest(tuple(array(each[0]) for each in found))
    rows, matrix = cases.small()
    yield "small pairs", cases.digest((array(pairs_product(tensor(rows), tensor(matrix.weights))),))
    for name, form in FORMS.items():
        panels, ids = map(tensor, cases.rows_of(name))
        yield f"rows of {name}", cases.digest((array(plain.packed_rows(form, panels, ids)),))


def golden() -> dict[str, str]:
    found = dict(functions())
    for case in cases.cases():
        for rows in cases.ROW_COUNTS:
            found[f"{case.name} {rows}"] = defined(case, rows)
    return found


if __name__ == "__main__":
    print(json.dumps(golden(), indent=0))
