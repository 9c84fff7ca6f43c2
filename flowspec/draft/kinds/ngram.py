"""`ngram`: prompt look-up, which goes with every target (`draft.ngram`)."""

from __future__ import annotations

from flowspec.draft.kinds.base import WordKind
from flowspec.draft.ngram import NgramDrafter
from flowspec.model.files import ModelFiles
from flowspec.plan import sites
from flowspec.plan.shape import ModelShape


class Ngram(WordKind):
    """See the module."""

    word = "ngram"
    plural = "n-grams"
    acceptance = 0.25  # a guess

    def open(
        self, target: ModelFiles, dtype: str, device: object, *, context: int, coupled: bool
    ) -> NgramDrafter:
        return NgramDrafter(context)

    def reckoned(self, target: ModelShape) -> sites.PlannedDrafter:
        return sites.PlannedDrafter(name=self.plural, shape=None, acceptance=self.acceptance)
