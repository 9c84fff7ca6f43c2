"""Drafters for virtual time: what a real one proposes after a prefix is computed once, and all methods share
it.

`Drafting` says which drafter; for one case at a time it makes as many `Drafter`s as there are worlds. Knows
nothing of time: what a pass costs is the world's business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from flowspec.bench.plain import DTYPE, Case
from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Proposal, Release, Segment
from flowspec.draft.kinds import find_drafter
from flowspec.draft.protocol import Drafter
from flowspec.draft.ranking import Children, Ranker
from flowspec.errors import InputError
from flowspec.model.files import ModelFiles
from flowspec.model.support import context_max
from flowspec.sim.language import HashLanguage, as_prefix
from flowspec.sim.prefixes import Prefixes, PrefixView

if TYPE_CHECKING:
    import torch

RANDOM = "random"
WIDTH_MAX = 16
"""Children that are kept for a prefix."""
BATCH = 64
"""Prefixes that are run in one pass."""
RANDOM_SHARPNESS = 3.0
"""A useless drafter is the harder to bear the surer it is of itself."""

Maker = Callable[[], Drafter | None]


class Drafting(Protocol):
    """One kind of drafter."""

    def begin(self, case: Case) -> Maker:
        """What makes a drafter for each world of a case; what is computed for one is kept for all."""
        ...


def open_drafting(name: str, target: ModelFiles, *, coupled: bool = True) -> Drafting:
    """What `draft.kinds.open_drafter` opens but what wants the target's features, or `random`; without coupling
    models guess without the noise.

    Raises `InputError` for a drafter that cannot be used with the target in virtual time.
    """
    config = target.config()
    context, ranker = context_max(config), Ranker(config.vocab_size, coupled=coupled)
    if name == RANDOM:
        return Randoms(ranker, config.vocab_size, context)
    kind = find_drafter(name)
    if kind.reads_features:
        raise InputError(
            f"--drafter {name}: {kind.plural} need the target's features, and in virtual time nothing computes "
            "them"
        )
    model = kind.model_for_device(target)
    if model is None:
        return Real(lambda: kind.open(target, DTYPE, None, context=context, coupled=coupled))
    from flowspec.bench.model_guesses import Models

    return Models(model, ranker, min(context, context_max(model.config()), limits.CONTEXT_MAX))


class Real:
    """Cheap enough to run for real in every world."""

    def __init__(self, make: Maker) -> None:
        self._make = make

    def begin(self, case: Case) -> Maker:
        return self._make


class Guesses(ABC):
    """What a drafter proposes after the prefixes of one case."""

    def __init__(self, case: Case, context: int) -> None:
        self.case = case
        self.context = context
        self.prefixes = Prefixes()
        self.passes = 0
        self._known: dict[int, Children] = {}

    def children(self, asked: Sequence[int]) -> list[Children]:
        """Up to `WIDTH_MAX` children of each prefix, best first."""
        missing = [prefix for prefix in dict.fromkeys(asked) if prefix not in self._known]
        for first in range(0, len(missing), BATCH):
            some = missing[first : first + BATCH]
            self.passes += 1
            self._known.update(zip(some, self._rank(some), strict=True))
        return [self._known[prefix] for prefix in asked]

    def _positions(self, prefixes: Sequence[int]) -> list[tuple[Any, int]]:
        """How the ranker is asked: with the sampling, and the position at which each child will stand."""
        return [(self.case.sampling, self.prefixes.length(prefix)) for prefix in prefixes]

    @abstractmethod
    def _rank(self, prefixes: Sequence[int]) -> list[Children]: ...


class MemoDrafter:
    """A `Drafter` that looks up what it proposes."""

    captures: tuple[int, ...] = ()
    weight_bytes = 0
    cache_slots = limits.ID_MAX

    def __init__(self, guesses: Guesses) -> None:
        self.context = guesses.context
        self._guesses = guesses
        self._view = PrefixView(guesses.prefixes)

    def draft(self, segment: Segment, width: int) -> tuple[Proposal, ...]:
        """See `draft.protocol.Drafter`."""
        assert width <= WIDTH_MAX, f"{width} children are asked for, {WIDTH_MAX} are kept"
        asked = [
            (part.commit, node, prefix) for part in segment.parts for node, prefix in self._view.take(part)
        ]
        found = self._guesses.children([prefix for _, _, prefix in asked])
        return tuple(
            Proposal(
                request=commit.request,
                epoch=commit.epoch,
                node=node,
                tokens=children.tokens[:width],
                confidences=children.confidences[:width],
            )
            for (commit, node, _), children in zip(asked, found, strict=True)
        )

    def release(self, message: Release) -> None:
        """Forgets a request."""
        self._view.release(message.request)

    def take_features(self, request: int, epoch: int, ids: Sequence[int], features: torch.Tensor) -> None:
        raise AssertionError("features came for a drafter that wants none")


class DrafterForEach:
    """Drafters of one request each, as one: each part of a segment goes to its own, and one pass runs them
    all."""

    captures: tuple[int, ...] = ()
    weight_bytes = 0
    cache_slots = limits.ID_MAX

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self.context = min(drafter.context for drafter in drafters)
        self._drafters = drafters

    def draft(self, segment: Segment, width: int) -> tuple[Proposal, ...]:
        """See `draft.protocol.Drafter`."""
        found: list[Proposal] = []
        for part in segment.parts:
            found += self._drafters[part.commit.request].draft(
                Segment(segment=segment.segment, parts=(part,)), width
            )
        return tuple(found)

    def release(self, message: Release) -> None:
        self._drafters[message.request].release(message)

    def take_features(self, request: int, epoch: int, ids: Sequence[int], features: torch.Tensor) -> None:
        raise AssertionError("features came for a drafter that wants none")


class Randoms:
    """`random`: sure of itself, and about nothing."""

    def __init__(self, ranker: Ranker, vocabulary_size: int, context: int) -> None:
        self.ranker = ranker
        self.vocabulary_size = vocabulary_size
        self.context = context

    def begin(self, case: Case) -> Maker:
        guesses = _RandomGuesses(self, case)
        return lambda: MemoDrafter(guesses)


class _RandomGuesses(Guesses):
    def __init__(self, drafting: Randoms, case: Case) -> None:
        super().__init__(case, drafting.context)
        self._drafting = drafting

    def _rank(self, prefixes: Sequence[int]) -> list[Children]:
        language = HashLanguage(
            self._drafting.vocabulary_size, seed=0, sharpness=RANDOM_SHARPNESS
        )  # anew: it remembers all it says
        logits = np.stack([language.logits(as_prefix(self.prefixes.tokens(prefix))) for prefix in prefixes])
        return self._drafting.ranker.best(logits, self._positions(prefixes), WIDTH_MAX)
