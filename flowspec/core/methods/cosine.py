"""`cosine`: `continuous` with several drafters that work together (CoSine, arXiv 2503.10325; ALGORITHMS section 5).

- Routing: a request is drafted for by the few that suit it, by what came true of what they proposed, in it and in others of its domain,
  and by how long they take; the choice is looked at again every few tokens. A drafter that is chosen later catches up by itself.
- Fusion: what they propose below a node is one ranking (`core.trust`), so that the branch on which they agree goes first and each goes
  on from the others' guesses. Without, each goes on from its own alone, and a token is worth what the surest says.
- How many draft for a request is measured (`core.teams`): one more while what it finds saves more than its share of the boards costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flowspec.core.expertise import Expertise, Record
from flowspec.core.methods.base import Seen, View
from flowspec.core.methods.continuous import Continuous
from flowspec.core.request import Request
from flowspec.core.teams import Teams

CHOOSE_TOKENS = 8
"""Tokens of an answer between two looks at who drafts for it."""


@dataclass(slots=True)
class Route:
    """Who drafts for a request: `chosen` until it has `until` tokens."""

    record: Record
    chosen: tuple[int, ...] = ()
    until: int = 0


class Cosine(Continuous):
    """See the module. `count` drafters work for each request (None: as many as pays)."""

    name = "cosine"
    expertise: Expertise

    def __init__(self, *, routing: bool = True, fusion: bool = True, count: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.fuses = fusion
        self.expertise = Expertise(0)
        self._routing = routing
        self._count = count
        self._teams = Teams(1)
        self._tokens = 0.0

    def begin(self, request: Request) -> None:
        super().begin(request)
        if self.expertise.drafters != len(request.mirrors):
            self.expertise = Expertise(len(request.mirrors))
            self._teams = Teams(len(request.mirrors))
        if request.plan is None:
            assert request.submit is not None
            request.plan = Route(record=self.expertise.begin(request.submit.prompt))
        self._weigh(request)

    def observed(self, request: Request, seen: Seen) -> None:
        for drafter, chance in seen.chances.items():
            self.expertise.observe(request.plan.record, drafter, chance)
        self._teams.observe(request.plan.chosen, seen.offers, seen.token)
        self._weigh(request)

    def walked(self, request: Request, emitted: int) -> None:
        super().walked(request, emitted)
        self._tokens += emitted / self._answers

    def ended(self, request: Request) -> None:
        self.expertise.end(request.plan.record)

    def learnt(self) -> Expertise:
        return self.expertise

    def take(self, learnt: object) -> None:
        assert isinstance(learnt, Expertise)
        self.expertise = learnt

    def _weigh(self, request: Request) -> None:
        if self._routing:
            request.weights = self.expertise.weights(request.plan.record)

    def requests_of(self, view: View, drafter: int) -> list[Request]:
        count = self._count or self._adapted(view)
        trip_s = self._trip_s(view) if view.costs.is_known else 0.0
        delays = [turnaround_s / trip_s if trip_s else 0.0 for turnaround_s in view.turnaround_s]
        return [request for request in view.requests if drafter in self._drafters_of(request, count, delays)]

    def _adapted(self, view: View) -> int:
        """How many drafters work for each request: as many as pay."""
        known = [view.turnaround_s[drafter] for request in view.requests for drafter in request.plan.chosen if view.turnaround_s[drafter]]
        if known and view.costs.is_known:
            self._teams.look(self._tokens, sum(known) / len(known), self._trip_s(view))
        return self._teams.size

    def _trip_s(self, view: View) -> float:
        return view.costs.trip_s(max(1, round(self._typical_rows)))

    def _drafters_of(self, request: Request, count: int, delays: Sequence[float]) -> tuple[int, ...]:
        route: Route = request.plan
        there = [drafter for drafter, mirror in enumerate(request.mirrors) if mirror.opening is not None]
        if len(request.new_tokens) >= route.until or not set(route.chosen) <= set(there):
            if self._routing:
                route.chosen = self.expertise.choose(route.record, count, there, delays)
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
