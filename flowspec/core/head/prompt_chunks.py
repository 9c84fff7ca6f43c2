"""How many rows of a prompt one segment carries.

Every chunk passes every stage. With long ones stages wait at a prompt's beginning and end; with short ones
each stage reads its weights more often. Chunks of r rows, each a slot of `slot_s(r)`, are through `stages`
stages when all their slots are over, one after another, and `stages - 1` of the longest of them.
"""

from __future__ import annotations

from collections.abc import Callable

SlotTime = Callable[[int], float]
"""Seconds that the slowest stage takes for so many rows."""
LEAST = 16
GAIN = 0.01
"""Shorter chunks, of which there are more, must save so much of the time."""


def chunk_rows(length: int, most: int, stages: int, slot_s: SlotTime) -> int:
    """Rows of each chunk of a prompt of which so many have to be run, `most` at most: the size, of those
    halved from `most`, with which it is through soonest.

    All chunks are alike: shorter ones at the end would wait for the long ones before them.
    """

    def spent_s(rows: int) -> float:
        whole, rest = divmod(length, rows)
        return (whole + stages - 1) * slot_s(min(rows, length)) + (slot_s(rest) if rest else 0.0)

    rows = best = most
    while (rows := rows // 2) >= LEAST:
        if spent_s(rows) < (1 - GAIN) * spent_s(best):
            best = rows
    return best
