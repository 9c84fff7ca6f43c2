"""The ways in which a norm's weight is applied. Imports no torch."""

from __future__ import annotations

from typing import Literal, get_args

Norm = Literal["cast, scale", "scale, cast", "scale by 1 + w, cast"]
"""After rows are normalised in float32: how the weight is applied, and when the result takes the dtype of
what was given."""
NORMS: tuple[Norm, ...] = get_args(Norm)
"""In the order of `canonical.c` and `canonical.cu`."""
