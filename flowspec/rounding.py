"""Numbers for people: three digits that count, and never an exponent."""

from __future__ import annotations

import math

DIGITS = 3
PLACES_MAX = 6


def rounded(value: float) -> str:
    """`0.0123`, `1.5`, `42.2`, `1590`."""
    if not value or not math.isfinite(value):
        return f"{value:.0f}"
    places = min(PLACES_MAX, max(0, DIGITS - 1 - math.floor(math.log10(abs(value)))))
    text = f"{value:.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def duration(seconds: float) -> str:
    """`92.4 ms`, `1.59 s`."""
    return f"{rounded(seconds)} s" if seconds >= 1 else f"{rounded(1000 * seconds)} ms"
