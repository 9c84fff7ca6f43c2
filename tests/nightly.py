"""What chance draws: the same few seeds in each commit's run, thousands of others in each night's.

`launch/nightly` sets `FLOWSPEC_NIGHT` to a number that it makes of the date and prints.
"""

from __future__ import annotations

import os
from typing import TypeVar

import pytest

NIGHT, FEWER = (int(os.environ.get(f"FLOWSPEC_{name}") or 0) for name in ("NIGHT", "FEWER"))
"""The first is 0 in the run of a commit; by the second `launch/test --fast` divides what chance draws."""
at_night = pytest.mark.skipif(not NIGHT, reason="runs at night")
_Value = TypeVar("_Value")


def nightly(usual: _Value, at_night: _Value) -> _Value:
    return at_night if NIGHT else usual


def seeds(usual: int, at_night: int) -> range:
    """Numbers to draw from, none of another night."""
    first = NIGHT * 10**6
    return range(first, first + nightly(usual, at_night) // (FEWER or 1))
