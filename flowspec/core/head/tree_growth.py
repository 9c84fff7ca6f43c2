"""From what models propose to nodes of the tree, as far as they are worth it; what comes true teaches how far
to trust them."""

from __future__ import annotations

import heapq
import math

from flowspec.core.head.certain import settle
from flowspec.core.head.fusion import Fusion, Ranked
from flowspec.core.head.request import Request
from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Proposal
from flowspec.tree import CHANCE_MIN, NodeState

REJECTED = 0.5
"""What a token is worth that an intermediate did not propose, in times of the least that it did."""


def learn(request: Request, drafter: int, proposal: Proposal, fusion: Fusion) -> None:
    """Notes what a model proposes below a node, if that still lives; what is there already is valued anew."""
    candidates, node = request.candidates, proposal.node
    if request.submit is None or not request.is_living(node) or request.settled.get(node, False):
        return
    found = candidates.offers.setdefault(node, {})
    found[drafter] = tuple(zip(proposal.tokens, proposal.confidences, strict=True))
    candidates.ranked[node] = ranked = fusion.rank(found, request.weights)
    candidates.grown[node] = 0
    if request.tree.children(node):
        _revalue(request, node, ranked, fusion)
    if request.has_room_below(node):
        candidates.push(node, request.tree.log_value(node))


def _revalue(request: Request, node: int, ranked: Ranked, fusion: Fusion) -> None:
    """The children of a node are worth what is thought of them now; those that an intermediate rejects go,
    unless they are on their way."""
    tree = request.tree
    chances = {token: fusion.chance(ranked, score) for token, score in ranked.offers}
    least = REJECTED * min(chances.values(), default=0.0)
    for child in tree.children(node):
        chance = chances.get(tree.token(child))
        if chance is None and not ranked.is_verdict:
            continue
        if chance is None and tree.state(child) is NodeState.DRAFTED:
            request.forget(tree.drop(child))
            continue
        request.revalue(child, least if chance is None else chance)


def grow(request: Request, value_min: float, fusion: Fusion) -> int:
    """Makes nodes of the proposals that are worth at least `value_min` by now; returns how many.

    Values rise as the root comes nearer, so proposals that were not worth a node become so later. Nothing is
    drafted past a stop token or past the end of the answer or the context: the token itself would be known
    from its parent. Not calibrated, a score is taken as it is.
    """
    tree, candidates = request.tree, request.candidates
    floor = tree.log_value(tree.root) + (math.log(value_min) if value_min > 0 else -math.inf)
    before = len(tree)
    settle(request, tree.root)
    while candidates.heap and -candidates.heap[0][0] >= floor and tree.alive_count < limits.DRAFT_NODES_MAX:
        cost, node = heapq.heappop(candidates.heap)
        if candidates.next_value.get(node) == -cost and request.is_living(node):
            del candidates.next_value[node]
            rest = _grow_below(request, node, floor, fusion)
            if rest is not None:
                candidates.push(node, rest)
    candidates.sweep(tree.alive_count)
    for drafter_state in request.drafter_states:
        drafter_state.sweep(tree)
    return len(tree) - before


def _grow_below(request: Request, node: int, floor: float, fusion: Fusion) -> float | None:
    """Makes nodes of one node's proposals above the floor; the log value of the next one, None if there is
    none."""
    tree, candidates, submit = request.tree, request.candidates, request.submit
    assert submit is not None
    ranked = candidates.ranked[node]
    for at in range(candidates.grown[node], len(ranked.offers)):
        token, score = ranked.offers[at]
        chance = fusion.chance(ranked, score)
        log_value = tree.log_value(node) + math.log(max(chance, CHANCE_MIN))
        if log_value < floor or tree.alive_count >= limits.DRAFT_NODES_MAX:
            return log_value
        candidates.grown[node] = at + 1
        if token not in submit.stop_ids and tree.child(node, token) is None:
            child = tree.add(node, token, chance)
            for drafter_state in request.drafter_states:
                drafter_state.offer(tree, child)
            settle(request, child)
    return None


def observe(request: Request, node: int, token: int, fusion: Fusion) -> None:
    """The token after a path node is known: what was proposed there was right or wrong."""
    candidates = request.candidates
    candidates.grown.pop(node, None)
    candidates.next_value.pop(node, None)
    request.settled.pop(node, None)
    found, ranked = candidates.offers.pop(node, None), candidates.ranked.pop(node, None)
    if found is not None and ranked is not None:
        fusion.observe(found, ranked, token)
