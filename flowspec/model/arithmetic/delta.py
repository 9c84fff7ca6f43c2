"""What the gated delta rule computes with; the rule itself is `plain.delta_rule`."""

from __future__ import annotations

from typing import NamedTuple

from flowspec.model.arithmetic.arrays import Array


class DeltaRows(NamedTuple):
    """What rows bring to steps of linear attention, float32: `queries`, `keys` `[rows, key_heads,
    key_width]`, `values` `[rows, heads, value_width]`, `decays` and `shares` `[rows, heads]`. A key head is
    that of `heads / key_heads` heads in a row."""

    queries: Array
    keys: Array
    values: Array
    decays: Array
    shares: Array
