"""What every drafter is to the world that runs it: one thread or one simulated device, one job after
another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from flowspec.core.protocol.messages import Proposal, Release, Segment

if TYPE_CHECKING:
    from flowspec.core.head.events import CopyFeatures  # a daemon that waits has no use for the head's


class Drafter(Protocol):
    """What proposes children: a model with a cache for trees, or one that looks at the text alone
    (`draft.text`). `core.head.drafters` asks it in `Draft` and `SendToDrafter`.

    Proposals are ranked by `log q / T + G` with the target's own noise (at temperature 0 by `log q`), without
    its filters.
    """

    @property
    def captures(self) -> tuple[int, ...]:
        """Hidden states of the target that it wants of committed nodes (`Assign.captures`); empty for
        most."""
        ...

    @property
    def context(self) -> int:
        """Positions it can handle; nodes at or beyond are not given to it."""
        ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def cache_slots(self) -> int:
        """What there is memory for, of all requests together, as of when it was loaded."""
        ...

    def draft(self, segment: Segment, width: int) -> tuple[Proposal, ...]:
        """Runs the segment's nodes; proposes up to `width` children for every root or uncommitted one of them
        that lives."""
        ...

    def release(self, message: Release) -> None: ...

    def take_features(self, request: int, epoch: int, ids: Sequence[int], features: Any) -> None:
        """Features `[len(ids), hidden * len(captures)]` of nodes that are now committed; only for those that
        want any."""
        ...


@runtime_checkable
class CopiesFeatures(Protocol):
    """A drafter that keeps all features which it was given, and so can take those of one node for
    another's."""

    def copy_features(self, message: CopyFeatures) -> None: ...
