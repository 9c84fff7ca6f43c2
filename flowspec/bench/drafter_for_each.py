"""Drafters of one request each, as one drafter of a world with many users."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from flowspec.bench.guesses import depths_of
from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Proposal, Release, Segment
from flowspec.draft.protocol import Drafter


class DrafterForEach:
    """Drafters of one request each, as one: each part of a segment goes to its own, and one pass runs them
    all."""

    weight_bytes = 0
    cache_slots = limits.ID_MAX

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self.context = min(drafter.context for drafter in drafters)
        self.captures = drafters[0].captures
        self.depths = depths_of(drafters)
        self._drafters = drafters
        self._asked: list[Drafter] = []
        """Those of the last job."""

    @property
    def pass_rows(self) -> Sequence[int]:
        """Rows of each pass of the last job: what several run at a time is one pass. Empty where its
        drafters do not say it."""
        told = [getattr(each, "pass_rows", ()) for each in self._asked]
        return [sum(rows) for rows in zip_longest(*told, fillvalue=0)]

    @property
    def ranked_rows(self) -> int | None:
        """Rows of the last job that are proposed children; None where its drafters do not say it."""
        told = [getattr(each, "ranked_rows", None) for each in self._asked]
        return None if not told or None in told else sum(rows for rows in told if rows is not None)

    def draft(self, segment: Segment, width: int) -> tuple[Proposal, ...]:
        self._asked = [self._drafters[part.commit.request] for part in segment.parts]
        found: list[Proposal] = []
        for part in segment.parts:
            found += self._drafters[part.commit.request].draft(
                Segment(segment=segment.segment, parts=(part,)), width
            )
        return tuple(found)

    def release(self, message: Release) -> None:
        self._drafters[message.request].release(message)

    def take_features(self, request: int, epoch: int, ids: Sequence[int], features: Any) -> None:
        self._drafters[request].take_features(request, epoch, ids, features)
