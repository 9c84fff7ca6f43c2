"""What a drafter proposes after the prefixes of a case: computed once, and looked up in every world."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from flowspec.bench.plain import PlainCase
from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Proposal, Release, Segment
from flowspec.core.text_before import TextBefore
from flowspec.draft.protocol import Drafter
from flowspec.draft.ranking import Children
from flowspec.sim.prefixes import Prefixes, PrefixView

WIDTH_MAX = 16
"""Children that are kept for a prefix."""
BATCH = 64
"""Prefixes that are run in one pass."""

Maker = Callable[[], Drafter | None]
"""Makes a drafter for one world of a case; None where there is none."""


def depths_of(drafters: Iterable[Drafter]) -> tuple[float, ...]:
    """At which shares of the target's layers stand the states that drafters read; empty for most."""
    return tuple(sorted({depth for each in drafters for depth in getattr(each, "depths", ())}))


class Guesses(ABC):
    """What a drafter proposes after the prefixes of one case."""

    def __init__(self, case: PlainCase, context: int) -> None:
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

    def _texts(self, prefixes: Sequence[int]) -> list[TextBefore]:
        """And with what stands before the child, where the sampling needs it."""
        if not self.case.sampling.needs_text:
            return []
        tokens = [np.array(self.prefixes.tokens(prefix), dtype=np.int64) for prefix in prefixes]
        return [TextBefore(each, len(self.case.prompt)) for each in tokens]

    @abstractmethod
    def _rank(self, prefixes: Sequence[int]) -> list[Children]: ...


class MemoDrafter:
    captures: tuple[int, ...] = ()
    weight_bytes = 0
    cache_slots = limits.ID_MAX

    def __init__(self, guesses: Guesses) -> None:
        self.context = guesses.context
        self._guesses = guesses
        self._view = PrefixView(guesses.prefixes)

    def draft(self, segment: Segment, width: int) -> tuple[Proposal, ...]:
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
        self._view.release(message.request)

    def take_features(self, request: int, epoch: int, ids: Sequence[int], features: object) -> None:
        raise AssertionError("features came for a drafter that wants none")
