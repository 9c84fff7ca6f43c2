"""A mixture's experts as modules hold them: packed, each is a layer of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from flowspec.model.gguf_layers import GgufLinear, Part, stay_packed
from flowspec.model.quantised import QuantisedLinear, Rounded, pack


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
