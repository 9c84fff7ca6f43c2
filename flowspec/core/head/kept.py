"""What an earlier run learnt, as plain data, read with care: it comes from a file that may have been edited.

Each class that learns has a `kept`, plain data that JSON can hold, and a `recall`, which takes that of an
earlier run. What is not as expected raises `ValueError`, which names the place, what was expected and what
came; a class takes all that is its own, or nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

COUNT_MAX = 10**12
NUMBER_MAX = 1e30


class Kept:
    """Plain data with the `place` that it has in the whole."""

    def __init__(self, data: Any, place: str = "learnt") -> None:
        self.data = data
        self._place = place

    def __getitem__(self, key: str | int) -> Kept:
        """What a dictionary has by a name, or a list at an index."""
        place = f"{self._place}.{key}" if isinstance(key, str) else f"{self._place}[{key}]"
        expected = dict if isinstance(key, str) else list
        if not isinstance(self.data, expected):
            self._wrong("names with values" if expected is dict else "a list")
        if key in self.data if isinstance(key, str) else key < len(self.data):
            return Kept(self.data[key], place)
        raise ValueError(f"{place}: expected a value, got none")

    def __contains__(self, key: str) -> bool:
        """Whether there is a value by that name: what a former version kept has not all of them."""
        return isinstance(self.data, dict) and key in self.data

    def each(self, count: int | None = None, most: int | None = None) -> Iterator[Kept]:
        """The members of a list of `count` ones, or at `most` so many."""
        if not isinstance(self.data, list):
            self._wrong("a list")
        if count not in (None, len(self.data)) or (most is not None and len(self.data) > most):
            told = f"{count} values" if count is not None else f"at most {most} values"
            raise ValueError(f"{self._place}: expected {told}, got {len(self.data)}")
        return (self[at] for at in range(len(self.data)))

    def number(self, least: float = 0.0, most: float = math.inf) -> float:
        if isinstance(self.data, bool) or not isinstance(self.data, int | float):
            self._wrong("a number")
        if not least <= self.data <= most or abs(self.data) > NUMBER_MAX:
            self._wrong(f"a number from {least:g}" + ("" if math.isinf(most) else f" to {most:g}"))
        return float(self.data)

    def whole(self, least: int = 0, most: int = COUNT_MAX) -> int:
        if isinstance(self.data, bool) or not isinstance(self.data, int) or not least <= self.data <= most:
            self._wrong(f"a whole number from {least} to {most}")
        return int(self.data)

    def flag(self) -> bool:
        if not isinstance(self.data, bool):
            self._wrong("true or false")
        return bool(self.data)

    def numbers(self, count: int, least: float = 0.0, most: float = math.inf) -> list[float]:
        return [each.number(least, most) for each in self.each(count)]

    def wholes(self, count: int, most: int = COUNT_MAX) -> list[int]:
        return [each.whole(0, most) for each in self.each(count)]

    def _wrong(self, expected: str) -> None:
        raise ValueError(f"{self._place}: expected {expected}, got {str(self.data)!r:.60}")
