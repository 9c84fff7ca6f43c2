"""What `flowspec.model.arithmetic.cases` give by the definition: `python -m tests.model.definition` prints
all hashes, as `golden.json` has them. Shares no kernel with what is tried."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from flowspec.model.arithmetic import cases, plain
from flowspec.model.arithmetic.cases import Case, Weights
from flowspec.model.arithmetic.packed import FORMS
from flowspec.model.program import Linear, NormPart, Numbers, RouterPart, Stack


def tensor(x: np.ndarray) -> torch.Tensor:
    """Its own copy; the bits of bfloat16 are numbers again."""
    found = torch.from_numpy(x.copy())
    return found.view(torch.bfloat16) if x.dtype == np.uint16 else found


def array(x: torch.Tensor) -> np.ndarray:
    found: np.ndarray = (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()
    return found


def multiplied(rows: torch.Tensor, of: Linear, bias: torch.Tensor | None = None) -> torch.Tensor:
    own: Weights = of.held
    if own.how in FORMS:
        found = plain.packed_product(rows.float(), FORMS[own.how], tensor(own.weights), own.outputs)
    elif own.scales is not None:
        scales = tensor(own.scales[: own.outputs])
        found = plain.digits_product(rows.float(), tensor(own.weights), scales)
    else:
        product = plain.pairs_product if own.how == "pairs" else plain.lanes_product
        found = product(rows, tensor(own.weights))
    bias = bias if of.bias is None else tensor(of.bias.held)
    return (found if bias is None else found + bias.float()).to(rows.dtype)


def normed(rows: torch.Tensor, of: NormPart, how: Any) -> torch.Tensor:
    return plain.norm(rows, tensor(of.weights.held), of.eps, how)


def routed(rows: torch.Tensor, of: RouterPart, router: str) -> torch.Tensor:
    if of.norm is not None:
        rows = (normed(rows, of.norm, "cast, scale").float() * of.factor).to(rows.dtype)
    found = plain.product(rows.float(), tensor(of.weights.held).float())
    found = found if of.bias is None else found + tensor(of.bias.held).float()
    return found if router == "sigmoid" else found.to(rows.dtype)


def defined(case: Case, rows: int) -> str:
    """The digest of a case."""
    given, spec, dense = cases.given_to(case, rows), case.spec, case.spec.dense
    assert dense is not None
    products, norms, vectors, experts = dict[str, Any](), dict[str, Any](), dict[str, Any](), list[Any]()
    for name, each in case.parts.items():
        leaf = name if name == "layer_input.norm" else name[name.rfind(".") + 1 :]
        if isinstance(each, Linear):
            products[leaf] = partial(multiplied, of=each)
        elif isinstance(each, NormPart):
            how = "cast, scale" if name == "linear_attn.norm" else case.how
            norms[leaf] = partial(normed, of=each, how=how)
        elif isinstance(each, RouterPart):
            assert dense.mixture is not None
            products["gate"] = partial(routed, of=each, router=dense.mixture.router)
            vectors |= (
                {} if each.correction is None else {"e_score_correction_bias": tensor(each.correction.held)}
            )
            vectors |= {} if each.scales is None else {"per_expert_scale": tensor(each.scales.held)}
        elif isinstance(each, Stack):
            assert each.bias is not None
            biases = tensor(each.bias.held)
            for place, (linear, bias) in enumerate(zip(each.linears, biases, strict=True)):
                experts += [{}] * (place == len(experts))
                experts[place] = {**experts[place], leaf: partial(multiplied, of=linear, bias=bias)}
        elif isinstance(each, Numbers):
            vectors[{"taps": "conv", "bias": "conv.bias"}.get(leaf, leaf)] = tensor(each.held)
    vectors["conv"] = vectors["conv"].T if "conv" in vectors else None
    vectors["layer_scalar"] = case.parts.get("layer_scalar")
    if "rates" in vectors:
        vectors["fading"], vectors["dt_bias"] = vectors["rates"].chunk(2)
    keys, values = tensor(given.keys), tensor(given.values)
    is_levels = case.cached == "int8"
    held = plain.Held(
        dense=dense,
        keys=keys,
        values=values,
        slots=tensor(given.slots),
        paths=tensor(given.paths),
        inputs=tensor(given.inputs),
        lines=tensor(given.lines),
        states=tensor(given.states),
        steps=tensor(given.steps),
        key_steps=tensor(given.key_steps) if is_levels else None,
        value_steps=tensor(given.value_steps) if is_levels else None,
    )
    token = plain.Token(tensor(given.embedding))
    if dense.input_width:
        table = tensor(case.parts["layer_input.table"].weights.held)
        factor = case.parts["layer_input.factor"]
        token = plain.Token(token.embedding, table[tensor(given.tokens)], factor)
    angles = tensor(given.angles[0]), tensor(given.angles[1])
    parts = plain.Parts(products=products, norms=norms, vectors=vectors, experts=experts)
    hidden = plain.layer(spec, parts, tensor(given.hidden), angles, held, token)
    steps = (given.key_steps, given.value_steps)
    if held.key_steps is not None and held.value_steps is not None:
        steps = array(held.key_steps), array(held.value_steps)
    assert held.states is not None
    found = hidden, keys, values
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
