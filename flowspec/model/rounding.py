"""Matrices rounded to levels of 8 or 4 bits, packed as those of files are.

Each group of 32 inputs has a scale in float16. *int8*: from -127 to 127, as ggml's Q8_0. *int4*: to 16 levels
around zero, as in ggml's Q4_0; a scale has no more digits than bfloat16 has, which GPUs' kernels take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from flowspec.model.arithmetic import compiled, plain
from flowspec.model.arithmetic.arrays import F32, Numbers, fill_up, narrowed, room, widened
from flowspec.model.arithmetic.compiled import address
from flowspec.model.arithmetic.packed import FORMS, GROUP, PANEL, Levels, Panels, numbers_of, packed

MIDDLE = FORMS["Q4_0"].offset
ENDS = (
    -8.0,
    -7.0,
    -7.5,
    -8.5,
)  # levels of a group's largest weight, of which the one counts that loses least
FORMAT = 4  # of what `Rounding.round` gives, which is kept on disk; counts up when it changes
_BLOCK = 1 << 16  # numbers that are rounded at once, so that they stay in a processor's cache


class Rounding(NamedTuple):
    """How rows `[rows, in]` are rounded to `levels` of a `form`."""

    form: str
    levels: Callable[[Numbers], Levels]

    @np.errstate(all="ignore")  # what is no number, or infinite, shows by itself
    def round(self, weight: Numbers) -> Panels:
        """Each row of a matrix for itself."""
        form, (outputs, inputs) = FORMS[self.form], weight.shape
        found = room((-(-outputs // PANEL), -(-inputs // form.unit), form.unit_bytes), np.uint8)
        step = max(1, _BLOCK // max(1, PANEL * inputs))
        for first in range(0, len(found), step):
            rows = weight[PANEL * first : PANEL * (first + step)]
            found[first : first + step] = packed(form, self.levels(rows))
        return found

    @np.errstate(all="ignore")
    def widen(self, panels: Panels, outputs: int, inputs: int) -> F32:
        """Which numbers `[out, in]` they are then, for the reference."""
        found: F32 = numbers_of(FORMS[self.form], panels)[:outputs, :inputs]
        return found

    def packed_bytes(self, inputs: int, outputs: int) -> int:
        """What `[out, in]` takes."""
        return FORMS[self.form].panel_bytes(inputs, outputs)


def as_q8_0(numbers: Numbers) -> Levels:
    """Group by group, also where there is no library."""
    x, library = np.ascontiguousarray(widened(numbers)), compiled.library()
    rows, width = x.shape
    if library is None:
        levels, steps = plain.levels(x)
    else:
        levels, steps = np.empty(x.shape, np.int8), np.empty((rows, -(-width // GROUP)), np.float32)
        library.levels(address(x), rows, width, address(levels), address(steps))
    filled = fill_up(levels, GROUP).view(np.uint8) ^ FORMS["Q8_0"].offset
    return Levels(levels=filled.reshape(rows, -1, GROUP), scales=narrowed(steps, "float16"))


def _as_q4_0(numbers: Numbers) -> Levels:
    groups = fill_up(widened(numbers), GROUP).reshape(-1, GROUP)
    largest = np.take_along_axis(groups, np.abs(groups).argmax(1)[:, None], 1)[:, 0]
    columns = np.ascontiguousarray(groups.T)  # so that what is done to a group, is done to many at once
    best = np.full(len(groups), np.inf, np.float32)  # squares of what weights lose
    scales = np.full(len(groups), np.nan, np.float16)
    for end in ENDS:
        scale = narrowed(narrowed(largest / np.float32(end), "bfloat16"), "float16")
        lost = _lost(columns, widened(scale))
        is_better = lost < best
        best, scales = np.where(is_better, lost, best), np.where(is_better, scale, scales)
    found = (_levels(columns, widened(scales)) + MIDDLE).astype(np.uint8).T
    levels = np.ascontiguousarray(found).reshape(len(numbers), -1, GROUP)
    return Levels(levels=levels, scales=scales.reshape(len(numbers), -1))


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


ROUNDINGS: Mapping[str, Rounding] = {"int8": Rounding("Q8_0", as_q8_0), "int4": Rounding("Q4_0", _as_q4_0)}
"""By the name of the precision."""
