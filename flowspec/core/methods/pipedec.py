"""`pipedec`: one tree level per pipeline slot, pruned as results come back (PipeDec / SpecPipe, arXiv
2504.04104).

The level below the one sent last is drafted while that one is on its way; of its candidates the `level_nodes`
best go out. On a miss the new root goes out at once and the levels begin again below it (the second version's
refill without delay).
"""

from __future__ import annotations

from flowspec.core.head.request import Request
from flowspec.core.methods.base import Choice, Method, Parameter, View
from flowspec.tree import NodeState


class Levels(Method):
    name = "pipedec"
    parameters = (
        Parameter("level_nodes", tried=(2, 4, 8, 16, 24, 32)),
        Parameter("width"),
    )
    nodes_parameter = "level_nodes"
    waits_each_turn = True
    commits_at_once = True

    def __init__(self, *, level_nodes: int = 16, width: int = 10) -> None:
        self.level_nodes = level_nodes
        self.width = width

    def window(self, view: View) -> int:
        return view.stage_count

    def send(self, view: View) -> list[Choice]:
        if roots := view.unsent_roots():
            return roots
        if view.living_flights >= self.window(view):
            return []
        for request in view.requests:
            level = self._next_level(view, request)
            if level:
                return [(request, level)]
        return []

    def expand(self, view: View, drafter: int) -> list[Choice]:
        found = [
            (request, [n for n in self._last_level(request) if view.can_expand(request, n)])
            for request in view.requests
        ]
        return [(request, sorted(nodes)) for request, nodes in found if nodes]

    def _last_level(self, request: Request) -> list[int]:
        """The sent nodes that are deepest; the root if there are none."""
        tree = request.tree
        sent = [node for node in tree.living() if tree.state(node) is NodeState.SENT]
        deepest = max((tree.position(node) for node in sent), default=0)
        return [node for node in sent if tree.position(node) == deepest] or [tree.root]

    def _next_level(self, view: View, request: Request) -> list[int]:
        """The best children of the last level, once all of it is drafted."""
        tree = request.tree
        last = self._last_level(request)
        if any(request.is_pending(node) or view.can_expand(request, node) for node in last):
            return []
        fresh = [
            child for node in last for child in tree.children(node) if tree.state(child) is NodeState.DRAFTED
        ]
        return sorted(sorted(fresh, key=lambda node: (-tree.value(node), node))[: self.level_nodes])
