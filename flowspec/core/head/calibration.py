"""From a drafter's confidence to the chance of being right, learnt while answers are made.

Confidences are sorted into bins by their odds. Each bin starts with the belief that the drafter is right,
which a few observations outweigh, and old observations fade, so that a change of subject is followed.
"""

from __future__ import annotations

import math
import operator
from typing import Annotated

from msgspec import Meta

from flowspec.core.head.learnt import Learnt
from flowspec.validation import expect

BINS = 16
ODDS_SPAN = 5.0
"""Log-odds beyond plus and minus this share the outermost bins (confidences below 0.7% and above 99.3%)."""
PRIOR_WEIGHT = 6.0
"""Observations that the drafter's own word counts for."""
MEMORY = 400.0
"""Observations after which old ones have faded to about a third."""
CHANCE_MAX = 0.999

_Counts = Annotated[
    list[Annotated[float, Meta(ge=0, le=MEMORY)]],
    Meta(min_length=BINS, max_length=BINS, description=f"{BINS} numbers"),
]


class Calibrator(Learnt, kw_only=True):
    """Counts how often proposals of about the same confidence were right; its own state."""

    trials: _Counts
    hits: _Counts
    claimed: _Counts

    @staticmethod
    def empty() -> Calibrator:
        return Calibrator(trials=[0.0] * BINS, hits=[0.0] * BINS, claimed=[0.0] * BINS)

    def __post_init__(self) -> None:
        for name, counts in (("hits", self.hits), ("claimed", self.claimed)):
            expect(all(map(operator.le, counts, self.trials)), name, counts, "no more than the trials")

    def chance(self, confidence: float) -> float:
        """The estimated probability that a proposal of this confidence is right, if its parent is."""
        index = _bin(confidence)
        estimate = (self.hits[index] + PRIOR_WEIGHT * confidence) / (self.trials[index] + PRIOR_WEIGHT)
        return min(CHANCE_MAX, estimate)

    def observe(self, confidence: float, *, is_right: bool) -> None:
        index = _bin(confidence)
        keep = 1 - 1 / MEMORY
        self.trials[index] = self.trials[index] * keep + 1
        self.hits[index] = self.hits[index] * keep + is_right
        self.claimed[index] = self.claimed[index] * keep + confidence

    @property
    def weight(self) -> float:
        """How much has been seen of late."""
        return sum(self.trials)

    @property
    def error(self) -> float:
        """Expected calibration error of the drafter's own confidences: mean |claimed - right|, weighted by
        how often seen."""
        total = sum(self.trials)
        if total == 0:
            return 0.0
        return sum(abs(claimed - hits) for claimed, hits in zip(self.claimed, self.hits, strict=True)) / total


def _bin(confidence: float) -> int:
    bounded = min(max(confidence, 1e-6), 1 - 1e-6)
    odds = math.log(bounded / (1 - bounded))
    share = (odds + ODDS_SPAN) / (2 * ODDS_SPAN)
    return min(BINS - 1, max(0, int(share * BINS)))
