"""What a model beside the target is asked next, and the jobs that bring its mirror up to date."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from flowspec.core.head.drafter_traits import DrafterTraits
from flowspec.core.head.request import Request
from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Commit, SegmentPart


def most_valuable(request: Request, drafter: int, traits: DrafterTraits, count_max: int) -> list[int]:
    """The living nodes below the root that a model should be asked about next, best first."""
    heap, tree = request.drafter_states[drafter].unasked, request.tree
    found: dict[int, tuple[float, int]] = {}
    while heap and len(found) < count_max:
        entry = heapq.heappop(heap)
        node = entry[1]
        if (
            tree.is_alive(node)
            and -entry[0] == tree.log_value(node)
            and expandable(request, drafter, traits, node)
        ):
            found[node] = entry
    for entry in found.values():
        heapq.heappush(heap, entry)
    return list(found)


def expandable(request: Request, drafter: int, traits: DrafterTraits, node: int) -> bool:
    """Whether a model may be asked what comes after a node (the root or a living one) now, and need be."""
    return not request.settled.get(node, False) and _can_run(request, drafter, traits, node)


def _can_run(request: Request, drafter: int, traits: DrafterTraits, node: int) -> bool:
    drafter_state = request.drafter_states[drafter]
    if request.submit is None or drafter_state.opening is None or drafter_state.knows(node):
        return False
    tree = request.tree
    if tree.position(node) + 1 >= traits.context or not request.has_room_below(node):
        return False
    return (
        not traits.needs_features
        or drafter_state.knows(tree.root)
        or 0 < tree.position(tree.root) <= request.featured + request.predicted_max
    )


def draft_part(
    request: Request, drafter: int, traits: DrafterTraits, nodes: Sequence[int], rows_max: int
) -> SegmentPart | None:
    """The rows that a model needs to answer for `nodes` (parents first, each the root or living), at most
    `rows_max`.

    Path nodes that it lacks come first; where they alone are too many, they come without `nodes`. None if
    there is nothing.
    """
    tree, drafter_state = request.tree, request.drafter_states[drafter]
    opening = drafter_state.opening
    assert opening is not None
    drafter_state.advance(tree)
    missing = tree.path[drafter_state.filled : len(tree.path) - 1]
    news = tuple(tree.path[drafter_state.told :])
    if len(missing) >= rows_max or len(news) > limits.COMMIT_PATH_MAX:
        missing, nodes, news = missing[:rows_max], (), news[: limits.COMMIT_PATH_MAX]
    wanted = _with_ancestors(request, drafter, traits, nodes, rows_max - len(missing))
    if not missing and not wanted:
        return None
    rows = [*missing, *wanted]
    commit = Commit(request=opening.request, epoch=opening.epoch, base=drafter_state.told, path=news)
    part = SegmentPart(
        commit=commit,
        opening=None if drafter_state.is_opened else opening,
        ids=tuple(rows),
        parents=tuple(tree.parent(node) for node in rows),
        tokens=tuple(tree.token(node) for node in rows),
        positions=tuple(tree.position(node) for node in rows),
        committed=(True,) * len(missing) + (False,) * len(wanted),
    )
    drafter_state.is_opened = True
    drafter_state.told = commit.length
    drafter_state.filled += len(missing)
    drafter_state.run.update(wanted)
    drafter_state.pending.update(wanted)
    return part


def _with_ancestors(
    request: Request, drafter: int, traits: DrafterTraits, nodes: Sequence[int], rows_max: int
) -> list[int]:
    """As many of the nodes as there are rows for, each behind the guesses of others above it, about which the
    model is asked, too."""
    tree, drafter_state = request.tree, request.drafter_states[drafter]
    wanted: dict[int, None] = {}
    for node in nodes:
        branch = []
        while node not in wanted and not drafter_state.knows(node):
            branch.append(node)
            if node == tree.root:
                break
            node = tree.parent(node)
        if len(wanted) + len(branch) <= rows_max and all(
            _can_run(request, drafter, traits, above) for above in branch[1:]
        ):
            wanted.update(dict.fromkeys(reversed(branch)))
    return list(wanted)
