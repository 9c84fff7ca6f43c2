"""`cosine`: `continuous` with several drafters that work together (CoSine, arXiv 2503.10325).

- Routing: a request is drafted for by the few that suit it, by what came true of what they proposed, in it
  and in others of its domain, and by how long they take; the choice is looked at again every few tokens. A
  drafter that is chosen later catches up by itself, and those that it replaces go on until it has.
- Fusion: what they propose below a node is one ranking (`core.head.fusion`), so that the branch on which they
  agree goes first. Without, a token is worth what the surest says. Each of several drafters goes on from what
  it proposed itself, whoever else did: what it would not have said it does not go on with well, and it keeps
  the others waiting.
- Whoever looks up texts works for every request, beside those that are chosen: it costs nothing.
- How many draft for a request is measured (`core.head.team_size`): one more while what it finds saves more
  than its share of the boards costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import asdict

from flowspec.core.head.domains import Domains
from flowspec.core.head.drafter_traits import DrafterTraits
from flowspec.core.head.expertise import Expertise, RequestRecord
from flowspec.core.head.request import Request
from flowspec.core.head.team_size import TeamSize
from flowspec.core.methods.base import Observation, Parameter, View
from flowspec.core.methods.continuous import Continuous, ContinuousState
from flowspec.validation import expect

CHOOSE_TOKENS = 8
"""Tokens of an answer between two looks at who drafts for it."""
BEHIND_MAX = 16
"""Tokens that a drafter takes in beside its next job; who lacks more is behind, and those that it replaces go
on meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long each drafter takes for a level, in trips of the pipeline: `delays` as it was of late, a job
    that is overdue among it, `hoped` of those that had no job for long as of the fastest. Who is `stuck`
    keeps a level waiting for a trip already: to wait longer is worse than to do without."""

    delays: Sequence[float]
    hoped: Sequence[float]
    stuck: frozenset[int]


@dataclass(slots=True)
class DrafterChoice:
    """Who drafts for a request: those of its record until it has `until` tokens, and those `before` them
    until they have its text."""

    record: RequestRecord
    before: tuple[int, ...] = ()
    until: int = 0

    @property
    def chosen(self) -> tuple[int, ...]:
        return self.record.chosen


class CosineState(ContinuousState, frozen=True, kw_only=True, tag="cosine"):
    team_size: TeamSize


class Cosine(Continuous):
    """See the module. `count` drafters work for each request (None: as many as pays)."""

    name = "cosine"
    parameters = (
        *Continuous.parameters,
        Parameter("routing", kind=bool),
        Parameter("fusion", kind=bool),
        Parameter("count"),
    )
    suits_team = True
    expertise: Expertise

    def __init__(
        self, *, routing: bool = True, fusion: bool = True, count: int | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self.fuses = fusion
        self.expertise = Expertise(0)
        self._routing = routing
        self._count = count
        self._team_size = TeamSize.of(1)
        self._lookups: tuple[int, ...] = ()

    def meet(self, traits: Sequence[DrafterTraits]) -> None:
        self.expertise = Expertise(len(traits))
        self._team_size = TeamSize.of(len(traits))

    def begin(self, request: Request) -> None:
        super().begin(request)
        if request.plan is None:
            request.plan = DrafterChoice(record=self.expertise.begin(self._domain_of[request.number]))
        self._weigh(request)

    def observed(self, request: Request, observation: Observation) -> None:
        super().observed(request, observation)
        self.expertise.observe(request.plan.record, observation.chances)
        team = [drafter for drafter in request.plan.chosen if drafter not in self._lookups]
        self._team_size.observe(team, observation.offers, observation.token)
        self._weigh(request)

    def walked(self, request: Request, emitted: int) -> None:
        super().walked(request, emitted)
        self._team_size.tokens += emitted / self._answers

    def experience(self) -> tuple[Domains, Expertise, TeamSize]:
        return self.domains, self.expertise, self._team_size

    def take(self, experience: object) -> None:
        assert isinstance(experience, tuple)
        self.domains, self.expertise, self._team_size = experience

    def state_dict(self) -> CosineState:
        return CosineState(**asdict(super().state_dict()), team_size=self._team_size)

    def load_state_dict(self, state: Any) -> None:
        found, count = len(state.team_size.gains), self.expertise.drafters
        expect(found == count, "team_size", f"that of {found}", f"that of {count} drafters")
        super().load_state_dict(state)
        self._team_size = state.team_size

    def _weigh(self, request: Request) -> None:
        if self._routing:
            request.weights = self.expertise.weights(request.plan.record)

    def requests_of(self, view: View, drafter: int) -> list[Request]:
        self._lookups = tuple(number for number, traits in enumerate(view.traits) if traits.looks_up)
        count = self._count or self._adapted(view)
        pace = self._pace(view)
        return [request for request in view.requests if drafter in self._drafters_of(request, count, pace)]

    def _adapted(self, view: View) -> int:
        """How many drafters work for each request: as many as pay."""
        known = [
            view.turnaround_s[drafter]
            for request in view.requests
            for drafter in request.plan.chosen
            if view.turnaround_s[drafter] and drafter not in self._lookups
        ]
        if known and view.costs.is_known:
            self._team_size.look(sum(known) / len(known), self._trip_s(view))
        return self._team_size.size

    def _trip_s(self, view: View) -> float:
        return view.costs.trip_s(max(1, round(self._typical_rows)))

    def _pace(self, view: View) -> Pace:
        trip_s = self._trip_s(view) if view.costs.is_known else 0.0
        if not trip_s:
            zeros = [0.0] * len(view.traits)
            return Pace(delays=zeros, hoped=zeros, stuck=frozenset())
        delays = [
            max(usual_s, overdue_s) / trip_s
            for usual_s, overdue_s in zip(view.turnaround_s, view.overdue_s, strict=True)
        ]
        least = min((each for each in delays if each), default=0.0)
        return Pace(
            delays=delays,
            hoped=[
                least if is_paused else delay for delay, is_paused in zip(delays, view.paused, strict=True)
            ],
            stuck=frozenset(drafter for drafter, late_s in enumerate(view.overdue_s) if late_s > trip_s),
        )

    def _drafters_of(self, request: Request, count: int, pace: Pace) -> tuple[int, ...]:
        route: DrafterChoice = request.plan
        there = [
            drafter
            for drafter, drafter_state in enumerate(request.drafter_states)
            if drafter_state.opening is not None
        ]
        there = [drafter for drafter in there if drafter not in pace.stuck] or there
        if len(request.new_tokens) >= route.until or not set(route.chosen) <= set(there):
            route.before = route.chosen
            models = [drafter for drafter in there if drafter not in self._lookups]
            if self._routing:
                chosen = self.expertise.choose(route.record, count, models, pace.delays, pace.hoped)
            else:
                turns = range(request.number, request.number + min(count, len(models)))
                chosen = tuple(models[turn % len(models)] for turn in turns)
            lookups = [drafter for drafter in self._lookups if drafter in there]
            self.expertise.put(route.record, (*chosen, *lookups))
            route.until = len(request.new_tokens) + CHOOSE_TOKENS
        if route.before and not any(_is_behind(request, drafter) for drafter in route.chosen):
            route.before = ()
        return route.chosen + route.before

    def may_ask(self, request: Request, drafter: int, node: int) -> bool:
        """Each of several drafters goes on from what it proposed itself."""
        if node == request.tree.root or len(request.plan.chosen) == 1:
            return True
        offers = request.candidates.offers.get(request.tree.parent(node), {}).get(drafter, ())
        return any(token == request.tree.token(node) for token, _ in offers)


def _is_behind(request: Request, drafter: int) -> bool:
    return len(request.tree.path) - request.drafter_states[drafter].filled > BEHIND_MAX
