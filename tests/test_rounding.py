"""Numbers for people."""

from __future__ import annotations

import pytest

from flowspec.rounding import duration, rounded


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "0"),
        (0.0123456, "0.0123"),
        (0.00000123, "0.000001"),
        (1.5, "1.5"),
        (2.0, "2"),
        (42.17, "42.2"),
        (99.96, "100"),
        (100, "100"),
        (1594.2, "1594"),
        (-3.14159, "-3.14"),
        (1234567.8, "1234568"),
        (float("inf"), "inf"),
    ],
)
def test_three_digits_that_count_and_no_exponent(value: float, expected: str) -> None:
    assert rounded(value) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0.0924, "92.4 ms"), (1.594, "1.59 s"), (0.0001, "0.1 ms"), (1594, "1594 s")]
)
def test_durations_are_in_the_unit_that_is_read_most_easily(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected
