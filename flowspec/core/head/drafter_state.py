"""What one model beside the target has of a request: its mirror of the token tree.

A drafter or an intermediate verifier is one more tree-cached model: it is told the committed path and given
nodes to run, each once.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from flowspec.core.head.lazy_heap import is_mostly_stale
from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Open
from flowspec.tree import TokenTree


@dataclass(slots=True)
class DrafterState:
    """What one model has of one request.

    It `is_opened` once a job took the opening along. The first `filled` nodes of the path and those in `run`
    are in its cache; it has been told of `told` committed nodes. `pending` are the nodes of the running job,
    `answered` the living ones that it has been asked about before. `unasked` is a heap of the others by their
    values; it forgets what died, or is worth something else by now, when it comes up.
    """

    opening: Open | None = None
    is_opened: bool = False
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
            structs.replace(
                opening, keep=keep, slots=context + limits.DRAFT_NODES_MAX, top_logprobs=-1, source=-1
            )
            if fits
            else None
        )
        self.is_opened = False
        self.filled = keep
        self.told = opening.length
        self.run.clear()
        self.pending.clear()
        self.answered.clear()
        self.unasked.clear()

    def validate(self, tree: TokenTree) -> None:
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
        if is_mostly_stale(self.unasked, tree.alive_count):
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
