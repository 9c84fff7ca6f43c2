"""Matrices rounded to levels of 8 or 4 bits.

Each group of 32 inputs has a scale in float16. *int8*: from -127 to 127, as ggml's Q8_0. *int4*: to 16 levels
around zero, as in ggml's Q4_0; a scale has no more digits than bfloat16 has, which GPUs' kernels take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flowspec.model.arithmetic.arrays import F32, Numbers, fill_up, narrowed, widened
from flowspec.model.arithmetic.compiled import as_q8_0
from flowspec.model.arithmetic.packed import FORMS, GROUP, Q4_0, Levels

MIDDLE, SIGN = Q4_0.offset, FORMS["Q8_0"].offset
ENDS = (-8.0, -7.0, -7.5, -8.5)
"""On which levels of 4 bits a group's largest weight may fall; that is taken by which its weights lose
least."""
FORMAT = 3
"""Of `Rounded`: counts up when matrices are rounded otherwise or the parts are named or ordered otherwise,
since they are kept on disk."""
Rounded = Mapping[str, npt.NDArray[Any]]
"""A rounded matrix, of no kernel's layout, with a row for each output: `scales` float16 `[rows, groups]`, and
`levels`, of int8 int8 `[rows, 32 groups]`, of int4 uint8 `[rows, 16 groups]`, the first of two inputs in the
low bits."""
_BLOCK = 1 << 16
"""Numbers that are rounded at once, so that they stay in a processor's cache."""


class Rounding(NamedTuple):
    """How float32 rows `[rows, in]` are rounded, and spread out as panels of a `form` are made of them."""

    round_rows: Callable[[F32], Rounded]
    spread: Callable[[Rounded], Levels]
    form: str

    @np.errstate(all="ignore")  # what is no number, or infinite, shows by itself
    def round(self, weight: Numbers) -> Rounded:
        """Each row of a matrix for itself."""
        found: dict[str, npt.NDArray[Any]] = {}
        step = max(1, _BLOCK // max(1, weight.shape[1]))
        for first in range(0, len(weight), step):
            for name, rows in self.round_rows(widened(weight[first : first + step])).items():
                if name not in found:
                    found[name] = np.empty((len(weight), *rows.shape[1:]), rows.dtype)
                found[name][first : first + step] = rows
        return found

    @np.errstate(all="ignore")
    def widen(self, rounded: Rounded, inputs: int) -> F32:
        """Which numbers `[rows, in]` they are then, for the reference."""
        levels = widened(self.spread(rounded).levels) - FORMS[self.form].offset
        weights = levels * widened(rounded["scales"])[..., None]
        return weights.reshape(len(weights), -1)[:, :inputs]

    def packed_bytes(self, inputs: int, outputs: int) -> int:
        """What `[out, in]` takes once it is packed."""
        return FORMS[self.form].panel_bytes(inputs, outputs)


def _round_int8(numbers: F32) -> Rounded:
    found = as_q8_0(numbers)
    levels = (found.levels ^ SIGN).view(np.int8).reshape(len(numbers), -1)
    return {"levels": levels, "scales": found.scales}


def _spread_int8(rounded: Rounded) -> Levels:
    levels = rounded["levels"].view(np.uint8) ^ SIGN
    return Levels(levels=levels.reshape(len(levels), -1, GROUP), scales=rounded["scales"])


def _round_int4(numbers: F32) -> Rounded:
    groups = fill_up(numbers, GROUP).reshape(-1, GROUP)
    largest = np.take_along_axis(groups, np.abs(groups).argmax(1)[:, None], 1)[:, 0]
    columns = np.ascontiguousarray(groups.T)  # so that what is done to a group, is done to many at once
    best = np.full(len(groups), np.inf, np.float32)  # squares of what weights lose
    scales = np.full(len(groups), np.nan, np.float16)
    for end in ENDS:
        scale = narrowed(narrowed(largest / np.float32(end), "bfloat16"), "float16")
        lost = _lost(columns, widened(scale))
        is_better = lost < best
        best, scales = np.where(is_better, lost, best), np.where(is_better, scale, scales)
    found = (_levels(columns, widened(scales)) + MIDDLE).astype(np.uint8)
    pairs = (found[::2] | found[1::2] << 4).T
    return {"levels": pairs.reshape(len(numbers), -1), "scales": scales.reshape(len(numbers), -1)}


def _levels(columns: F32, scale: F32) -> F32:
    """Of `[32, groups]`, from -8 to 7."""
    found = columns / scale
    np.rint(found, found)
    if not (np.isfinite(scale) & (scale != 0)).all():
        np.copyto(found, 0.0, where=np.isnan(found))
    return np.clip(found, -MIDDLE, MIDDLE - 1, found)


def _lost(columns: F32, scale: F32) -> F32:
    """The sum of the squares of what a group's weights lose: of its quarters, number by number, then of these
    eight sums, one after another."""
    tried = _levels(columns, scale)
    tried *= scale
    tried -= columns
    tried *= tried
    first, *others = ((tried[:8] + tried[8:16]) + tried[16:24]) + tried[24:]
    for each in others:
        first += each
    return first


def _spread_int4(rounded: Rounded) -> Levels:
    pairs = rounded["levels"]
    levels = np.stack([pairs & 15, pairs >> 4], 2).reshape(len(pairs), -1, GROUP)
    return Levels(levels=levels, scales=rounded["scales"])


ROUNDINGS: Mapping[str, Rounding] = {
    "int8": Rounding(_round_int8, _spread_int8, "Q8_0"),
    "int4": Rounding(_round_int4, _spread_int4, "Q4_0"),
}
"""By the name of the precision."""
