"""Drafters that differ as an experiment declares: how often each is right in each domain, and how much what
they miss is the same.

Each is a synthetic drafter (`bench.synthetic`) of its own acceptance in the prompt's domain. What is drawn
for a token of the answer, how sure a drafter is and at which rank it has the token, is drawn together for all
of them: a Gaussian copula, of whose normal draws each drafter shares one by the square root of the
`correlation`. So each is right as often as it is declared to be, with a correlation of 0 whatever the others
are, and with 1 a weaker one only where a stronger one is. Of what is wrong they say the same as often as the
correlation says.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist

import numpy as np

from flowspec.bench.config import DeclaredDrafter
from flowspec.bench.guesses import WIDTH_MAX, Guesses, Maker, MemoDrafter
from flowspec.bench.plain import PlainCase
from flowspec.bench.synthetic import CONCENTRATION, QUANTILES, RECENT, VOCABULARY, children_of
from flowspec.draft.ranking import Children

PHI = np.vectorize(NormalDist().cdf)


class Declared:
    """`bench.drafting.VirtualDrafter` for one of them, the `number`th."""

    def __init__(self, drafter: DeclaredDrafter, number: int, correlation: float, context: int) -> None:
        assert 0 <= correlation <= 1
        self.drafter = drafter
        self.number = number
        self.correlation = correlation
        self.context = context

    def begin(self, case: PlainCase) -> Maker:
        guesses = _DeclaredGuesses(self, case)
        return lambda: MemoDrafter(guesses)


class _DeclaredGuesses(Guesses):
    def __init__(self, drafting: Declared, case: PlainCase) -> None:
        super().__init__(case, drafting.context)
        self._drafting = drafting
        self._acceptance = dict(drafting.drafter.acceptance)[case.domain]
        self._path = (*case.prompt, *case.answer)
        self._on_path = {
            prefix: position for position, prefix in enumerate(self.prefixes.chain(self._path), 1)
        }
        sure, lucky = self._drawn(2 * len(self._path)).reshape(2, -1)
        quantiles = _quantiles(self._acceptance)
        self._sure = quantiles[np.minimum((sure * QUANTILES).astype(int), QUANTILES - 1)]
        self._lucky = np.minimum(lucky, 1 - 1e-12)

    def _drawn(self, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Uniform draws, which those of other drafters for the same case are correlated with."""
        seed = (self.case.sampling.seed, *self.case.prompt[:RECENT])
        common = np.random.default_rng(seed).normal(size=count)
        own = np.random.default_rng((*seed, 1 + self._drafting.number)).normal(size=count)
        shared = self._drafting.correlation
        found: np.ndarray[tuple[int], np.dtype[np.float64]] = PHI(
            np.sqrt(shared) * common + np.sqrt(1 - shared) * own
        )
        return found

    def _rank(self, prefixes: Sequence[int]) -> list[Children]:
        return [self._children(prefix) for prefix in prefixes]

    def _children(self, prefix: int) -> Children:
        position = self._on_path.get(prefix)
        length, recent = self.prefixes.length(prefix), self.prefixes.recent(prefix, RECENT)
        said = hash((self.case.sampling.seed, length, position is None, *recent))
        everyone = random.Random(said)
        own = random.Random(hash((said, self._drafting.number)))
        is_shared = everyone.random() < self._drafting.correlation
        first = (everyone if is_shared else own).randrange(VOCABULARY // WIDTH_MAX)
        if position is None or position >= len(self._path):
            a = self._acceptance * CONCENTRATION
            return children_of(first, own.betavariate(a, CONCENTRATION - a))
        sure, lucky = float(self._sure[position]), float(self._lucky[position])
        return children_of(first, sure, self._path[position], lucky)


@cache
def _quantiles(acceptance: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Of the Beta distribution of how sure a drafter is."""
    a = acceptance * CONCENTRATION
    return np.sort(np.random.default_rng(0).beta(a, CONCENTRATION - a, QUANTILES))
