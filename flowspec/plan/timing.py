"""How long things take: a pass over layers by rows and context, a message by bytes. What all worlds share.

The cost model (`plan.cost`) makes these from device profiles and model shapes; the simulator takes them for
the truth, and emulated devices wait until they have come true.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

EXPERTS_SHARED = 0.38
"""Of the experts that a token runs through, those that the token before it ran through, too: as Cohere
measured it for its mixtures (2026, "Mixture of experts models get more from speculative decoding")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Seconds of a pass: a roofline of memory (weights, keys and values) and computing, and what comes on
    top.

    `max(base_s + chosen_s * choices_of(rows) + context_s * context,
    (row_s + row_context_s * context) * rows) + extra_row_s * rows + start_s * choices_of(rows) + fixed_s`,
    where `context` is how many earlier tokens the rows see. Of a mixture of experts `chosen_s` reads those
    that one row chooses, `start_s` is what starting these takes, and there are `choices` times as many, of
    which a row has the share `shared` with the row before; other models have none. Without either the knee is
    at `base_s / row_s` rows.
    """

    base_s: float = 0.0
    row_s: float = 0.0
    extra_row_s: float = 0.0
    fixed_s: float = 0.0
    context_s: float = 0.0
    row_context_s: float = 0.0
    chosen_s: float = 0.0
    start_s: float = 0.0
    choices: float = 1.0
    shared: float = EXPERTS_SHARED

    def __post_init__(self) -> None:
        for name in _TIMES:
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name}: expected seconds from 0, got {getattr(self, name)!r}")
        if not 1 <= self.choices < float("inf"):
            raise ValueError(f"choices: expected a number from 1, got {self.choices!r}")
        if not 0 <= self.shared <= 1:
            raise ValueError(f"shared: expected a share, got {self.shared!r}")

    def choices_of(self, rows: int) -> float:
        """How many times the experts of one row are read for so many rows.

        Each further row has `shared` of its own from the one before it, and chooses the others by chance
        among those that this one did not choose; those that were read already cost nothing. With no more in
        common than chance has it that is 2505.19645's number, and fewer is taken for as many.
        """
        if self.choices == 1:
            return 1.0
        left = (1 - max(self.shared, 1 / self.choices)) / (self.choices - 1)
        return self.choices - (self.choices - 1) * (1 - left) ** (rows - 1)

    def seconds(self, rows: int, context: int = 0) -> float:
        memory_s, fixed_s = self.base_s + self.context_s * context, self.fixed_s
        if self.chosen_s or self.start_s:
            choices = self.choices_of(rows)
            memory_s += self.chosen_s * choices
            fixed_s += self.start_s * choices
        compute_s = (self.row_s + self.row_context_s * context) * rows
        return max(memory_s, compute_s) + self.extra_row_s * rows + fixed_s

    def scaled(self, factor: float) -> Curve:
        """A device that is `factor` times as slow."""
        return replace(self, **{name: getattr(self, name) * factor for name in _TIMES})

    def and_fixed(self, fixed_s: float) -> Curve:
        """The same with `fixed_s` more for each pass."""
        return replace(self, fixed_s=self.fixed_s + fixed_s)


_TIMES = tuple(field.name for field in fields(Curve) if field.name.endswith("_s"))

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
GIGABIT = LinkSpec(bandwidth_mbps=1000, delay_s=0.0005)
