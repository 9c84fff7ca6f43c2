"""The checks that messages make of their fields; each raises `ValueError` naming the field, what was expected
and what came."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from flowspec.core.protocol import limits


def check(condition: bool, name: str, value: object, expected: str) -> None:
    if not condition:
        raise ValueError(f"{name}: expected {expected}, got {value!r:.80}")


def check_range(name: str, value: float, low: float, high: float) -> None:
    check(low <= value <= high, name, value, f"{low} to {high}")


def check_most(name: str, count: int, most: int) -> None:
    check(count <= most, name, count, f"at most {most}")


def check_all(name: str, values: Sequence[int], low: int, high: int, count_max: int) -> None:
    check(len(values) <= count_max, name, f"{len(values)} entries", f"at most {count_max}")
    if values:
        check(
            low <= min(values) and max(values) <= high, name, (min(values), max(values)), f"{low} to {high}"
        )


def check_text(name: str, value: str, chars_max: int = limits.NAME_CHARS_MAX) -> None:
    check(len(value) <= chars_max, name, value, f"at most {chars_max} characters")
    check(value.isprintable(), name, value, "printable characters")


def is_numeric(host: str) -> bool:
    """Whether a host (IPv6 without brackets) is an IP address already."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
