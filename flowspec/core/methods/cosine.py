"""`cosine`: `continuous` with several drafters that work together (CoSine, arXiv 2503.10325; ALGORITHMS section 5).

- Routing: a request is drafted for by the few that suit it, by what came true of what they proposed, in it and in others of its domain;
  the choice is looked at again every few tokens. A drafter that is chosen later catches up by itself.
- Fusion: what they propose below a node is one ranking (`core.trust`), so that the branch on which they agree goes first and each goes
  on from the others' guesses. Without, each goes on from its own alone, and a token is worth what the surest says.
- How many draft for a request follows how much there is to do for them: while drafters rest, more look at each request;
  when they do not keep up with the slots, fewer do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from flowspec.core.expertise import Expertise, Record
from flowspec.core.methods.base import Choice, Seen, View
from flowspec.core.methods.continuous import Continuous
from flowspec.core.request import Request

CHOOSE_TOKENS = 8
"""Tokens of an answer between two looks at who drafts for it."""
NODES_PER_LEVEL = 3
"""Nodes of a request that a drafter is asked about for each token that the answer goes ahead."""
IDLE, OVERLOADED = 0.9, 1.1
"""Drafting time of a level as a share of a slot, below which more drafters work for each request and above which fewer do."""
LOOK_SEGMENTS = 8
"""Segments between two changes of that number."""


@dataclass(slots=True)
class Route:
    """Who drafts for a request: `chosen` until it has `until` tokens."""

    record: Record
    chosen: tuple[int, ...] = ()
    until: int = 0


class Cosine(Continuous):
    """See the module. `count` drafters work for each request (None: as many as pays)."""

    name = "cosine"

    def __init__(self, *, routing: bool = True, fusion: bool = True, count: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.fuses = fusion
        self._known = Expertise(0)
        self._routing = routing
        self._count = count
        self._counted = 1
        self._looked = 0

    def begin(self, request: Request) -> None:
        super().begin(request)
        if self._known.drafters != len(request.mirrors):
            self._known = self.expertise = Expertise(len(request.mirrors))
        if request.plan is None:
            assert request.submit is not None
            request.plan = Route(record=self._known.begin(request.submit.prompt))
        self._weigh(request)

    def observed(self, request: Request, seen: Seen) -> None:
        for drafter, chance in seen.chances.items():
            self._known.observe(request.plan.record, drafter, chance)
        self._weigh(request)

    def ended(self, request: Request) -> None:
        self._known.end(request.plan.record)

    def learnt(self) -> Expertise:
        return self._known

    def take(self, learnt: object) -> None:
        assert isinstance(learnt, Expertise)
        self._known = self.expertise = learnt

    def _weigh(self, request: Request) -> None:
        if self._routing:
            request.weights = self._known.weights(request.plan.record)

    def expand(self, view: View, drafter: int) -> list[Choice]:
        """See `Continuous`; for those requests that the drafter works for."""
        count = self._count or self._adapted(view)
        wanted = [request for request in view.requests if drafter in self._drafters_of(request, count)]
        return super().expand(replace(view, requests=wanted), drafter)

    def _adapted(self, view: View) -> int:
        """How many drafters work for each request: one more or one fewer now and then, by how drafting keeps up with verification."""
        slot_s = view.costs.slot_s(round(self._typical_rows))
        known = [turnaround_s for turnaround_s in view.turnaround_s if turnaround_s]
        if self._sent >= self._looked + LOOK_SEGMENTS and slot_s and known:
            self._looked = self._sent
            jobs = max(1.0, len(view.requests) * self._counted / len(view.traits) * NODES_PER_LEVEL / self.batch)
            busy = jobs * sum(known) / len(known) / slot_s
            if busy < IDLE:
                self._counted = min(self._counted + 1, len(view.traits))
            elif busy > OVERLOADED:
                self._counted = max(self._counted - 1, 1)
        return self._counted

    def _drafters_of(self, request: Request, count: int) -> tuple[int, ...]:
        route: Route = request.plan
        there = [drafter for drafter, mirror in enumerate(request.mirrors) if mirror.opening is not None]
        if len(request.new_tokens) >= route.until or not set(route.chosen) <= set(there):
            if self._routing:
                route.chosen = self._known.choose(route.record, count, there)
            else:
                route.chosen = tuple(there[(request.number + turn) % len(there)] for turn in range(min(count, len(there))))
            route.until = len(request.new_tokens) + CHOOSE_TOKENS
        return route.chosen

    def may_ask(self, request: Request, drafter: int, node: int) -> bool:
        """Without fusion a drafter goes on from what it proposed itself."""
        if self.fuses or node == request.tree.root:
            return True
        offers = request.growth.found.get(request.tree.parent(node), {}).get(drafter, ())
        return any(token == request.tree.token(node) for token, _ in offers)
