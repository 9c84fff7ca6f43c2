"""How long things take: a pass over layers by rows and context, a message by bytes. What all worlds share.

The cost model (`plan.cost`) makes these from device profiles and model shapes; the simulator takes them for
the truth, and emulated devices wait until they have come true.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Seconds of a pass: a roofline of memory (weights, keys and values) and computing, and what comes on
    top.

    `max(base_s + context_s * context, (row_s + row_context_s * context) * rows) + extra_row_s * rows +
    fixed_s`, where `context` is how many earlier tokens the rows see. Without a context the knee is at
    `base_s / row_s` rows.
    """

    base_s: float = 0.0
    row_s: float = 0.0
    extra_row_s: float = 0.0
    fixed_s: float = 0.0
    context_s: float = 0.0
    row_context_s: float = 0.0

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name}: expected seconds from 0, got {getattr(self, name)!r}")

    def seconds(self, rows: int, context: int = 0) -> float:
        memory_s = self.base_s + self.context_s * context
        compute_s = (self.row_s + self.row_context_s * context) * rows
        return max(memory_s, compute_s) + self.extra_row_s * rows + self.fixed_s

    def scaled(self, factor: float) -> Curve:
        """A device that is `factor` times as slow."""
        return Curve(**{field.name: getattr(self, field.name) * factor for field in fields(self)})

    def and_fixed(self, fixed_s: float) -> Curve:
        """The same with `fixed_s` more for each pass."""
        return Curve(
            **{
                field.name: getattr(self, field.name) + (fixed_s if field.name == "fixed_s" else 0.0)
                for field in fields(self)
            }
        )


INSTANT = Curve()


def slowest(curves: Sequence[Curve]) -> Callable[[int], float]:
    """Seconds by rows of the slowest of these."""
    return lambda rows: max(curve.seconds(rows) for curve in curves)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """One direction between two devices: `delay_s` for every message, up to `jitter_s` more by chance, and a
    rate in Mbit/s."""

    delay_s: float = 0.0
    bandwidth_mbps: float = float("inf")
    jitter_s: float = 0.0

    def __post_init__(self) -> None:
        if not (
            0 <= self.delay_s < float("inf") and 0 <= self.jitter_s < float("inf") and self.bandwidth_mbps > 0
        ):
            raise ValueError(f"expected a delay and jitter from 0 and a bandwidth above 0, got {self}")

    def transfer_s(self, size_bytes: float) -> float:
        """How long a message keeps the link busy."""
        return size_bytes * 8e-6 / self.bandwidth_mbps


DIRECT = LinkSpec()
