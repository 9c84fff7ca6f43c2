"""Models whose matrices are packed as in GGUF files, of random levels: to be timed where there is no such
file."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from flowspec.model.arithmetic.arrays import Numbers
from flowspec.model.arithmetic.packed import FORMS, PANEL, Form
from flowspec.model.bridge import array_of
from flowspec.model.files import ModelFiles
from flowspec.model.tensors import Panels, Tensors

SCALE, EXPONENT = 1e-3, 118
"""Of all weights, as a number or as the byte of a power of two, so that nothing overflows; what numbers they
are changes no time."""
ROUNDER, FINER = ("Q4_K", "Q5_0"), ("Q6_K", "Q8_0")
"""Forms of the usual mix Q4_K_M, each with what llama.cpp takes where rows are no whole blocks of it."""


def random_panels(form: Form, outputs: int, inputs: int) -> torch.Tensor:
    """Panels `[panels, units, unit_bytes]` of a matrix, with random levels and whole scales."""
    size = -(-outputs // PANEL), inputs // form.unit, form.unit_bytes
    panels = torch.randint(0, 256, size, dtype=torch.uint8)
    if form.has_exponents:
        panels[..., -PANEL:] = EXPONENT
        return panels
    ends = PANEL * (1 + form.has_minimum)
    panels[..., -2 * ends :] = torch.tensor([SCALE], dtype=torch.float16).view(torch.uint8).repeat(ends)
    return panels


class PanelFiles(ModelFiles):
    """A checkpoint of numbers, as if it were a GGUF file of the mix Q4_K_M: half of the layers have values
    and `down_proj` in the finer form, and so has the embedding that is `lm_head`, too."""

    def tensors(self) -> Tensors:
        return _RandomPanels(super().tensors())


class _RandomPanels(Tensors):
    def __init__(self, numbers: Tensors) -> None:
        self._numbers = numbers

    def __contains__(self, name: str) -> bool:
        return name in self._numbers

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._numbers.shape(name)

    def load(self, name: str, shape: tuple[int, ...]) -> Numbers:
        return self._numbers.load(name, shape)

    def form(self, name: str) -> str:
        if len(self.shape(name)) != 2:
            return ""
        _, _, after = name.partition(".layers.")
        is_finer = not after or (
            int(after.partition(".")[0]) % 2 == 1 and after.endswith(("v_proj.weight", "down_proj.weight"))
        )
        whole, other = FINER if is_finer else ROUNDER
        return other if self.shape(name)[1] % FORMS[whole].unit else whole

    def packed_bytes(self, name: str) -> int:
        outputs, inputs = self.shape(name)
        return FORMS[self.form(name)].panel_bytes(inputs, outputs)

    def panels(self, name: str, shape: tuple[int, ...]) -> Panels:
        outputs, inputs = shape
        return array_of(random_panels(FORMS[self.form(name)], outputs, inputs))


def layer_bytes(tensors: Tensors) -> float:
    """What a weight of a layer takes on average as it is packed."""
    names = [name for name in tensors if ".layers." in name and tensors.form(name)]
    return sum(map(tensors.packed_bytes, names)) / sum(map(tensors.element_count, names))
