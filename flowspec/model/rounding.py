"""Matrices rounded to levels of 8 or 4 bits.

*int8*: per output, `scale = max |w| / 127`. *int4*: per group of 32 inputs, to 16 levels around zero, with a
scale in float16, as in ggml's Q4_0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flowspec.model.arithmetic.arrays import F32, Numbers, fill_up, narrowed, widened
from flowspec.model.arithmetic.packed import GROUP, PANEL, Q4_0, Levels

WEIGHT_MAX = 127
MIDDLE = Q4_0.offset
ENDS = (-8.0, -7.0, -7.5, -8.5)
"""On which levels of 4 bits a group's largest weight may fall; that is taken by which its weights lose
least."""
TINY = 1e-30
FORMAT = 2
"""Of `Rounded`: counts up when matrices are rounded otherwise or the parts are named or ordered otherwise,
since they are kept on disk."""
Rounded = Mapping[str, npt.NDArray[Any]]
"""A rounded matrix: its levels and scales, each with a row for each output. Of no kernel's layout."""
_BLOCK = 1 << 16
"""Numbers that are rounded at once, so that they stay in a processor's cache."""
_WITH_ANY = np.errstate(all="ignore")
"""What is no number, or infinite, shows by itself."""


@_WITH_ANY
def round_int8(weight: Numbers) -> Rounded:
    """`levels` int8 `[rows, in]` and `scales` float32 `[rows]`, each row for itself."""
    levels, scales = np.empty(weight.shape, np.int8), np.empty(len(weight), np.float32)
    step = max(1, _BLOCK // max(1, weight.shape[1]))
    for first in range(0, len(weight), step):
        rows = slice(first, first + step)
        numbers = widened(weight[rows])
        scales[rows] = np.maximum(np.abs(numbers).max(1) / np.float32(WEIGHT_MAX), np.float32(TINY))
        levels[rows] = np.rint(numbers / scales[rows, None])
    return {"levels": levels, "scales": scales}


@_WITH_ANY
def widen_int8(rounded: Rounded, inputs: int) -> F32:
    """Rounded weights as numbers, float32 `[rows, inputs]`, for the reference."""
    return widened(rounded["levels"]) * rounded["scales"][:, None]


@_WITH_ANY
def round_int4(weight: Numbers) -> Rounded:
    """`levels` uint8 `[rows, 16 groups]`, the first of two inputs in the low bits; `scales` float16 `[rows,
    groups]`, with no more digits than bfloat16 has, which GPUs' kernels take."""
    rows, groups = len(weight), -(-weight.shape[1] // GROUP)
    levels = np.empty((rows, groups * GROUP // 2), np.uint8)
    scales = np.empty((rows, groups), np.float16)
    step = max(1, _BLOCK // max(1, weight.shape[1]))
    for first in range(0, rows, step):
        some = slice(first, first + step)
        numbers = fill_up(widened(weight[some]), GROUP).reshape(-1, GROUP)
        pairs, of_groups = _rounded_groups(numbers)
        levels[some], scales[some] = pairs.reshape(-1, levels.shape[1]), of_groups.reshape(-1, groups)
    return {"levels": levels, "scales": scales}


def _rounded_groups(numbers: F32) -> tuple[npt.NDArray[Any], npt.NDArray[np.float16]]:
    """Pairs of levels `[groups, 16]`, and scales `[groups]`, of `[groups, 32]`."""
    largest = np.take_along_axis(numbers, np.abs(numbers).argmax(1)[:, None], 1)[:, 0]
    columns = np.ascontiguousarray(numbers.T)  # so that what is done to a group, is done to many at once
    best = np.full(len(numbers), np.inf, np.float32)  # squares of what weights lose
    scales = np.full(len(numbers), np.nan, np.float16)
    for end in ENDS:
        scale = narrowed(narrowed(largest / np.float32(end), "bfloat16"), "float16")
        lost = _lost(columns, widened(scale))
        is_better = lost < best
        best, scales = np.where(is_better, lost, best), np.where(is_better, scale, scales)
    found = (_levels(columns, widened(scales)) + MIDDLE).astype(np.uint8)
    return (found[::2] | found[1::2] << 4).T, scales


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


@_WITH_ANY
def widen_int4(rounded: Rounded, inputs: int) -> F32:
    """As `widen_int8`."""
    given, scales = spread(rounded), widened(rounded["scales"])
    weights = (widened(given.levels) - MIDDLE) * scales[..., None]
    return weights.reshape(len(scales), -1)[:, :inputs]


def spread(rounded: Rounded) -> Levels:
    """Levels of 4 bits as panels of Q4_0 are made of them."""
    pairs = rounded["levels"]
    levels = np.stack([pairs & 15, pairs >> 4], 2).reshape(len(pairs), -1, GROUP)
    return Levels(levels=levels, scales=rounded["scales"])


class Rounding(NamedTuple):
    """How matrices `[rows, in]` are rounded, which numbers they are then, and what `[out, in]` takes once it
    is packed, by its inputs and outputs."""

    round: Callable[[Numbers], Rounded]
    widen: Callable[[Rounded, int], F32]
    packed_bytes: Callable[[int, int], int]


def _bytes_int8(inputs: int, outputs: int) -> int:
    """With a scale for each output."""
    return -(-outputs // PANEL) * PANEL * (-(-inputs // GROUP) * GROUP + 4)


ROUNDINGS: Mapping[str, Rounding] = {
    "int8": Rounding(round_int8, widen_int8, _bytes_int8),
    "int4": Rounding(round_int4, widen_int4, Q4_0.panel_bytes),
}
"""By the name of the precision."""
