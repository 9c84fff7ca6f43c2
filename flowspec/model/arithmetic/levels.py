"""A matrix rounded to the form Q8_0, by `canonical.c` where it may be used, else as `plain.py` defines it."""

from __future__ import annotations

import numpy as np

from flowspec.model.arithmetic import compiled, plain
from flowspec.model.arithmetic.arrays import Numbers, fill_up, narrowed, widened
from flowspec.model.arithmetic.packed import FORMS, GROUP, Levels


def as_q8_0(numbers: Numbers) -> Levels:
    """Of a matrix `[out, in]`, group by group."""
    x, library = np.ascontiguousarray(widened(numbers)), compiled.library()
    rows, width = x.shape
    if library is None:
        levels, steps = plain.levels(x)
    else:
        levels, steps = np.empty(x.shape, np.int8), np.empty((rows, -(-width // GROUP)), np.float32)
        library.levels(compiled.address(x), rows, width, *map(compiled.address, (levels, steps)))
    filled = fill_up(levels, GROUP).view(np.uint8) ^ FORMS["Q8_0"].offset
    return Levels(levels=filled.reshape(rows, -1, GROUP), scales=narrowed(steps, "float16"))
