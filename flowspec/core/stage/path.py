"""What a Commit makes of the nodes that a stage or a drafter holds: how the output's path goes on, and what
lives below its end."""

from __future__ import annotations

from collections.abc import Iterable

from flowspec.core.protocol.messages import Commit
from flowspec.errors import PeerError


def newly_committed(commit: Commit, length: int) -> tuple[int, ...]:
    """The nodes from position `length` on, where the path is known up to it; the last of them is the root
    now.

    Empty for a Commit that says nothing new. Raises `PeerError` for one that leaves a gap.
    """
    if commit.base > length:
        raise PeerError(f"a Commit from position {commit.base} leaves a gap after {length}")
    return commit.path[length - commit.base :] if commit.length > length else ()


def living_below(root: int, parents: Iterable[tuple[int, int]]) -> set[int]:
    """The root and what lives below it, of nodes with their parents. Ids grow from parent to child, so one
    pass in order is enough."""
    living = {root}
    for node, parent in sorted(parents):
        if parent in living:
            living.add(node)
    return living
