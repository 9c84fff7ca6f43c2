"""Which drafter proposes in virtual time.

`VirtualDrafter` says which; for one case at a time it makes as many `Drafter`s as there are worlds. What a
drafter proposes after a prefix is computed once, and all methods share it (`bench.guesses`), but for those
that read the target's features (`bench.feature_guesses`). Knows nothing of time: what a pass costs is the
world's business.
"""

from __future__ import annotations

from typing import Protocol

from flowspec.bench.feature_guesses import FeatureReaders
from flowspec.bench.guesses import Maker
from flowspec.bench.model_guesses import Models
from flowspec.bench.plain import DTYPE, PlainCase
from flowspec.bench.random_guesses import Randoms
from flowspec.core.protocol import limits
from flowspec.draft.kinds import find_drafter
from flowspec.draft.ranking import Ranker
from flowspec.model.files import ModelFiles

RANDOM = "random"


class VirtualDrafter(Protocol):
    """One kind of drafter."""

    def begin(self, case: PlainCase) -> Maker:
        """What makes a drafter for each world of a case; what is computed for one is kept for all."""
        ...


def open_drafting(name: str, target: ModelFiles, *, coupled: bool = True) -> VirtualDrafter:
    """What `draft.kinds.open_drafter` opens, or `random`; without coupling models guess without the noise.

    Raises `InputError` for a drafter that cannot be used with the target in virtual time.
    """
    vocabulary, context = target.spec.vocabulary, target.spec.context_max
    ranker = Ranker(vocabulary, coupled=coupled)
    if name == RANDOM:
        return Randoms(ranker, vocabulary, context)
    kind = find_drafter(name)
    if kind.reads_features:
        kind.check(target)
        return FeatureReaders(kind, target, context=context, coupled=coupled)
    model = kind.model_for_device(target)
    if model is None:
        return Real(lambda: kind.open(target, DTYPE, None, context=context, coupled=coupled))
    return Models(model, ranker, min(context, model.spec.context_max, limits.CONTEXT_MAX))


class Real:
    """Cheap enough to run for real in every world."""

    def __init__(self, make: Maker) -> None:
        self._make = make

    def begin(self, case: PlainCase) -> Maker:
        return self._make
