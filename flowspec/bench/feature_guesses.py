"""A drafter that reads the target's hidden states, in virtual time; see `bench.drafting`.

What it guesses depends on how far the target has come, so nothing is looked up: it runs for real in every
world. No target runs there. The states of the output's path are computed beforehand, in one pass over a
prompt and its plain answer, and given when the simulated last stage names their nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from flowspec.bench.guesses import Maker
from flowspec.bench.plain import DTYPE, PlainCase
from flowspec.core.protocol.messages import Proposal, Release, Segment
from flowspec.core.stage.events import JobPart, RunLayers
from flowspec.draft.featured import FeatureDrafter
from flowspec.draft.kinds.base import Kind
from flowspec.model.accelerator import use_threads
from flowspec.model.arithmetic.arrays import Array
from flowspec.model.files import ModelFiles
from flowspec.model.slice import Slice
from flowspec.model.weights import Span

CPU = "cpu"
"""Where worlds run: a simulation's answers do not depend on the machine."""


class FeatureReaders:
    """Drafters of one kind over one target, in float32."""

    def __init__(self, kind: Kind, target: ModelFiles, *, context: int, coupled: bool) -> None:
        count = len(target.spec.layers)
        use_threads(1)  # its passes are too small for more
        self._open = partial(kind.open, target, DTYPE, CPU, context=context, coupled=coupled)
        self._target = Slice.load(target, Span(first=0, end=count, count=count), DTYPE, CPU)

    def begin(self, case: PlainCase) -> Maker:
        path = (*case.prompt, *case.answer)
        features: Array | None = None

        def make() -> PathReader:
            nonlocal features
            drafter = self._open()
            assert isinstance(drafter, FeatureDrafter), "a kind that reads features drafts"
            if features is None:
                features = self._features(path, case, drafter.captures)
            layer_count = self._target.span.count
            return PathReader(drafter, path, features, tuple(each / layer_count for each in drafter.captures))

        return make

    def _features(self, path: tuple[int, ...], case: PlainCase, captures: tuple[int, ...]) -> Array:
        """`[len(path), hidden * len(captures)]`."""
        length = len(path)
        self._target.captures = captures
        self._target.open_cache(0, length)
        part = JobPart(
            request=0,
            slots=np.arange(length, dtype=np.int64),
            tokens=np.array(path, dtype=np.int64),
            positions=np.arange(length, dtype=np.int64),
            key_positions=np.arange(length, dtype=np.int32),
            visible=np.tri(length, dtype=bool),
            sampled=np.zeros(length, dtype=bool),
            sampling=case.sampling,
        )
        job = RunLayers(job=0, parts=(part,), payload=None, rows=tuple(range(length)))
        _, features, *_ = self._target.run(job, None)
        self._target.close_cache(0)
        return features.copy()


class PathReader:
    """A drafter of one case's worlds. `depths`: which shares of the target's layers stand before what it
    reads."""

    def __init__(
        self,
        drafter: FeatureDrafter[Any, Any],
        path: tuple[int, ...],
        features: Array,
        depths: tuple[float, ...],
    ) -> None:
        self.captures, self.context = drafter.captures, drafter.context
        self.weight_bytes, self.cache_slots = drafter.weight_bytes, drafter.cache_slots
        self.depths = depths
        self.ranked_rows = 0
        """Rows of the last job that are proposed children: of a block they may be without a pass."""
        self._drafter, self._path, self._features = drafter, path, features
        self._position: dict[tuple[int, int], int] = {}
        """Of a request's node."""
        self._waiting: list[tuple[int, int, int]] = []
        """Request, epoch and node of which a feature is here, and not yet the position."""

    @property
    def pass_rows(self) -> Sequence[int]:
        """Rows of each pass of its network in the last job."""
        return self._drafter.pass_rows

    def draft(self, segment: Segment, width: int) -> tuple[Proposal, ...]:
        for part in segment.parts:
            request = part.commit.request
            for position, node in enumerate(part.commit.path, part.commit.base):
                self._position[request, node] = position
            for node, position in zip(part.ids, part.positions, strict=True):
                self._position[request, node] = position
        self._give()
        self._drafter.pass_rows = []  # a job in which nothing runs leaves them as they were
        found = self._drafter.draft(segment, width)
        self.ranked_rows = len(found)
        return found

    def take_features(self, request: int, epoch: int, ids: Sequence[int], features: object) -> None:
        """Who says that they are here; what they are is known from the path."""
        self._waiting += [(request, epoch, node) for node in ids]
        self._give()

    def _give(self) -> None:
        waiting = []
        for request, epoch, node in self._waiting:
            position = self._position.get((request, node))
            if position is None:
                waiting.append((request, epoch, node))
            else:
                self._drafter.take_features(request, epoch, (node,), self._features[position : position + 1])
        self._waiting = waiting

    def release(self, message: Release) -> None:
        self._drafter.release(message)
        self._waiting = [each for each in self._waiting if each[0] != message.request]
