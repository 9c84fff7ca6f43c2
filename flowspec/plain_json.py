"""JSON from somebody else, whose numbers can be written as JSON again: Python's own reader takes `NaN` and
`1e999`, which its writer makes words of that no other language reads."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from typing import Any, NoReturn

DIGITS_MAX = 4000
"""Of a number that floats cannot hold. Python writes no longer ones."""


def read_json(text: str, *, strict: bool = True) -> Any:
    """What a text is as JSON. Without `strict`, strings may have control characters. Raises `ValueError` for
    anything else, also for NaN, and `RecursionError` for too many brackets in brackets."""
    return json.loads(text, strict=strict, parse_constant=_refused, parse_float=real)


def _refused(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def real(text: str) -> float | int:
    """A number, as JSON can have it: one that floats cannot hold is a whole number. Raises `ValueError` for
    what has more than 4000 digits then."""
    found = float(text)
    if math.isfinite(found):
        return found
    exact = Decimal(text)
    if exact.adjusted() > DIGITS_MAX:
        raise ValueError(f"expected at most {DIGITS_MAX} digits")
    return int(exact)
