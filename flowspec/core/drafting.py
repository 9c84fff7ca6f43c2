"""The head's view of its drafter: what it has seen of each request, and the jobs that bring it up to date.

A drafter is one more tree-cached model: it is told the committed path and given nodes to run, each once. What it proposes
below a node becomes nodes of the tree, and what comes true teaches the calibrator how far to trust it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from flowspec.core import limits
from flowspec.core.calibration import Calibrator
from flowspec.core.events import Proposal
from flowspec.core.messages import Commit, Open, Part
from flowspec.tree import CHANCE_MIN, TokenTree

if TYPE_CHECKING:
    from flowspec.core.request import Request

SWEEP_AT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterTraits:
    """What the head must know of a drafter: the positions it can handle, and whether it wants features of verified nodes.

    `cache_slots` is what it has memory for, of all conversations together.
    """

    context: int
    needs_features: bool = False
    cache_slots: int = limits.ID_MAX


@dataclass(slots=True)
class DraftState:
    """What the drafter has of one request.

    The first `filled` nodes of the path and those in `run` are in its cache; it has been told of `told` committed nodes.
    `proposals` holds its answers below living nodes as `(token, confidence)`, the first `grown` of each are nodes of the tree;
    `pending` are the nodes of the running job. Two heaps keep what is next at hand, by the values that never change, and
    forget what died when it comes up: `unasked` living nodes, and `ripening` ones with proposals that are not nodes yet.
    """

    opening: Open | None = None
    filled: int = 0
    told: int = 0
    run: set[int] = field(default_factory=set)
    pending: set[int] = field(default_factory=set)
    proposals: dict[int, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    grown: dict[int, int] = field(default_factory=dict)
    unasked: list[tuple[float, int]] = field(default_factory=list)
    ripening: list[tuple[float, int]] = field(default_factory=list)

    def begin(self, opening: Open, keep: int, context: int) -> None:
        """A new answer: the first `keep` tokens are those of the last one.

        Of these the drafter keeps what it has and knows to be committed; a guess that came true since its last job is a guess there.
        """
        keep = min(keep, self.filled, self.told)
        fits = opening.length <= context
        self.opening = replace(opening, keep=keep, slots=context + limits.DRAFT_NODES_MAX) if fits else None
        self.filled = keep
        self.told = opening.length
        self.run.clear()
        self.pending.clear()
        self.proposals.clear()
        self.grown.clear()
        self.unasked.clear()
        self.ripening.clear()

    def knows(self, node: int) -> bool:
        """Whether the drafter has been asked about what comes after a node."""
        return node in self.proposals or node in self.pending

    def answered(self, asked: set[int], is_living: Callable[[int], bool]) -> None:
        """A job is done; nodes that died in the drafter's view meanwhile got no proposal, and are not asked about again."""
        self.pending -= asked
        for node in asked:
            if is_living(node) and node not in self.proposals:
                self.proposals[node] = ()
                self.grown[node] = 0

    def sweep(self, tree: TokenTree) -> None:
        """Forgets what died far down in the heaps, once that is most of what they hold."""
        bound = SWEEP_AT + 4 * tree.alive_count
        if len(self.unasked) > bound:
            self.unasked = [entry for entry in self.unasked if tree.is_alive(entry[1])]
            heapq.heapify(self.unasked)
        if len(self.ripening) > bound:
            self.ripening = [entry for entry in self.ripening if entry[1] in self.proposals]
            heapq.heapify(self.ripening)

    def forget(self, dead: Sequence[int]) -> None:
        for node in dead:
            self.run.discard(node)
            self.proposals.pop(node, None)
            self.grown.pop(node, None)

    def advance(self, tree: TokenTree) -> None:
        """The path grew: nodes that were run as guesses are now part of what is filled."""
        while self.filled < len(tree.path) and tree.path[self.filled] in self.run:
            self.run.discard(tree.path[self.filled])
            self.filled += 1


def most_valuable(request: Request, traits: DrafterTraits, count_max: int) -> list[int]:
    """The living nodes below the root that the drafter should be asked about next, best first."""
    heap, tree = request.draft.unasked, request.tree
    found: list[tuple[float, int]] = []
    while heap and len(found) < count_max:
        entry = heapq.heappop(heap)
        if tree.is_alive(entry[1]) and expandable(request, traits, entry[1]):
            found.append(entry)
    for entry in found:
        heapq.heappush(heap, entry)
    return [node for _, node in found]


def expandable(request: Request, traits: DrafterTraits, node: int) -> bool:
    """Whether the drafter may be asked what comes after a node (the root or a living one) now."""
    if request.submit is None or request.draft.opening is None or request.draft.knows(node):
        return False
    position = request.tree.position(node)
    if position + 1 >= traits.context or not has_room_below(request, node):
        return False
    return not traits.needs_features or node != request.tree.root or 0 < position <= request.computed


def has_room_below(request: Request, node: int) -> bool:
    """Whether a child of this node would have to be run: the answer goes on after it, and the context has room."""
    assert request.submit is not None
    child = request.tree.position(node) + 1
    is_last = child - len(request.submit.prompt) + 1 >= request.submit.new_tokens_max
    return not is_last and child + 1 < request.context


def draft_part(request: Request, nodes: Sequence[int], rows_max: int) -> Part | None:
    """The rows that the drafter needs to answer for `nodes` (parents first, each the root or living), at most `rows_max`.

    Path nodes that it lacks come first; where they alone are too many, they come without `nodes`. None if there is nothing.
    """
    tree, draft, opening = request.tree, request.draft, request.draft.opening
    assert opening is not None
    draft.advance(tree)
    missing = tree.path[draft.filled : len(tree.path) - 1]
    news = tuple(tree.path[draft.told :])
    if len(missing) >= rows_max or len(news) > limits.COMMIT_PATH_MAX:
        missing, nodes, news = missing[:rows_max], (), news[: limits.COMMIT_PATH_MAX]
    wanted = [node for node in nodes if not draft.knows(node)][: rows_max - len(missing)]
    if not missing and not wanted:
        return None
    rows = [*missing, *wanted]
    commit = Commit(request=opening.request, epoch=opening.epoch, base=draft.told, path=news)
    part = Part(
        commit=commit,
        opening=opening,
        ids=tuple(rows),
        parents=tuple(tree.parent(node) for node in rows),
        tokens=tuple(tree.token(node) for node in rows),
        positions=tuple(tree.position(node) for node in rows),
        committed=(True,) * len(missing) + (False,) * len(wanted),
    )
    draft.told = commit.length
    draft.filled += len(missing)
    draft.run.update(wanted)
    draft.pending.update(wanted)
    return part


def learn(request: Request, proposal: Proposal) -> None:
    """Notes what the drafter proposes below a node, if that still lives."""
    draft, node = request.draft, proposal.node
    if request.submit is not None and request.is_living(node):
        draft.proposals[node] = tuple(zip(proposal.tokens, proposal.confidences, strict=True))
        draft.grown[node] = 0
        if has_room_below(request, node):
            heapq.heappush(draft.ripening, (-request.tree.log_value(node), node))


def grow(request: Request, calibrator: Calibrator | None, value_min: float) -> int:
    """Makes nodes of the proposals that are worth at least `value_min` by now; returns how many.

    Values rise as the root comes nearer, so proposals that were not worth a node become so later. Nothing is drafted past a stop
    token or past the end of the answer or the context: the token itself would be known from its parent. `calibrator` None
    takes the drafter's confidence as it is.
    """
    tree, draft = request.tree, request.draft
    floor = tree.log_value(tree.root) + (math.log(value_min) if value_min > 0 else -math.inf)
    before = len(tree)
    while draft.ripening and -draft.ripening[0][0] >= floor and tree.alive_count < limits.DRAFT_NODES_MAX:
        _, node = heapq.heappop(draft.ripening)
        if node in draft.proposals and request.is_living(node):
            rest = _grow_below(request, node, calibrator, floor)
            if rest is not None:
                heapq.heappush(draft.ripening, (-rest, node))
    draft.sweep(tree)
    return len(tree) - before


def _grow_below(request: Request, node: int, calibrator: Calibrator | None, floor: float) -> float | None:
    """Makes nodes of one node's proposals above the floor; the log value of the next one, None if there is none."""
    tree, draft, submit = request.tree, request.draft, request.submit
    assert submit is not None
    found = draft.proposals[node]
    for at in range(draft.grown[node], len(found)):
        token, confidence = found[at]
        chance = min(1.0, confidence) if calibrator is None else calibrator.chance(confidence)
        log_value = tree.log_value(node) + math.log(max(chance, CHANCE_MIN))
        if log_value < floor or tree.alive_count >= limits.DRAFT_NODES_MAX:
            return log_value
        draft.grown[node] = at + 1
        if token not in submit.stop_ids and tree.child(node, token) is None:
            child = tree.add(node, token, chance)
            heapq.heappush(draft.unasked, (-tree.log_value(child), child))
    return None


def observe(request: Request, node: int, token: int, calibrator: Calibrator) -> None:
    """The token after a path node is known: what the drafter had proposed there was right or wrong."""
    request.draft.grown.pop(node, None)
    for proposed, confidence in request.draft.proposals.pop(node, ()):
        calibrator.observe(confidence, is_right=proposed == token)
