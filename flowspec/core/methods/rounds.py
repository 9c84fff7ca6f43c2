"""Methods that go in rounds: draft a tree, send it, wait for all of it, begin again.

`tree-sd` sends the whole tree as one segment (SpecInfer, EAGLE-2: the "serial" baseline of the FlowSpec
paper). `chunk-pp` cuts it into chunks that follow each other through the stages (the paper's "naive"
pipeline) and learns when all are back.
"""

from __future__ import annotations

from flowspec.core.head.request import Request
from flowspec.core.methods.base import Choice, Method, Parameter, View, beam


class TreeRounds(Method):
    """`tree-sd`: the best `nodes` of a beam of `width` and `depth`, the root among them, in one segment."""

    name = "tree-sd"
    parameters: tuple[Parameter, ...] = (
        Parameter("nodes", tried=(8, 16, 24, 32, 48, 64)),
        Parameter("depth", tried=(4, 6, 8, 10)),
        Parameter("width"),
    )

    def __init__(self, *, nodes: int = 64, depth: int = 6, width: int = 10) -> None:
        self.nodes = nodes
        self.depth = depth
        self.width = width

    def send(self, view: View) -> list[Choice]:
        for request in view.requests if view.living_flights < self.window(view) else ():
            if request.in_flight == 0 and self._is_drafted(view, request):
                return [(request, self._tree(request))]
        return []

    def expand(self, view: View, drafter: int) -> list[Choice]:
        found = [
            (request, beam(view, request, self.width, self.depth))
            for request in view.requests
            if request.in_flight == 0
        ]
        return [(request, nodes) for request, nodes in found if nodes]

    def _is_drafted(self, view: View, request: Request) -> bool:
        return not view.traits or beam(view, request, self.width, self.depth) is None

    def _tree(self, request: Request) -> list[int]:
        return [request.tree.root, *request.tree.best_unsent(self.nodes - 1)]


class Chunks(TreeRounds):
    """`chunk-pp`: the tree level by level in `count` chunks, one behind the other; a round ends when all are
    back."""

    name = "chunk-pp"
    parameters: tuple[Parameter, ...] = (
        Parameter("nodes", tried=(16, 32, 48, 80)),
        Parameter("count", tried=(2, 3, 5, 8)),
        Parameter("depth", tried=(4, 6, 8)),
        Parameter("width"),
    )
    is_reference = True

    def __init__(self, *, nodes: int = 80, depth: int = 6, width: int = 10, count: int = 5) -> None:
        super().__init__(nodes=nodes, depth=depth, width=width)
        self.count = count

    def window(self, view: View) -> int:
        return max(self.count, view.stage_count + 1)

    def may_walk(self, request: Request) -> bool:
        return request.in_flight == 0 and not request.plan

    def send(self, view: View) -> list[Choice]:
        for request in view.requests:
            if request.plan:
                return [(request, request.plan.pop(0))]
            if request.in_flight == 0 and not request.root_sent and self._is_drafted(view, request):
                nodes = sorted(self._tree(request))
                size = -(-len(nodes) // self.count)
                request.plan = [nodes[at : at + size] for at in range(0, len(nodes), size)]
                return [(request, request.plan.pop(0))]
        return []
