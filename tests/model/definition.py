"""What parts of layers, and `flowspec.model.arithmetic.cases`, give by the definition: `python -m
tests.model.definition` prints the hashes of all cases, as `golden.json` has them. Shares no kernel with what
is tried."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from flowspec.core.protocol.model_spec import LayerSpec, Norm
from flowspec.model.arithmetic import cases, plain
from flowspec.model.arithmetic.arrays import Array, cast, namespace
from flowspec.model.arithmetic.cases import Case
from flowspec.model.arithmetic.packed import FORMS, GROUP, PANEL
from flowspec.model.parts import Digits, Linear, Matrix, NormPart, Packed, Parts, RouterPart, Stack, Table
from tests.model.defined_products import Held, digits_product, lanes_product, packed_product, pairs_product

Product = Callable[[Array, Array], Array]


def tensor(x: np.ndarray) -> torch.Tensor:
    """Its own copy; the bits of bfloat16 are numbers again."""
    found = torch.from_numpy(x.copy())
    return found.view(torch.bfloat16) if x.dtype == np.uint16 else found


def array(x: torch.Tensor) -> np.ndarray:
    found: np.ndarray = (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()
    return found


def _like(x: Array, given: np.ndarray) -> Array:
    """An array, of the library that x is of: numpy has no numbers of bfloat16."""
    return given if isinstance(x, np.ndarray) else tensor(given)


def _levels(panels: np.ndarray, outputs: int, inputs: int) -> np.ndarray:
    """What `packed.int8_panels` was given."""
    blocks = (panels ^ 128).view(np.int8).reshape(len(panels), -1, GROUP // 4, PANEL, 4)
    return np.moveaxis(blocks, 3, 1).reshape(len(panels) * PANEL, -1)[:outputs, :inputs]


def _times(rows: Array, matrix: Matrix, product: Product) -> Array:
    wide = cast(rows, "float32")
    if isinstance(matrix, Packed):
        return packed_product(wide, FORMS[matrix.form], _like(rows, matrix.panels), matrix.outputs)
    if isinstance(matrix, Digits):
        levels = _levels(matrix.panels, matrix.outputs, rows.shape[1])
        return digits_product(wide, _like(rows, levels), _like(rows, matrix.scales[: matrix.outputs]))
    return product(rows, _like(rows, matrix.weights))


def multiplied(rows: Array, of: Linear, product: Product, bias: np.ndarray | None = None) -> Array:
    """By a linear layer, or one of experts with a `bias`, rounded once."""
    given, bias = rows if of.order is None else rows[:, of.order], of.bias if bias is None else bias
    found = namespace(rows).concatenate([_times(given, matrix, product) for matrix in of.matrices], 1)
    return cast(found if bias is None else found + cast(_like(rows, bias), "float32"), rows.dtype)


def normed(rows: Array, of: NormPart, how: Norm) -> Array:
    return plain.norm(rows, _like(rows, of.weights), of.eps, how)


def routed(rows: Array, of: RouterPart, router: str) -> Array:
    dtype = rows.dtype
    if of.norm is not None:
        rows = cast(cast(normed(rows, of.norm, "cast, scale"), "float32") * np.float32(of.factor), dtype)
    found = plain.product(cast(rows, "float32"), cast(_like(rows, of.weights), "float32"))
    found = found if of.bias is None else found + cast(_like(rows, of.bias), "float32")
    return found if router == "sigmoid" else cast(found, dtype)


def parts_of(parts: Parts, spec: LayerSpec, how: Norm, rows: Array, product: Product) -> plain.Parts:
    """As the definition has a layer's parts, for such `rows`; `product` is that of plain matrices."""
    dense = spec.dense
    assert dense is not None
    products, norms, vectors, experts = dict[str, Any](), dict[str, Any](), dict[str, Any](), list[Any]()
    for name, each in parts.items():
        leaf = name if name == "layer_input.norm" else name[name.rfind(".") + 1 :]
        if isinstance(each, Linear):
            products[leaf] = partial(multiplied, of=each, product=product)
        elif isinstance(each, NormPart):
            own: Norm = "cast, scale" if name == "linear_attn.norm" else how
            norms[leaf] = partial(normed, of=each, how=own)
        elif isinstance(each, RouterPart):
            assert dense.mixture is not None
            products["gate"] = partial(routed, of=each, router=dense.mixture.router)
            more = {"e_score_correction_bias": each.correction, "per_expert_scale": each.scales}
            vectors |= {name: _like(rows, given) for name, given in more.items() if given is not None}
        elif isinstance(each, Stack):
            biases = [None] * len(each.linears) if each.bias is None else each.bias
            for place, (linear, bias) in enumerate(zip(each.linears, biases, strict=True)):
                experts += [{}] * (place == len(experts))
                own_product = partial(multiplied, of=linear, product=product, bias=bias)
                experts[place] = {**experts[place], leaf: own_product}
        elif isinstance(each, np.ndarray):
            vectors[{"taps": "conv", "bias": "conv.bias"}.get(leaf, leaf)] = _like(rows, each)
        elif isinstance(each, float):
            vectors[leaf] = each
    vectors["conv"] = vectors["conv"].T if "conv" in vectors else None
    if "rates" in vectors:
        half = len(vectors["rates"]) // 2
        vectors |= {"fading": vectors["rates"][:half], "dt_bias": vectors["rates"][half:]}
    return plain.Parts(products=products, norms=norms, vectors=vectors, experts=experts)


def token_of(parts: Parts, embedding: Array, tokens: np.ndarray) -> plain.Token:
    """What a layer is told of tokens with these embeddings."""
    table = parts.get("layer_input.table")
    if not isinstance(table, Table):
        return plain.Token(embedding)
    return plain.Token(embedding, _like(embedding, table.matrix.weights[tokens]), table.factor)


def defined(case: Case, rows: int) -> str:
    """The digest of a case."""
    given, dense = cases.given_to(case, rows), case.spec.dense
    assert dense is not None
    is_levels = case.cached == "int8"
    held = Held(
        dense=dense,
        keys=tensor(given.keys),
        values=tensor(given.values),
        slots=tensor(given.slots),
        paths=tensor(given.paths),
        inputs=tensor(given.inputs),
        lines=tensor(given.lines),
        states=tensor(given.states),
        steps=tensor(given.steps),
        key_steps=tensor(given.key_steps) if is_levels else None,
        value_steps=tensor(given.value_steps) if is_levels else None,
    )
    hidden, angles = tensor(given.hidden), (tensor(given.angles[0]), tensor(given.angles[1]))
    product = pairs_product if case.name.startswith("pairs") else lanes_product
    parts = parts_of(case.parts, case.spec, case.how, hidden, product)
    token = token_of(case.parts, tensor(given.embedding), given.tokens)
    hidden = plain.layer(case.spec, parts, hidden, angles, held, token)
    steps = (given.key_steps, given.value_steps)
    if held.key_steps is not None and held.value_steps is not None:
        steps = array(held.key_steps), array(held.value_steps)
    assert held.states is not None
    found = hidden, held.keys, held.values
    return cases.digest((*map(array, found), *steps, array(held.inputs), array(held.states)[0]))


def functions() -> Iterator[tuple[str, str]]:
    for kind in cases.KINDS:
        given = tensor(cases.special(kind))
        for name, function in plain.FUNCTIONS.items():
            yield f"{name} {kind}", cases.digest((array(function(given.float()).to(given.dtype)),))
        positions, frequencies = map(tensor, cases.turns())
        found = plain.angles(positions[None], frequencies, 1.25, given.dtype)
        yield f"angles {kind}", cases.digest(tuple(array(each[0]) for each in found))
    for name, form in FORMS.items():
        panels, ids = map(tensor, cases.rows_of(name))
        yield f"rows of {name}", cases.digest((array(plain.packed_rows(form, panels, ids)),))


def golden() -> dict[str, str]:
    found = dict(functions())
    for case in cases.cases(has_pairs=True):
        for rows in cases.ROW_COUNTS:
            found[f"{case.name} {rows}"] = defined(case, rows)
    return found


if __name__ == "__main__":
    print(json.dumps(golden(), indent=0))
