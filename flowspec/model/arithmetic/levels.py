"""Numbers of a matrix rounded to levels of 8 bits, by `canonical.c` where it may be used, else as `plain.py`
defines it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flowspec.model.arithmetic import compiled, plain
from flowspec.model.arithmetic.arrays import F32, Numbers, fill_up, narrowed, widened
from flowspec.model.arithmetic.packed import FORMS, GROUP, Levels


def levels(x: F32) -> tuple[npt.NDArray[np.int8], F32]:
    """`plain.levels`."""
    library = compiled.library()
    if library is None:
        return plain.levels(x)
    x = np.ascontiguousarray(x)
    rows, width = x.shape
    found, steps = np.empty((rows, width), np.int8), np.empty((rows, -(-width // GROUP)), np.float32)
    library.levels(*(compiled.address(x), rows, width), *map(compiled.address, (found, steps)))
    return found, steps


def as_q8_0(numbers: Numbers) -> Levels:
    """A matrix `[out, in]` rounded to the form Q8_0, group by group."""
    found, steps = levels(widened(numbers))
    filled = fill_up(found, GROUP).view(np.uint8) ^ FORMS["Q8_0"].offset
    return Levels(levels=filled.reshape(len(found), -1, GROUP), scales=narrowed(steps, "float16"))
