"""Guesses that nobody need be asked for: where what binds an answer leaves one token, it is a node at once.

Who knows that is given to the head from outside (`CertainOf`). The answer stays the stages' to draw: this
saves the models beside the target a question, and the answer the time of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from flowspec.core.head.request import Request
from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Grammar

CertainOf = Callable[[Grammar], Callable[[Sequence[int]], Sequence[int]]]
"""For a grammar, what gives the tokens that alone can follow an answer, one behind the other."""
CHANCE = 0.999
SHARE_MIN = 0.1
"""Of the root's value, what a guess must be worth that what follows it is looked at."""


def settle(request: Request, node: int) -> None:
    """Makes nodes of what alone can follow a node (the root or a living one), where it is worth a look; once
    for each."""
    tree, submit = request.tree, request.submit
    if request.certain is None or submit is None or node in request.settled:
        return
    if tree.log_value(node) < tree.log_value(tree.root) + math.log(SHARE_MIN):
        return
    branch, above = [], node
    while above != tree.root:
        branch.append(tree.token(above))
        above = tree.parent(above)
    request.settled[node] = False
    for token in request.certain([*request.new_tokens, *reversed(branch)]):
        if not request.has_room_below(node) or token in submit.stop_ids:
            return
        child = tree.child(node, token)
        if child is None:
            if tree.alive_count >= limits.DRAFT_NODES_MAX:
                return
            child = tree.add(node, token, CHANCE)
            for drafter_state in request.drafter_states:
                drafter_state.offer(tree, child)
        else:
            request.revalue(child, CHANCE)
        request.settled[node] = True
        node = child
        request.settled.setdefault(node, False)
