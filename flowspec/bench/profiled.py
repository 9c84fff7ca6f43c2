"""A synthetic drafter that is right as often as a profile says, by rank, distance and domain; see
`bench.profiles`.

One that reads features is the runtime's own drafter (`draft.eagle`, `draft.block`) over a network that only
counts: a prediction says how many predictions it stems from, a place of a block how far on it is. So when a
guess is made again, what a pass costs and what is known by then is as in the runtime, and what the network
would say is drawn by chance. Features travel, and come late, as those of a real one would: their bytes and
the layers that they are of are the profile's.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from flowspec.bench.guesses import WIDTH_MAX, Guesses, Maker, MemoDrafter
from flowspec.bench.plain import PlainCase
from flowspec.bench.profiles import BLOCK, TEXT, Profile, beta_of
from flowspec.bench.synthetic import QUANTILES, RECENT, VOCABULARY, children_of
from flowspec.core.protocol.messages import Proposal, Release, Segment
from flowspec.draft.block import BlockDrafter
from flowspec.draft.cached import Masks, Row
from flowspec.draft.eagle import EagleDrafter
from flowspec.draft.featured import FeatureDrafter
from flowspec.draft.ranking import Children
from flowspec.model.arithmetic.arrays import F32, I64
from flowspec.model.attention import TreeBatch, TreeCache
from flowspec.sim.prefixes import PrefixView


class Profiled:
    """`bench.drafting.VirtualDrafter` for synthetic cases, whose domains are the profile's."""

    def __init__(self, profile: Profile, context: int) -> None:
        self.profile = profile
        self.context = context

    def begin(self, case: PlainCase) -> Maker:
        guesses, profile = ProfiledGuesses(self, case), self.profile
        if profile.reads == TEXT:
            return lambda: MemoDrafter(guesses)
        if profile.reads == BLOCK:
            return lambda: BlockOfProfile(guesses, profile.depths)
        return lambda: ChainOfProfile(guesses, profile.depths)


class ProfiledGuesses(Guesses):
    """What is said after a prefix at a distance. How hard a token is is drawn once: it is guessed the better
    the nearer it is, but for chance that has no part in distance."""

    def __init__(self, drafting: Profiled, case: PlainCase) -> None:
        super().__init__(case, drafting.context)
        profile = drafting.profile
        self._path = (*case.prompt, *case.answer)
        self._on_path = {
            prefix: position for position, prefix in enumerate(self.prefixes.chain(self._path), 1)
        }
        self._quantiles = [
            np.sort(np.random.default_rng(0).beta(*beta_of(row, profile.within), QUANTILES)).tolist()
            for row in profile.of(case.domain, case.sampling.temperature).shares
        ]
        self._said: dict[tuple[int, int], Children] = {}

    @property
    def distances(self) -> int:
        return len(self._quantiles)

    def at(self, prefix: int, distance: int) -> Children:
        """Beyond the last distance of the profile it is as there."""
        distance = min(distance, self.distances)
        key = (prefix, distance)
        if key not in self._said:
            self._said[key] = self._children(prefix, distance)
        return self._said[key]

    def _children(self, prefix: int, distance: int) -> Children:
        position = self._on_path.get(prefix)
        # By its tokens, not its number, as in `bench.synthetic`.
        length, recent = self.prefixes.length(prefix), self.prefixes.recent(prefix, RECENT)
        chance = random.Random(hash((self.case.sampling.seed, length, position is None, *recent)))
        at, first, lucky = chance.random(), chance.randrange(VOCABULARY // WIDTH_MAX), chance.random()
        sure = self._quantiles[distance - 1][int(at * QUANTILES)]
        true = None if position is None or position >= len(self._path) else self._path[position]
        return children_of(first, sure, true, lucky)

    def _rank(self, prefixes: Sequence[int]) -> list[Children]:
        return [self.at(prefix, 1) for prefix in prefixes]


class _Texts:
    """Nodes as prefixes, and proposals below them."""

    def __init__(self, guesses: ProfiledGuesses) -> None:
        self._guesses = guesses
        self._view = PrefixView(guesses.prefixes)

    def learn(self, segment: Segment) -> None:
        for part in segment.parts:
            self._view.take(part)

    def release(self, request: int) -> None:
        self._view.release(request)

    def propose(self, rows: Sequence[Row], distances: F32, width: int) -> list[Proposal]:
        """`distances` `[rows, 1]`."""
        assert width <= WIDTH_MAX, f"{width} children are asked for, {WIDTH_MAX} are kept"
        found = []
        for row, distance in zip(rows, distances[:, 0].astype(int).tolist(), strict=True):
            children = self._guesses.at(self._view.prefix(row.request, row.node), distance)
            found.append(
                Proposal(
                    request=row.request,
                    epoch=row.epoch,
                    node=row.node,
                    tokens=children.tokens[:width],
                    confidences=children.confidences[:width],
                )
            )
        return found


class _Memory:
    """All that a drafter asks an engine for."""

    device, dtype = "cpu", "float32"

    def zeros(self, shape: tuple[int, ...], dtype: str) -> F32:
        return np.zeros(shape, np.float32)

    def copied(self, x: F32) -> F32:
        return x.copy()

    def store(self, *_: Any) -> None:
        raise AssertionError("there are no keys and values")


class _Counting:
    """What both networks have in common: a feature is one number, and nothing is kept of a node."""

    capture = (0,)
    """Some: which layers these are is for the profile's `depths` to say."""
    hidden_size = width = slot_bytes = 1
    weight_bytes = 0
    engine: Any = _Memory()

    def __init__(self, context: int) -> None:
        self.context_max = context

    def project(self, target_features: F32) -> F32:
        return np.zeros((len(target_features), 1), np.float32)

    def logits(self, hidden: F32) -> F32:
        raise AssertionError("what is proposed is drawn by chance")

    def target_ids(self) -> None:
        return None

    def new_cache(self, slots_max: int) -> TreeCache:
        return TreeCache({}, self.engine, slots_max=slots_max)


class _CountingChain(_Counting):
    """The target's features are 0, and a prediction is one more than what it stems from: the distance of what
    is guessed with it."""

    def run(self, tokens: I64, features: F32, positions: I64, batch: TreeBatch) -> F32:
        return features + 1


class _CountingBlock(_Counting):
    """Its place in the block, from 1 on, is the distance of a guess."""

    def __init__(self, context: int, size: int) -> None:
        super().__init__(context)
        self.block = SimpleNamespace(size=size, rank=0)

    def write(self, features: F32, positions: I64, cache: TreeCache) -> None: ...

    def run(self, tokens: Sequence[int], begins: Sequence[int], caches: Sequence[TreeCache]) -> F32:
        places = np.arange(1, self.block.size + 1, dtype=np.float32)
        return np.tile(places, (len(tokens), 1))[..., None]

    def after(self, guesses: F32, tokens: Sequence[int]) -> F32:
        return guesses


TARGET: Any = SimpleNamespace(spec=SimpleNamespace(vocabulary=VOCABULARY))
"""All that a drafter asks a target for."""


class _OfProfile(FeatureDrafter[Any, Any]):
    """What both drafters have in common: `depths` as in `bench.feature_guesses.PathReader`, and so is
    `ranked_rows`."""

    def __init__(self, head: Any, guesses: ProfiledGuesses, depths: Sequence[float]) -> None:
        super().__init__(head, TARGET, context=guesses.context)
        self.depths = tuple(depths)
        self.ranked_rows = 0
        self._texts = _Texts(guesses)

    def draft(self, segment: Segment, width: int) -> tuple[Proposal, ...]:
        self._texts.learn(segment)
        self.pass_rows = []  # a job in which nothing runs leaves them as they were
        found = super().draft(segment, width)
        self.ranked_rows = len(found)
        return found

    def release(self, message: Release) -> None:
        super().release(message)
        self._texts.release(message.request)

    def take_features(self, request: int, epoch: int, ids: Sequence[int], features: object) -> None:
        super().take_features(request, epoch, ids, np.zeros((len(ids), 1), np.float32))

    def _propose(self, rows: Sequence[Row], hidden: F32, width: int, masks: Masks) -> list[Proposal]:
        return self._texts.propose(rows, hidden, width)


class ChainOfProfile(_OfProfile, EagleDrafter):
    def __init__(self, guesses: ProfiledGuesses, depths: Sequence[float]) -> None:
        super().__init__(_CountingChain(guesses.context), guesses, depths)


class BlockOfProfile(_OfProfile, BlockDrafter):
    """A block has as many guesses as the profile has distances."""

    def __init__(self, guesses: ProfiledGuesses, depths: Sequence[float]) -> None:
        super().__init__(_CountingBlock(guesses.context, guesses.distances), guesses, depths)
