"""Synthetic drafters that are right as a profile says, or as an experiment declares several.

*Profiled*: confidences are from a Beta distribution whose mean is the share of first guesses, and under whose
concentration the other shares come out best. One that reads features is the runtime's own drafter over a
network that only counts: a prediction says how many predictions it stems from, a place of a block how far on
it is. Features travel, and come late, as those of a real one would.

*Declared*: each has an acceptance of its own in each domain. How sure a drafter is of a token of the answer,
and at which rank it has it, is drawn together for all of them: a Gaussian copula, of whose normal draws each
drafter shares one by the square root of the `correlation`. So each is right as often as declared, with a
correlation of 0 whatever the others are, and with 1 a weaker one only where a stronger one is. Of what is
wrong they say the same as often as the correlation says.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from flowspec.bench.cases import VOCABULARY, PlainCase
from flowspec.bench.drafters import (
    CONCENTRATION,
    QUANTILES,
    RECENT,
    Maker,
    SyntheticGuesses,
    children_of,
)
from flowspec.bench.experiment import WIDTH_MAX, Acceptance
from flowspec.core.protocol.messages import Proposal, Release, Segment
from flowspec.draft.cached import Masks, Row
from flowspec.draft.feature_drafter import BlockDrafter, CachedChainDrafter, FeatureDrafter
from flowspec.draft.ranking import Children
from flowspec.model.arithmetic.arrays import F32, I64
from flowspec.model.attention import TreeBatch, TreeCache
from flowspec.plan.tables import Table, Text
from flowspec.sim.prefixes import PrefixView
from lab.bench.profiles import BLOCK, TEXT, Profile, beta_of

F64 = npt.NDArray[np.float64]
PHI = np.vectorize(NormalDist().cdf)


# ------------------------------------------------------------------------------------------ as a profile says


@dataclass(frozen=True)
class Profiled:
    """A `bench.drafters.VirtualDrafter` for synthetic cases, whose domains are the profile's."""

    profile: Profile
    context: int

    def __call__(self, case: PlainCase) -> Maker:
        guesses = ProfiledGuesses(self, case)
        if self.profile.reads == TEXT:
            return guesses.drafter
        if self.profile.reads == BLOCK:
            return lambda: BlockOfProfile(_CountingBlock(guesses), guesses)
        return lambda: ChainOfProfile(_CountingChain(guesses), guesses)


class ProfiledGuesses(SyntheticGuesses):
    """What is said after a prefix at a distance. How hard a token is is drawn once: it is guessed the better
    the nearer it is, but for chance that has no part in distance."""

    def __init__(self, drafter: Profiled, case: PlainCase) -> None:
        super().__init__(case, drafter.context)
        self.depths = drafter.profile.depths
        shares = drafter.profile.of(case.domain, case.sampling.temperature).shares
        self.distances = len(shares)
        self._quantiles = [_quantiles(*beta_of(row, drafter.profile.within)) for row in shares]
        self._children_at: dict[tuple[int, int], Children] = {}

    def at(self, prefix: int, distance: int) -> Children:
        """Beyond the last distance of the profile it is as there."""
        key = (prefix, min(distance, self.distances))
        if key not in self._children_at:
            position, seed = self.place(prefix)
            chance = random.Random(seed)
            at, first, lucky = chance.random(), chance.randrange(VOCABULARY // WIDTH_MAX), chance.random()
            sure = float(self._quantiles[key[1] - 1][int(at * QUANTILES)])
            true = None if position is None or position >= len(self.path) else self.path[position]
            self._children_at[key] = children_of(first, sure, true, lucky)
        return self._children_at[key]

    def _children(self, prefix: int) -> Children:
        return self.at(prefix, 1)


class _Counting:
    """What both networks have in common: a feature is one number, and nothing is kept of a node. Which layers
    `captures` are is for the profile's `depths` to say."""

    captures = (0,)
    hidden_size = slot_bytes = 1
    weight_bytes = feature_width = 0
    target_ids = None
    engine: Any = SimpleNamespace(device="cpu", dtype="float32", zeros=np.zeros, copied=np.copy)
    """All that a drafter asks an engine for."""

    def __init__(self, guesses: ProfiledGuesses) -> None:
        self.context_max = guesses.context
        self.block = SimpleNamespace(size=guesses.distances)

    def project(self, target_features: F32) -> F32:
        return np.zeros((len(target_features), 1), np.float32)

    def new_cache(self, slots_max: int) -> TreeCache:
        return TreeCache({}, self.engine, slots_max=slots_max)


class _CountingChain(_Counting):
    """The target's features are 0, and a prediction is one more than what it stems from: the distance of what
    is guessed with it."""

    feature_width = 1

    def run(self, tokens: I64, features: F32, batch: TreeBatch) -> tuple[F32, F32]:
        return features + 1, features + 1


class _CountingBlock(_Counting):
    """A guess's place in the block, from 1 on, is its distance."""

    def write(self, features: F32, positions: I64, cache: TreeCache) -> None: ...

    def guess(self, tokens: Sequence[int], begins: Sequence[int], caches: Sequence[TreeCache]) -> F32:
        places = np.arange(1, self.block.size + 1, dtype=np.float32)
        return np.tile(places, (len(tokens), 1))[..., None]

    def after(self, guesses: F32, tokens: Sequence[int]) -> F32:
        return guesses


class _OfProfile(FeatureDrafter):
    """What both drafters have in common: `depths` and `ranked_rows` as in `bench.drafters.PathReader`."""

    def __init__(self, network: Any, guesses: ProfiledGuesses) -> None:
        super().__init__(network, VOCABULARY, context=guesses.context)
        self.depths = guesses.depths
        self.ranked_rows = 0
        self._guesses = guesses
        self._view = PrefixView(guesses.prefixes)

    def draft(self, segment: Segment, width: int) -> tuple[Proposal, ...]:
        for part in segment.parts:
            self._view.take(part)
        self.pass_rows = []  # a job in which nothing runs leaves them as they were
        proposals = super().draft(segment, width)
        self.ranked_rows = len(proposals)
        return proposals

    def release(self, message: Release) -> None:
        super().release(message)
        self._view.release(message.request)

    def take_features(self, request: int, epoch: int, ids: Sequence[int], features: object) -> None:
        super().take_features(request, epoch, ids, np.zeros((len(ids), 1), np.float32))

    def _propose(self, rows: Sequence[Row], hidden: F32, width: int, masks: Masks) -> list[Proposal]:
        """`hidden` `[rows, 1]` are distances."""
        proposals = []
        for row, distance in zip(rows, hidden[:, 0].astype(int).tolist(), strict=True):
            children = self._guesses.at(self._view.prefix(row.request, row.node), distance)
            proposal = Proposal(
                request=row.request,
                epoch=row.epoch,
                node=row.node,
                tokens=children.tokens[:width],
                confidences=children.confidences[:width],
            )
            proposals.append(proposal)
        return proposals


class ChainOfProfile(_OfProfile, CachedChainDrafter):
    """One guess on top of the other."""


class BlockOfProfile(_OfProfile, BlockDrafter):
    """A block has as many guesses as the profile has distances."""


# ------------------------------------------------------------------------------------------ as is declared


class DeclaredDrafter(Table, frozen=True, kw_only=True):
    """A table [[drafter]]: its `acceptance` by domain, how often its best guess is right."""

    name: Text
    acceptance: Annotated[
        Mapping[Text, Acceptance],
        Meta(min_length=1, description="a share for each domain: { code = 0.8, plays = 0.5 }"),
    ]


@dataclass(frozen=True)
class Declared:
    """A `bench.drafters.VirtualDrafter` for one of them, the `number`th."""

    drafter: DeclaredDrafter
    number: int
    correlation: float
    context: int

    def __call__(self, case: PlainCase) -> Maker:
        return _DeclaredGuesses(self, case).drafter


class _DeclaredGuesses(SyntheticGuesses):
    def __init__(self, drafter: Declared, case: PlainCase) -> None:
        super().__init__(case, drafter.context)
        self._number, self._correlation = drafter.number, drafter.correlation
        a = drafter.drafter.acceptance[case.domain] * CONCENTRATION
        self._beta = a, CONCENTRATION - a
        sure, lucky = self._draw(2 * len(self.path)).reshape(2, -1)
        self._sure = _quantiles(*self._beta)[np.minimum((sure * QUANTILES).astype(int), QUANTILES - 1)]
        self._lucky = np.minimum(lucky, 1 - 1e-12)

    def _draw(self, count: int) -> F64:
        """Uniform draws, which those of other drafters for the same case are correlated with."""
        seed = (self.case.sampling.seed, *self.case.prompt[:RECENT])
        common = np.random.default_rng(seed).normal(size=count)
        own = np.random.default_rng((*seed, 1 + self._number)).normal(size=count)
        draws: F64 = PHI(np.sqrt(self._correlation) * common + np.sqrt(1 - self._correlation) * own)
        return draws

    def _children(self, prefix: int) -> Children:
        position, seed = self.place(prefix)
        everyone, own = random.Random(seed), random.Random(hash((seed, self._number)))
        is_shared = everyone.random() < self._correlation
        first = (everyone if is_shared else own).randrange(VOCABULARY // WIDTH_MAX)
        if position is None or position >= len(self.path):
            return children_of(first, own.betavariate(*self._beta))
        sure, lucky = float(self._sure[position]), float(self._lucky[position])
        return children_of(first, sure, self.path[position], lucky)


@cache
def _quantiles(a: float, b: float) -> F64:
    """Of the Beta distribution of how sure a drafter is."""
    return np.sort(np.random.default_rng(0).beta(a, b, QUANTILES))
