"""`continuous`: FlowSpec's own method. No turns: every event may send, draft or commit.

- A root that is not on its way (an answer begins, or a miss) goes out with the best of what is drafted below
  it: at once, or when the drafter has said more, where that is the faster way (`patience`).
- Otherwise a segment goes out when the pipeline can take it: fewer living segments than the window, and the
  bottleneck about to be through with the last one. It holds the most valuable unsent nodes of all requests,
  as far as a node's value pays for the time that it adds to the slot.
- The drafter always works on the most valuable nodes it has not been asked about, a batch at a time, until
  what is drafted and unsent would fill the next segments anyway.

Values are calibrated, so a drafter that is of no use stops costing anything but its own passes.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta

from flowspec.core.head.domains import Domains, DomainsState
from flowspec.core.head.drafter_jobs import most_valuable
from flowspec.core.head.drafter_traits import DrafterTraits
from flowspec.core.head.expertise import ExpertiseState
from flowspec.core.head.learnt import Share
from flowspec.core.head.request import Request
from flowspec.core.methods.base import Choice, Method, Observation, Parameter, View
from flowspec.core.methods.governor import Governor, GovernorState
from flowspec.core.methods.patience import LATE, Hope, Slots, gain_s
from flowspec.core.protocol import limits
from flowspec.validation import Document, expect

VALUE_MIN = 0.002
"""Nodes less likely than this are neither sent nor expanded."""
VALUE_MIN_SHARED = 0.005
"""With several requests slots have better uses."""
SEGMENT_NODES_MAX = 64
SEGMENT_NODES_UNKNOWN = 8
"""Nodes of a segment before any slot has been timed."""
AGE_WEIGHT = 0.25
"""What a request's values gain for each segment that went out without it."""
WINDOW_SLACK = 0.5
NODES_PER_ANSWER = 3
"""Nodes in a drafting job for each answer under way, where that is more than a job's usual size."""
BACKLOG_SEGMENTS = 2
"""The drafter rests when this many next segments are drafted with better nodes than any it could expand."""
CHANCE_AT_FIRST = 0.8
CHANCE_TOKENS_MIN, CHANCE_TOKENS_MAX = 4, 64
"""How often a token is guessed is the mean over so many of late; the first value counts as so many."""
CHANCE_LEAST = 0.05
"""Guesses less likely than this are seldom sent: not that deep in a tree."""


class ContinuousState(Document, frozen=True, kw_only=True, tag_field="method", tag="continuous"):
    chance: Share
    chance_tokens: Annotated[int, Meta(ge=CHANCE_TOKENS_MIN, le=CHANCE_TOKENS_MAX)]
    governor: GovernorState
    domains: DomainsState
    expertise: ExpertiseState | None

    def __post_init__(self) -> None:
        known = [str(number) for number in range(len(self.domains.domains))]
        for number in self.governor.domains:
            expect(number in known, "governor", number, f"the number of one of {len(known)} domains")
        count = 0 if self.expertise is None else len(self.expertise.domains)
        expect(count <= len(known), "expertise", f"{count} domains", f"at most {len(known)}")


class Continuous(Method):
    name = "continuous"
    parameters: tuple[Parameter, ...] = (
        Parameter("value_min", kind=float, most=1.0, tried=(0.002, 0.005, 0.01)),
        Parameter("segment_nodes", tried=(16, 32, 64)),
        Parameter("window_slack", kind=float, most=16.0, tried=(0.0, 0.5, 1.0)),
        Parameter("batch"),
        Parameter("width"),
        Parameter("window"),
        Parameter("patience", kind=bool),
    )
    nodes_parameter = "segment_nodes"
    commits_at_once = True
    is_calibrated = True
    overfills = True
    drafters_max = limits.DRAFTERS_MAX
    domains: Domains

    def __init__(
        self,
        *,
        segment_nodes: int = SEGMENT_NODES_MAX,
        batch: int = 12,
        width: int = 12,
        value_min: float = VALUE_MIN,
        window: int | None = None,
        window_slack: float = WINDOW_SLACK,
        patience: bool = True,
    ) -> None:
        self.segment_nodes = segment_nodes
        self.batch = batch
        self.width = width
        self.value_min = value_min
        self.window_slack = window_slack
        self._window = window
        self._is_patient = patience
        self._pace_s = 0.0
        self._typical_rows = 1.0
        self._sent = 0
        self._answers = 1
        self._answering: set[int] = set()
        """Requests that have given a token and not ended."""
        self.domains = Domains()
        self._domain_of: dict[int, int] = {}
        """Of the requests that are answered or will be, by number."""
        self._governor = Governor()
        self._chance = CHANCE_AT_FIRST  # that what is said of a right node holds the next token, and is sent
        self._chance_tokens = CHANCE_TOKENS_MIN
        self._price = 0.0
        self._waits_since_s = -1.0  # that a root waits for the drafter; -1: none does
        self._waits_until_s = 0.0
        self._is_watched = False  # whether drafters only look up texts, and may do so at rest
        self._looked_at = 0  # tokens about which something was guessed, of those that a segment gave

    def meet(self, traits: Sequence[DrafterTraits]) -> None:
        self._is_watched = bool(traits) and all(each.looks_up for each in traits)

    def begin(self, request: Request) -> None:
        request.served = self._sent
        if request.number not in self._domain_of:  # else it begins again on other stages
            assert request.submit is not None
            self._domain_of[request.number] = self.domains.find(request.submit.prompt)
        is_alone = len(self._domain_of) == 1
        domain = self._domain_of[request.number] if is_alone else None
        self._governor.begin(domain, is_watched=self._is_watched and is_alone)
        self._looked_at = 0
        self._stopped(request)

    def observed(self, request: Request, observation: Observation) -> None:
        tree = request.tree
        node = tree.child(tree.root, observation.token)
        is_guessed = node is not None and tree.value(node) >= max(self._price, CHANCE_LEAST)
        self._chance_tokens = min(self._chance_tokens + 1, CHANCE_TOKENS_MAX)
        self._chance += (is_guessed - self._chance) / self._chance_tokens
        if self._is_watched:
            self._looked_at += 1
            best = max(tree.children(tree.root), key=tree.value, default=None)
            self._governor.watched(is_right=best is not None and best == node)

    def experience(self) -> object:
        return self._chance, self._chance_tokens

    def take(self, experience: object) -> None:
        assert isinstance(experience, tuple)
        self._chance, self._chance_tokens = experience

    def state_dict(self) -> ContinuousState:
        return ContinuousState(
            chance=self._chance,
            chance_tokens=self._chance_tokens,
            governor=self._governor.state_dict(),
            domains=self.domains.state_dict(),
            expertise=None if self.expertise is None else self.expertise.state_dict(),
        )

    def load_state_dict(self, state: Any) -> None:
        if self.expertise is not None:
            expect(state.expertise is not None, "expertise", None, "what drafters are worth")
            self.expertise.load_state_dict(state.expertise)
        self._chance, self._chance_tokens = state.chance, state.chance_tokens
        self._governor.load_state_dict(state.governor)
        self.domains.load_state_dict(state.domains)

    def walked(self, request: Request, emitted: int) -> None:
        self._answering.add(request.number)
        if self._is_watched:
            for _ in range(emitted - self._looked_at):  # nothing was guessed
                self._governor.watched(is_right=False)
            self._looked_at = 0
        self._governor.emitted(emitted / self._answers)

    def ended(self, request: Request) -> None:
        if self.expertise is not None:
            self.expertise.end(request.plan.record)
        self._domain_of.pop(request.number, None)
        if not self._domain_of:
            self._governor.end()
        self._stopped(request)

    def _stopped(self, request: Request) -> None:
        """It gives no tokens until its prompt is read, or any more."""
        self._answering.discard(request.number)
        if not self._answering:
            self._governor.idle()

    def window(self, view: View) -> int:
        if self._window is not None:
            return self._window
        return (
            view.costs.window(round(self._typical_rows), self.window_slack)
            if view.costs.is_known
            else view.stage_count
        )

    def send(self, view: View) -> list[Choice]:
        if view.traits:
            self._answers = max(1, len(view.requests))
            trip_s = view.costs.quickest_trip_s(self._answers) if view.costs.is_known else 0.0
            self._governor.look(view.now_s, 1 / trip_s if trip_s else 0.0)
        roots = [request for request in view.requests if not request.root_sent]
        if not roots:
            self._waits_since_s = -1.0
        room = self.window(view) - view.living_flights
        if room < 0 or (not roots and (room == 0 or view.now_s < self._pace_s)):
            return []  # with many requests, roots beyond the one above the window wait and share a segment
        choices = self._best(view, roots)
        if roots and self._waits(view, roots, choices):
            return []
        self._waits_since_s = -1.0
        if choices:
            rows = sum(len(nodes) for _, nodes in choices)
            self._sent += 1
            self._typical_rows += 0.1 * (rows - self._typical_rows)
            self._pace_s = view.now_s + view.costs.slot_s(rows)
            for request, _ in choices:
                request.served = self._sent
        return choices

    def wake_s(self, view: View) -> float | None:
        if self._waits_since_s >= 0 and view.now_s < self._waits_until_s:
            return self._waits_until_s
        if view.now_s < self._pace_s and view.living_flights < self.window(view):
            return self._pace_s
        return None

    def _waits(self, view: View, roots: list[Request], choices: list[Choice]) -> bool:
        """Whether roots should not go yet, which lasts for no longer than the slot that they would take
        alone."""
        is_waiting = self._waits_since_s >= 0
        if (
            not self._is_patient
            or self._governor.is_resting
            or view.prompts_wait  # a chunk of theirs would take the slot
            or not view.costs.is_known
            or (is_waiting and view.now_s >= self._waits_until_s)
        ):
            return False
        rows = sum(len(nodes) for _, nodes in choices)
        usual = max(rows + len(roots), round(self._typical_rows))
        slots = Slots(
            alone_s=view.costs.slot_s(rows),
            usual_s=view.costs.slot_s(usual),
            longer_s=view.costs.trip_s(usual) - view.costs.trip_s(rows),
        )
        since_s = self._waits_since_s if is_waiting else view.now_s
        self._price = view.costs.rate * view.costs.marginal_s(rows)
        least = self._price
        if rows >= self.segment_nodes:
            least = max(least, min(request.tree.value(nodes[-1]) for request, nodes in choices))
        best_s = 0.0
        for drafter, traits in enumerate(view.traits):
            pass_s, asked_s = view.turnaround_s[drafter], view.asked_s[drafter]
            late_s = LATE * pass_s + (view.now_s if asked_s is None else asked_s)
            if not pass_s or traits.level or view.now_s >= late_s:
                continue
            hopes = self._hopes(view, roots, drafter, least)
            others = len(choices) - len(hopes)
            found_s = gain_s(hopes, others, slots) if hopes else 0.0
            if found_s > best_s:
                best_s, self._waits_until_s = found_s, min(late_s, since_s + slots.alone_s)
        self._waits_since_s = since_s if best_s > 0 else -1.0
        return best_s > 0

    def _hopes(self, view: View, roots: list[Request], drafter: int, least: float) -> list[Hope]:
        """What a drafter's next pass promises: of the nodes that it is or would be asked about those with
        children worth `least`."""
        pass_s, asked_s = view.turnaround_s[drafter], view.asked_s[drafter]
        left_s = 0.0 if asked_s is None else max(0.0, asked_s + pass_s - view.now_s)
        next_asked: dict[int, list[int]] | None = None
        found = []
        for request in roots:
            tree, first_s = request.tree, left_s
            nodes = [node for node in request.drafter_states[drafter].pending if request.is_living(node)]
            if not nodes:
                if next_asked is None:
                    next_asked = {other.number: asked for other, asked in self.expand(view, drafter)}
                nodes, first_s = next_asked.get(request.number, []), left_s + pass_s
            reach = sum(
                tree.value(node) - sum(tree.value(child) for child in tree.children(node))
                for node in nodes
                if tree.value(node) * self._chance >= least
            )
            if reach > 0:
                found.append(Hope(first_s=first_s, pass_s=pass_s, reach=min(1.0, reach), chance=self._chance))
        return found

    def _least(self, view: View) -> float:
        return self.value_min if len(view.requests) < 2 else max(self.value_min, VALUE_MIN_SHARED)

    def _weight(self, request: Request) -> float:
        return 1 + AGE_WEIGHT * (self._sent - request.served)

    def _best(self, view: View, roots: list[Request]) -> list[Choice]:
        """The roots, and the unsent nodes of all requests by weighted value while each pays for its time."""
        chosen: dict[int, list[int]] = {request.number: [request.tree.root] for request in roots}
        offers = []
        least = self._least(view)
        is_resting = self._is_watched and self._governor.is_resting  # what is guessed is only looked at
        for order, request in enumerate(() if is_resting else view.requests):
            weight = self._weight(request) if len(view.requests) > 1 else 1.0
            nodes = request.tree.best_unsent(min(self.segment_nodes, _room(request)), least)
            offers.append([(-weight * request.tree.value(node), order, node) for node in nodes])
        rows = len(roots)
        cap = self.segment_nodes if view.costs.is_known else SEGMENT_NODES_UNKNOWN
        for cost, order, node in heapq.merge(*offers):
            if rows >= max(cap, len(roots)):
                break
            if rows and -cost < view.costs.rate * view.costs.marginal_s(rows):
                break
            chosen.setdefault(view.requests[order].number, []).append(node)
            rows += 1
        by_number = {request.number: request for request in view.requests}
        return [(by_number[number], nodes) for number, nodes in chosen.items()]

    def expand(self, view: View, drafter: int) -> list[Choice]:
        if self._governor.is_resting:
            return self._watch(view, drafter) if self._is_watched else []
        batch = max(self.batch, NODES_PER_ANSWER * len(view.requests))
        enough = BACKLOG_SEGMENTS * max(4, round(self._typical_rows))
        offers: list[tuple[float, int, int]] = []
        requests = self.requests_of(view, drafter)
        for order, request in enumerate(requests):
            tree, weight = request.tree, self._weight(request) if len(view.requests) > 1 else 1.0
            if view.can_expand(request, tree.root, drafter):
                offers.append((-weight, order, tree.root))
            if tree.alive_count < limits.DRAFT_NODES_MAX - self.batch * self.width:
                bar = max(self._least(view), tree.unsent_value(enough))
                for node in most_valuable(request, drafter, view.traits[drafter], self.batch):
                    if tree.value(node) >= bar and self.may_ask(request, drafter, node):
                        offers.append((-weight * tree.value(node), order, node))
        chosen: dict[int, list[int]] = {}
        for _, order, node in heapq.nsmallest(batch, offers):
            chosen.setdefault(order, []).append(node)
        return [(requests[order], sorted(nodes)) for order, nodes in chosen.items()]

    def _watch(self, view: View, drafter: int) -> list[Choice]:
        """The roots that a drafter has not been asked about."""
        roots = [(each, each.tree.root) for each in self.requests_of(view, drafter)]
        return [(request, [root]) for request, root in roots if view.can_expand(request, root, drafter)]

    def requests_of(self, view: View, drafter: int) -> Sequence[Request]:
        """Those that a drafter works for."""
        return view.requests

    def may_ask(self, request: Request, drafter: int, node: int) -> bool:
        """Whether a drafter may be asked about a node below the root."""
        return True


def _room(request: Request) -> int:
    """Nodes that the stages have slots for."""
    return limits.TREE_NODES_MAX - request.tree.sent_alive
