"""What chance draws: the same few seeds in each commit's run, thousands of others in each night's.

`launch/nightly` sets `FLOWSPEC_NIGHT` to a number that it makes of the date and prints.
"""

from __future__ import annotations

import os
from typing import TypeVar

import pytest

NIGHT = int(os.environ.get("FLOWSPEC_NIGHT") or 0)
"""0 in the run of a commit."""
at_night = pytest.mark.skipif(not NIGHT, reason="runs at night")
_Value = TypeVar("_Value")


def nightly(usual: _Value, at_night: _Value) -> _Value:
    return at_night if NIGHT else usual


def seeds(usual: int, at_night: int) -> range:
    """Numbers to draw from, none of another night."""
    first = NIGHT * 10**6
    return range(first, first + nightly(usual, at_night))
