"""`flowspec-paper`: the published algorithm in lock-step turns, with its published defaults (arXiv
2507.02620).

A round begins with a tree of the 80 best nodes of a beam (10 wide, 6 deep), cut by falling score into
segments of about 16 that enter the pipeline one behind the other. In each turn one segment is looked at;
where it gave tokens, the drafter grows the tree below the new root again (64 best, 6 deep), and whatever is
new there goes out as one segment, before the next verified one is looked at. Where the output leaves the
tree, all that is in flight is given up and a new round begins.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from flowspec.core.head.request import Request
from flowspec.core.methods.base import Choice, Method, Parameter, View, beam
from flowspec.tree import NodeState

SEGMENTS = 5
"""Of the first tree of a round, unless they would be too large."""


@dataclass(slots=True)
class _Turn:
    """`is_new`: a round begins; `is_drafting`: the turn's tree grows; `ready` segments go out one by one."""

    is_new: bool = True
    is_drafting: bool = True
    ready: list[list[int]] = field(default_factory=list)


class LockStep(Method):
    name = "flowspec-paper"
    parameters = (
        Parameter("nodes", tried=(16, 32, 48, 80)),
        Parameter("segment_nodes"),
        Parameter("expansion_nodes", tried=(16, 32, 64)),
        Parameter("depth", tried=(3, 4, 5, 6, 8)),
        Parameter("width"),
    )
    waits_each_turn = True
    is_forerunner = True
    commits_at_once = True

    def __init__(
        self,
        *,
        nodes: int = 80,
        segment_nodes: int = 16,
        expansion_nodes: int = 64,
        depth: int = 6,
        width: int = 10,
    ) -> None:
        self.nodes = nodes
        self.segment_nodes = segment_nodes
        self.expansion_nodes = expansion_nodes
        self.depth = depth
        self.width = width

    def window(self, view: View) -> int:
        return max(SEGMENTS, view.stage_count + 1) + 1

    def begin(self, request: Request) -> None:
        request.plan = _Turn()

    def may_walk(self, request: Request) -> bool:
        turn: _Turn = request.plan
        return not turn.is_drafting and not turn.ready

    def walked(self, request: Request, emitted: int) -> None:
        if emitted:  # with a root that is not on its way, nothing of what is can still come true
            request.plan = _Turn(is_new=not request.root_sent)

    def send(self, view: View) -> list[Choice]:
        for request in view.requests:
            turn: _Turn = request.plan
            if turn.is_drafting and (not view.traits or beam(view, request, self.width, self.depth) is None):
                turn.is_drafting = False
                turn.ready = self._round(request) if turn.is_new else self._expansion(request)
            while turn.ready:
                nodes = [node for node in turn.ready.pop(0) if request.is_living(node)]
                if nodes:
                    return [(request, nodes)]
        return []

    def expand(self, view: View, drafter: int) -> list[Choice]:
        found = [
            (request, beam(view, request, self.width, self.depth))
            for request in view.requests
            if request.plan.is_drafting
        ]
        return [(request, nodes) for request, nodes in found if nodes]

    def _round(self, request: Request) -> list[list[int]]:
        """The first tree of a round by falling score, the root in front, in near-equal segments."""
        nodes = request.tree.best_unsent(self.nodes)
        if not request.root_sent:
            nodes.insert(0, request.tree.root)
        if len(nodes) // SEGMENTS <= self.segment_nodes:
            ends = [len(nodes) * part // SEGMENTS for part in range(SEGMENTS + 1)]
        else:
            ends = [*range(0, len(nodes), self.segment_nodes), len(nodes)]
        return [nodes[start:end] for start, end in itertools.pairwise(ends) if start < end]

    def _expansion(self, request: Request) -> list[list[int]]:
        """Those of the best nodes below the root that have not been sent, as one segment."""
        tree = request.tree
        best = sorted(tree.living(), key=lambda node: (-tree.value(node), node))[: self.expansion_nodes]
        fresh = sorted(node for node in best if tree.state(node) is NodeState.DRAFTED)
        return [fresh] if fresh else []
