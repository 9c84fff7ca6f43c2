"""A useless drafter in virtual time; see `bench.drafting`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flowspec.bench.guesses import WIDTH_MAX, Guesses, Maker, MemoDrafter
from flowspec.bench.plain import PlainCase
from flowspec.draft.ranking import Children, Ranker
from flowspec.sim.language import HashLanguage, as_prefix

RANDOM_SHARPNESS = 3.0
"""A useless drafter is the harder to bear the surer it is of itself."""


class Randoms:
    """`random`: sure of itself, and about nothing."""

    def __init__(self, ranker: Ranker, vocabulary_size: int, context: int) -> None:
        self.ranker = ranker
        self.vocabulary_size = vocabulary_size
        self.context = context

    def begin(self, case: PlainCase) -> Maker:
        guesses = _RandomGuesses(self, case)
        return lambda: MemoDrafter(guesses)


class _RandomGuesses(Guesses):
    def __init__(self, drafting: Randoms, case: PlainCase) -> None:
        super().__init__(case, drafting.context)
        self._drafting = drafting

    def _rank(self, prefixes: Sequence[int]) -> list[Children]:
        language = HashLanguage(
            self._drafting.vocabulary_size, seed=0, sharpness=RANDOM_SHARPNESS
        )  # anew: it remembers all it says
        logits = np.stack([language.logits(as_prefix(self.prefixes.tokens(prefix))) for prefix in prefixes])
        return self._drafting.ranker.best(logits, self._positions(prefixes), WIDTH_MAX, self._texts(prefixes))
