"""Mixture-of-experts layers whose result for a row is the same whatever other rows are in the batch.

Registered with transformers as an experts implementation. All rows of an expert run at once, through products
whose bits for a row do not depend on the others (`products.py`, `quantised.py`); each row's experts are added
in ascending order, in the model's dtype.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from flowspec.model.arithmetic.compiled_torch import Portions
from flowspec.model.arithmetic.operations import add_rows, clamped_swiglu
from flowspec.model.gguf_layers import GgufLinear, Part, stay_packed
from flowspec.model.products import for_rows, products
from flowspec.model.quantised import QuantisedLinear, Rounded, pack

EXPERTS_NAME = "flowspec_rows"
GROUP_ROWS = 256
"""The experts of a group are computed at once: starting each would cost more than computing it where rows are
few. More rows would take memory, and gain nothing."""


def row_experts(
    experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """`[rows, hidden]` from `hidden` of that shape and each row's experts and their weights, `[rows, experts
    per token]`."""
    output = torch.zeros_like(hidden, memory_format=torch.contiguous_format)
    choices = chosen.flatten()
    order = choices.argsort(stable=True)
    rows, shares = order // chosen.shape[1], weights.flatten()[order, None]
    end = 0
    for group in _groups(Counter(choices.tolist())):
        counts = [count for _, count in group]
        begin, end = end, end + sum(counts)
        own = rows[begin:end]
        gate, up = _through(experts, "gate_up_proj", group, hidden[own]).chunk(2, dim=-1)
        found = _through(experts, "down_proj", group, _gated(experts, gate, up)) * shares[begin:end]
        add_rows(output, own, found.to(output.dtype), counts)
    return output


def _groups(chosen: Mapping[int, int]) -> Iterator[Portions]:
    """The experts in ascending order, each with its number of rows, in groups of `GROUP_ROWS` rows at most or
    one expert."""
    group: list[tuple[int, int]] = []
    taken = 0
    for expert, count in sorted(chosen.items()):
        if group and taken + count > GROUP_ROWS:
            yield group
            group, taken = [], 0
        group.append((expert, count))
        taken += count
    if group:
        yield group


def _through(experts: Any, name: str, group: Portions, rows: torch.Tensor) -> torch.Tensor:
    """Of each expert of a group with its own rows, which follow one another: with packed layers, or with
    parts of a parameter by the product that `call_directly` gave. A bias, if there is one, is added before
    the result is rounded."""
    matrices, biases = getattr(experts, name), getattr(experts, f"{name}_bias", None)
    if not isinstance(matrices, nn.ModuleList):
        return products(experts.product, rows, matrices, group, biases)
    layers: list[Any] = [matrices[expert] for expert, _ in group]
    counts = [count for _, count in group]
    wide = rows if biases is None else rows.float()
    found: torch.Tensor = layers[0].each(layers, counts, wide)
    return found if biases is None else (found + for_rows(biases, group)).to(rows.dtype)


def _gated(experts: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    limit = getattr(experts, "limit", None)
    if limit is not None:
        return clamped_swiglu(gate, up, experts.alpha, limit)
    found: torch.Tensor = experts.act_fn(gate) * up
    return found


def outputs_first(layer: nn.Module) -> None:
    """Has matrices of experts that a family multiplies from the right, `[experts, in, out]`, be `[experts,
    out, in]` as everywhere else; of gate and up one is below the other. Before they have values."""
    for module in layer.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 3:
                setattr(module, name, nn.Parameter(parameter.transpose(1, 2), requires_grad=False))


def stay_packed_experts(
    experts: nn.Module,
    name: str,
    parts: Sequence[tuple[Part, ...]],
    kind: type[GgufLinear],
    dtype: torch.dtype,
) -> None:
    """Puts layers that stay as a file packs them, each with an expert's `parts`, in the place of the
    parameter `name` `[experts, out, in]`."""
    _, outputs, inputs = experts.get_parameter(name).shape
    layers = nn.ModuleList()
    for own in parts:
        layer = nn.Linear(inputs, outputs, bias=False, device="meta")
        stay_packed(layer, own, kind, dtype)
        layers.append(layer)
    delattr(experts, name)
    setattr(experts, name, layers)


def pack_experts(experts: nn.Module, name: str, rounded: Rounded, kind: type[QuantisedLinear]) -> None:
    """Puts packed layers in the place of the parameter `name` `[experts, out, in]`; `rounded` has the rows of
    all, one expert's after another's."""
    count, outputs, inputs = experts.get_parameter(name).shape
    layers = nn.ModuleList()
    for expert in range(count):
        layer = nn.Linear(inputs, outputs, bias=False, device="meta")
        pack(
            layer,
            {part: rows[expert * outputs : (expert + 1) * outputs] for part, rows in rounded.items()},
            kind,
        )
        layers.append(layer)
    delattr(experts, name)  # what is a parameter cannot become a module
    setattr(experts, name, layers)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, row_experts)
