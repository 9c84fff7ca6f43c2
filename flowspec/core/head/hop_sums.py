"""Sums of what stages told of the segments that passed them (`Hop`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flowspec.core.protocol.messages import HOP_ROWS, HOP_SECONDS, Hop

DEAD = "dead_"
_FIGURES = (*HOP_SECONDS, *HOP_ROWS)
_REPORTED = {"rows": "rows_computed", "own_s": "stage_own_s"}


def reported(figure: str) -> str:
    """What a report and metrics call a figure, where there is more than hops."""
    return _REPORTED.get(figure, figure)


def _nothing() -> dict[str, float]:
    return dict.fromkeys(_FIGURES, 0)


@dataclass(slots=True)
class HopSums:
    """Sums of each figure, by stage in pipeline order; of stages that were lost only their sum is kept."""

    _stages: list[dict[str, float]] = field(default_factory=list)
    _earlier: dict[str, float] = field(default_factory=_nothing)

    def add(self, hops: Sequence[Hop], share: float = 1) -> None:
        """A segment came back, of which so much counts."""
        while len(self._stages) < len(hops):
            self._stages.append(_nothing())
        for sums, hop in zip(self._stages, hops, strict=False):
            for name in _FIGURES:
                sums[name] += share * getattr(hop, name)

    def lost(self) -> None:
        """The next stages may be others."""
        for sums in self._stages:
            for name in _FIGURES:
                self._earlier[name] += sums[name]
        self._stages = []

    def by_stage(self, figure: str) -> list[float]:
        return [sums[figure] for sums in self._stages]

    def total(self, figure: str) -> float:
        return self._earlier[figure] + sum(self.by_stage(figure))

    def report(self) -> dict[str, float]:
        """The total of each, whole for rows, and all rows that were dropped."""
        return {
            **{reported(name): round(self.total(name), 6) for name in HOP_SECONDS},
            **{reported(name): round(self.total(name)) for name in HOP_ROWS},
            "rows_dropped": round(sum(self.total(name) for name in HOP_ROWS if name.startswith(DEAD))),
        }
