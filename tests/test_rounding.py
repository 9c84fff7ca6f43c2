"""Numbers for people."""

from __future__ import annotations

from flowspec.rounding import duration, rounded


def test_three_digits_that_count_and_no_exponent() -> None:
    values = (0, 0.0123456, 0.00000123, 2.0, 42.17, 99.96, 1594.2, -3.14159, 1234567.8, float("inf"))
    shown = "0 0.0123 0.000001 2 42.2 100 1594 -3.14 1234568 inf"
    assert " ".join(map(rounded, values)) == shown


def test_durations_are_in_the_unit_that_is_read_most_easily() -> None:
    assert [*map(duration, (0.0924, 1.594, 0.0001, 1594))] == ["92.4 ms", "1.59 s", "0.1 ms", "1594 s"]
