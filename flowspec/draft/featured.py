"""What drafters share that read features of committed nodes, which the target gives (`take_features`).

Features are kept by node, for a later turn may go on below any of them. They may come before the rows that
they belong to.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np

from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Open, Proposal, Release, Segment, SegmentPart
from flowspec.core.protocol.model_spec import ModelSpec
from flowspec.draft.cached import Row, TreeCachedDrafter
from flowspec.draft.ranking import F32, Ranker
from flowspec.errors import ClusterError
from flowspec.model.arithmetic.arrays import I64, Array
from flowspec.model.attention import TreeCache
from flowspec.model.engine import Engine


class Head(Protocol):
    """The network of such a drafter, on one device."""

    @property
    def capture(self) -> tuple[int, ...]:
        """The hidden states of the target that make up a feature: c is the input of layer c, and the number
        of layers is the output after the final norm."""

    @property
    def context_max(self) -> int:
        """Positions it can handle."""

    @property
    def hidden_size(self) -> int:
        """Width of what `logits` takes."""

    @property
    def slot_bytes(self) -> int:
        """What a node takes."""

    @property
    def weight_bytes(self) -> int: ...

    @property
    def engine(self) -> Engine: ...

    def project(self, target_features: Array) -> Array:
        """The target's features `[rows, hidden * len(capture)]` as they are kept, `[rows, width]`."""

    def logits(self, hidden: Array) -> F32:
        """`[rows, draft vocabulary]` in float32 from `[rows, hidden_size]`."""

    def target_ids(self) -> I64 | None:
        """The target's id of every draft id, `[draft vocabulary]`; None when they are the same."""


class Target(Protocol):
    """What a drafter must know of the model that it drafts for: `ModelFiles`."""

    @property
    def spec(self) -> ModelSpec: ...


@dataclass(slots=True)
class Request:
    """What the drafter has of a request: its cache, and of drafters whose keys are made of the target's
    features how many positions from the first have theirs there (`written`).

    `path` holds the committed nodes by position as far as they were named; after a rewind it may hold dead
    ones until others take their places, which is before the new root is run.
    """

    opening: Open
    root: int
    path: dict[int, int] = field(default_factory=dict)
    cache: TreeCache | None = None
    written: int = 0

    def learn(self, part: SegmentPart) -> bool:
        """Takes what a part says of the path; True when with it the path is known from the first node to the
        last."""
        for position, node in enumerate(part.commit.path, part.commit.base):
            self.path[position] = node
        if part.commit.path:
            self.root = max(self.root, part.commit.path[-1])
        for node, position, is_committed in zip(part.ids, part.positions, part.committed, strict=True):
            if is_committed:
                self.path[position] = node
        return self.opening.root in part.ids

    def is_committed(self, row: Row) -> bool:
        return self.path.get(row.position) == row.node

    def begin(self, opening: Open) -> None:
        self.opening, self.root = opening, opening.root
        self.written = min(self.written, opening.keep)
        self.path = {position: node for position, node in self.path.items() if position < opening.length}
        self.path[opening.length - 1] = opening.root


HeadT = TypeVar("HeadT", bound=Head)
RequestT = TypeVar("RequestT", bound=Request)


class FeatureDrafter(TreeCachedDrafter, Generic[HeadT, RequestT]):
    """A `Drafter`; see the module."""

    def __init__(
        self, head: HeadT, target: Target, *, context: int | None = None, coupled: bool = True
    ) -> None:
        """Over a head that is loaded for this target; `context` is the target's."""
        self.captures = head.capture
        own = min(head.context_max, limits.CONTEXT_MAX)
        self.context = own if context is None else min(own, context)
        ranker = Ranker(target.spec.vocabulary, ids=head.target_ids(), coupled=coupled)
        super().__init__(
            ranker,
            context_max=max(self.context, context or 0),
            device=head.engine.device,
            slot_bytes=head.slot_bytes,
        )
        self._head = head
        self.pass_rows: list[int] = []
        """Rows of each pass of the network in the last job."""
        self._requests: dict[int, RequestT] = {}
        self._truths: dict[int, dict[int, Array]] = {}
        """By request and node the target's feature `[width]`."""
        self._truths_max = max(self.context, context or 0) + limits.DRAFT_NODES_MAX
        self._released: OrderedDict[int, int] = OrderedDict()  # request -> the last epoch that is over

    @property
    def weight_bytes(self) -> int:
        return self._head.weight_bytes

    # ---------------------------------------------------------------------------------------------- learning

    def take_features(self, request: int, epoch: int, ids: Sequence[int], features: Array) -> None:
        """The target's features `[len(ids), hidden * len(captures)]` of nodes of the output's path; they may
        come before the rows."""
        known = self._requests.get(request)
        if (
            not len(ids)
            or epoch <= self._released.get(request, -1)
            or (known is not None and epoch < known.opening.epoch)
        ):
            return
        truths = self._truths.setdefault(request, {})
        for node, feature in zip(ids, self._head.project(features), strict=True):
            truths[node] = feature
        while len(truths) > self._truths_max:
            del truths[next(iter(truths))]  # the oldest, which only a rewind far back could need

    def release(self, message: Release) -> None:
        """Forgets a request; features of it that are still on their way are not taken."""
        super().release(message)
        self._released[message.request] = message.epoch
        if len(self._released) > limits.REQUESTS_MAX:
            self._released.popitem(last=False)
        self._requests.pop(message.request, None)
        self._truths.pop(message.request, None)

    def draft(self, segment: Segment, width: int) -> tuple[Proposal, ...]:
        """As every drafter's; may also propose again below a root that it knows better by now."""
        self._learn(segment)
        return super().draft(segment, width)

    def _learn(self, segment: Segment) -> None:
        """Takes the segment's Opens and Commits before the core does, and its rows."""
        for part in segment.parts:
            opening, number = part.opening, part.commit.request
            if opening is not None and (
                number not in self._requests or opening.epoch > self._requests[number].opening.epoch
            ):
                if number not in self._requests:
                    self._requests[number] = self.new_request(opening)
                self._requests[number].begin(opening)
                self._truths.setdefault(number, {})
            request = self._requests.get(number)
            if request is not None and part.commit.epoch == request.opening.epoch and request.learn(part):
                # Features of what a rewind left behind can go; those of nodes after the new root may have
                # come already.
                living = {*request.path.values()}
                truths = self._truths[number]
                self._truths[number] = {
                    n: truth for n, truth in truths.items() if n in living or n > request.opening.root
                }

    @abstractmethod
    def new_request(self, opening: Open) -> RequestT: ...

    def _arrived(self, number: int, width: int) -> tuple[list[int], I64]:
        """The committed nodes from the first on that has no keys, as far as their features are there and as
        wide as they came, and their positions; the cache has room for them, and they count as written."""
        request, truths = self._requests[number], self._truths[number]
        begin, nodes = request.written, list[int]()
        while True:
            node = request.path.get(begin + len(nodes), -1)
            if node not in truths or len(truths[node]) != width:
                break
            nodes.append(node)
        request.written += len(nodes)
        if nodes and request.cache is not None:
            request.cache.reserve(request.written)
        return nodes, np.arange(begin, request.written)

    def close_cache(self, request: int) -> None:
        self._requests.pop(request, None)

    def logits(self, hidden: Array) -> F32:
        logits = self._head.logits(hidden)
        if not np.isfinite(logits.max(axis=1, initial=0)).all():
            raise ClusterError(
                f"the drafter computed no finite numbers in {self._head.engine.dtype}; try --dtype "
                "bfloat16 or float32"
            )
        return logits
