"""What one model beside the target has of a request: its mirror of the token tree, and the jobs that bring it
up to date.

A drafter or an intermediate verifier is one more tree-cached model: it is told the committed path and given
nodes to run, each once.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Commit, Open, Part
from flowspec.tree import TokenTree

if TYPE_CHECKING:
    from flowspec.core.head.request import Request

SWEEP_AT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterTraits:
    """What the head must know of a model beside the target.

    The positions it can handle, whether it wants features of verified nodes, its level (0 for a drafter,
    higher for an intermediate), and how many cache slots it has memory for, of all conversations together.
    """

    context: int
    needs_features: bool = False
    level: int = 0
    cache_slots: int = limits.ID_MAX


@dataclass(slots=True)
class Mirror:
    """What one model has of one request.

    The first `filled` nodes of the path and those in `run` are in its cache; it has been told of `told`
    committed nodes. `pending` are the nodes of the running job, `answered` the living ones that it has been
    asked about before. `unasked` is a heap of the others by their values; it forgets what died, or is worth
    something else by now, when it comes up.
    """

    opening: Open | None = None
    filled: int = 0
    told: int = 0
    run: set[int] = field(default_factory=set)
    pending: set[int] = field(default_factory=set)
    answered: set[int] = field(default_factory=set)
    unasked: list[tuple[float, int]] = field(default_factory=list)

    def begin(self, opening: Open, keep: int, context: int) -> None:
        """A new answer: the first `keep` tokens are those of the last one.

        Of these the model keeps what it has and knows to be committed; a guess that came true since its last
        job is a guess there.
        """
        keep = min(keep, self.filled, self.told)
        fits = opening.length <= context
        self.opening = (
            replace(opening, keep=keep, slots=context + limits.DRAFT_NODES_MAX, top_logprobs=-1)
            if fits
            else None
        )
        self.filled = keep
        self.told = opening.length
        self.run.clear()
        self.pending.clear()
        self.answered.clear()
        self.unasked.clear()

    def validate(self, tree: TokenTree) -> None:
        """What is true between two events; raises `AssertionError`."""
        if self.opening is None:
            assert not self.pending, "a model that is not to be asked is being asked"
            return
        length = tree.committed_length
        assert self.filled <= length, f"a model has {self.filled} positions of {length}"
        assert self.told <= length, f"a model was told of {self.told} committed nodes, there are {length}"

    def close(self) -> None:
        """The model is not to be asked about this request."""
        self.opening = None
        self.pending.clear()

    def knows(self, node: int) -> bool:
        """Whether the model has been asked about what comes after a node."""
        return node in self.answered or node in self.pending

    def land(self, asked: set[int], is_living: Callable[[int], bool]) -> None:
        """A job is done: nodes that died in the model's view meanwhile got no proposal, and are not asked
        about again."""
        self.pending -= asked
        self.answered.update(node for node in asked if is_living(node))

    def offer(self, tree: TokenTree, node: int) -> None:
        """A node is new, or is worth something else by now."""
        heapq.heappush(self.unasked, (-tree.log_value(node), node))

    def sweep(self, tree: TokenTree) -> None:
        """Forgets what died far down in the heap, once that is most of what it holds."""
        if len(self.unasked) > SWEEP_AT + 4 * tree.alive_count:
            self.unasked = [entry for entry in self.unasked if tree.is_alive(entry[1])]
            heapq.heapify(self.unasked)

    def forget(self, dead: Sequence[int]) -> None:
        self.run.difference_update(dead)
        self.answered.difference_update(dead)

    def advance(self, tree: TokenTree) -> None:
        """The path grew: nodes that were run as guesses are now part of what is filled."""
        while self.filled < len(tree.path) and tree.path[self.filled] in self.run:
            self.run.discard(tree.path[self.filled])
            self.filled += 1


def most_valuable(request: Request, drafter: int, traits: DrafterTraits, count_max: int) -> list[int]:
    """The living nodes below the root that a model should be asked about next, best first."""
    heap, tree = request.mirrors[drafter].unasked, request.tree
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
    """Whether a model may be asked what comes after a node (the root or a living one) now."""
    mirror = request.mirrors[drafter]
    if request.submit is None or mirror.opening is None or mirror.knows(node):
        return False
    tree = request.tree
    if tree.position(node) + 1 >= traits.context or not has_room_below(request, node):
        return False
    return (
        not traits.needs_features
        or mirror.knows(tree.root)
        or 0 < tree.position(tree.root) <= request.computed
    )


def has_room_below(request: Request, node: int) -> bool:
    """Whether a child of this node would have to be run: the answer goes on after it, and the context has
    room."""
    assert request.submit is not None
    child = request.tree.position(node) + 1
    is_last = child - len(request.submit.prompt) + 1 >= request.submit.new_tokens_max
    return not is_last and child + 1 < request.context


def draft_part(
    request: Request, drafter: int, traits: DrafterTraits, nodes: Sequence[int], rows_max: int
) -> Part | None:
    """The rows that a model needs to answer for `nodes` (parents first, each the root or living), at most
    `rows_max`.

    Path nodes that it lacks come first; where they alone are too many, they come without `nodes`. None if
    there is nothing.
    """
    tree, mirror = request.tree, request.mirrors[drafter]
    opening = mirror.opening
    assert opening is not None
    mirror.advance(tree)
    missing = tree.path[mirror.filled : len(tree.path) - 1]
    news = tuple(tree.path[mirror.told :])
    if len(missing) >= rows_max or len(news) > limits.COMMIT_PATH_MAX:
        missing, nodes, news = missing[:rows_max], (), news[: limits.COMMIT_PATH_MAX]
    wanted = _with_ancestors(request, drafter, traits, nodes, rows_max - len(missing))
    if not missing and not wanted:
        return None
    rows = [*missing, *wanted]
    commit = Commit(request=opening.request, epoch=opening.epoch, base=mirror.told, path=news)
    part = Part(
        commit=commit,
        opening=opening,
        ids=tuple(rows),
        parents=tuple(tree.parent(node) for node in rows),
        tokens=tuple(tree.token(node) for node in rows),
        positions=tuple(tree.position(node) for node in rows),
        committed=(True,) * len(missing) + (False,) * len(wanted),
    )
    mirror.told = commit.length
    mirror.filled += len(missing)
    mirror.run.update(wanted)
    mirror.pending.update(wanted)
    return part


def _with_ancestors(
    request: Request, drafter: int, traits: DrafterTraits, nodes: Sequence[int], rows_max: int
) -> list[int]:
    """As many of the nodes as there are rows for, each behind the guesses of others above it, about which the
    model is asked, too."""
    tree, mirror = request.tree, request.mirrors[drafter]
    wanted: dict[int, None] = {}
    for node in nodes:
        branch = []
        while node not in wanted and not mirror.knows(node):
            branch.append(node)
            if node == tree.root:
                break
            node = tree.parent(node)
        if len(wanted) + len(branch) <= rows_max and all(
            expandable(request, drafter, traits, above) for above in branch[1:]
        ):
            wanted.update(dict.fromkeys(reversed(branch)))
    return list(wanted)
