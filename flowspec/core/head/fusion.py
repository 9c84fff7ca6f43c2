"""How far the models beside the target are to be believed: what they propose below a node, fused into one
ranking with chances.

Models have levels: drafters are at 0, intermediate verifiers above them in the order of the chain. Where one
of a higher level has spoken, its word alone counts. Drafters of one level are fused: a token's score is `1 -
prod_j (1 - w_j c_j)`, with c_j the calibrated confidence of drafter j and w_j its weight, its share of the
best one's expertise (docs/methods.md). Drafters agree more often than independent ones would, so a fused
score is calibrated again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flowspec.core.head.calibration import Calibrator

Offers = tuple[tuple[int, float], ...]
"""Tokens below a node, each with a model's own confidence in it (0 to 1)."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """Tokens below a node with a score each, best first, and who tells the chance of a score; `is_verdict`:
    an intermediate's."""

    offers: Offers
    judge: Calibrator
    is_verdict: bool


class Fusion:
    """What is learnt of each model by exact matches. `levels[j]` is that of model j.

    Not calibrated, confidences are taken as they are; without fusion a token is worth what the surest model
    says.
    """

    def __init__(self, levels: Sequence[int], *, is_calibrated: bool = True, fuses: bool = True) -> None:
        self.levels = tuple(levels)
        self._is_calibrated = is_calibrated
        self._fuses = fuses
        self.calibrators = [Calibrator.empty() for _ in levels]
        self.fused = Calibrator.empty()

    def rank(self, found: Mapping[int, Offers], weights: Sequence[float]) -> Ranked:
        """One ranking of what some models propose below one node; at least one has."""
        highest = max(self.levels[model] for model in found)
        spoke = [model for model in found if self.levels[model] == highest]
        if len(spoke) == 1:
            return Ranked(found[spoke[0]], self.calibrators[spoke[0]], highest > 0)
        doubts: dict[int, float] = {}
        for model in spoke:
            calibrator, weight = self.calibrators[model], weights[model]
            for token, confidence in found[model]:
                doubt = 1 - weight * self._believed(calibrator, confidence)
                before = doubts.get(token, 1.0)
                doubts[token] = before * doubt if self._fuses else min(before, doubt)
        scores = ((token, 1 - doubt) for token, doubt in doubts.items())
        return Ranked(tuple(sorted(scores, key=lambda offer: -offer[1])), self.fused, highest > 0)

    def chance(self, ranked: Ranked, score: float) -> float:
        """How likely a token of this score is to come true."""
        return self._believed(ranked.judge, score)

    def chance_of(self, model: int, offers: Offers, token: int) -> float:
        """The chance that a model gave to a token; 0 if it did not propose it."""
        return next(
            (
                self._believed(self.calibrators[model], confidence)
                for proposed, confidence in offers
                if proposed == token
            ),
            0.0,
        )

    def _believed(self, judge: Calibrator, confidence: float) -> float:
        return judge.chance(confidence) if self._is_calibrated else min(1.0, confidence)

    def observe(self, found: Mapping[int, Offers], ranked: Ranked, token: int) -> None:
        """The token below the node is known."""
        for model, offers in found.items():
            for proposed, confidence in offers:
                self.calibrators[model].observe(confidence, is_right=proposed == token)
        if ranked.judge is self.fused:
            for proposed, score in ranked.offers:
                self.fused.observe(score, is_right=proposed == token)

    @property
    def error(self) -> float:
        """The calibration error of the model that was heard most."""
        return (
            max(self.calibrators, key=lambda calibrator: calibrator.weight).error if self.calibrators else 0.0
        )
