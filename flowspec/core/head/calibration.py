"""From a drafter's confidence to the chance of being right, learnt while answers are made.

Confidences are sorted into bins by their odds. Each bin starts with the belief that the drafter is right,
which a few observations outweigh, and old observations fade, so that a change of subject is followed.
"""

from __future__ import annotations

import math
from typing import Any

from flowspec.core.head.kept import Kept

BINS = 16
ODDS_SPAN = 5.0
"""Log-odds beyond plus and minus this share the outermost bins (confidences below 0.7% and above 99.3%)."""
PRIOR_WEIGHT = 6.0
"""Observations that the drafter's own word counts for."""
MEMORY = 400.0
"""Observations after which old ones have faded to about a third."""
CHANCE_MAX = 0.999


class Calibrator:
    """Counts how often proposals of about the same confidence were right."""

    def __init__(self) -> None:
        self._trials = [0.0] * BINS
        self._hits = [0.0] * BINS
        self._claimed = [0.0] * BINS

    def chance(self, confidence: float) -> float:
        """The estimated probability that a proposal of this confidence is right, if its parent is."""
        index = _bin(confidence)
        estimate = (self._hits[index] + PRIOR_WEIGHT * confidence) / (self._trials[index] + PRIOR_WEIGHT)
        return min(CHANCE_MAX, estimate)

    def observe(self, confidence: float, *, is_right: bool) -> None:
        index = _bin(confidence)
        keep = 1 - 1 / MEMORY
        self._trials[index] = self._trials[index] * keep + 1
        self._hits[index] = self._hits[index] * keep + is_right
        self._claimed[index] = self._claimed[index] * keep + confidence

    def kept(self) -> dict[str, Any]:
        return {"trials": self._trials, "hits": self._hits, "claimed": self._claimed}

    def recall(self, kept: Kept) -> None:
        """Raises `ValueError`."""
        trials = kept["trials"].numbers(BINS, most=MEMORY)
        counts = [
            [each.number(most=most) for each, most in zip(kept[key].each(BINS), trials, strict=True)]
            for key in ("hits", "claimed")
        ]
        self._trials, (self._hits, self._claimed) = trials, counts

    @property
    def weight(self) -> float:
        """How much has been seen of late."""
        return sum(self._trials)

    @property
    def error(self) -> float:
        """Expected calibration error of the drafter's own confidences: mean |claimed - right|, weighted by
        how often seen."""
        total = sum(self._trials)
        if total == 0:
            return 0.0
        return (
            sum(abs(claimed - hits) for claimed, hits in zip(self._claimed, self._hits, strict=True)) / total
        )


def _bin(confidence: float) -> int:
    bounded = min(max(confidence, 1e-6), 1 - 1e-6)
    odds = math.log(bounded / (1 - bounded))
    share = (odds + ODDS_SPAN) / (2 * ODDS_SPAN)
    return min(BINS - 1, max(0, int(share * BINS)))
