"""JSON from somebody else, whose numbers can be written as JSON again: Python's own reader takes `NaN` and
`1e999`, which its writer makes words of that no other language reads."""

from __future__ import annotations

import json
import math
from decimal import Decimal, InvalidOperation
from typing import Any, NoReturn

DIGITS_MAX = 4000
"""Of a number that floats cannot hold. Python writes no longer ones."""
ALL_DIGITS_MAX = 16 * DIGITS_MAX
"""Of all such numbers that come at once: each is a few characters there, and takes the time of thousands to
read and to write."""


def read_json(text: str, *, strict: bool = True) -> Any:
    """What a text is as JSON. Without `strict`, strings may have control characters. Raises `ValueError` for
    anything else, also for NaN, and `RecursionError` for too many brackets in brackets."""
    return json.loads(text, strict=strict, parse_constant=_refused, parse_float=_Reals().read)


def _refused(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


class _Reals:
    """Reads numbers of one text that are not written as whole ones."""

    def __init__(self) -> None:
        self._left = ALL_DIGITS_MAX

    def read(self, text: str) -> float | int:
        """A number, as JSON can have it: one that floats cannot hold is a whole number. Raises `ValueError`
        for what has more than 4000 digits then, or 64,000 with those before it."""
        found = float(text)
        if math.isfinite(found):
            return found
        try:
            exact = Decimal(text)
        except InvalidOperation:  # its exponent is too large even for that
            digits = DIGITS_MAX + 1
        else:
            digits = exact.adjusted() + 1
        if digits > DIGITS_MAX:
            raise ValueError(f"expected at most {DIGITS_MAX} digits")
        self._left -= digits
        if self._left < 0:
            raise ValueError(f"expected at most {ALL_DIGITS_MAX} digits of numbers that floats cannot hold")
        return int(exact)
