"""`specrouter`: `continuous` with a chain of models before the target, chosen anew while it answers
(SpecRouter, arXiv 2505.07680).

A chain is some of the models, at most one of each level: the lowest drafts, and each above it judges what is
there: it values nodes anew, drops those that it rejects and adds its own. What a node is worth decides when
it goes to the target, judged or not, so an idle pipeline does not wait for a judge. Models outside of the
chain are not asked; they catch up when they are needed again.

Which chain is the fastest is predicted for each request from what was measured: a token takes as long as the
chain needs to draft another level, and where it was not foreseen a trip of the pipeline more. With `a` the
share of tokens in this request (started from others of its domain) that were among the best few of what the
chain's surest model proposed:

    time per token = level + (1 - a) trip,   level = max(t_drafter, t_judge (1 - s), ...)

`t` is a model's turnaround and `s` the agreement of neighbours, SimScore = 1 - TV (a judge looks at 1 / (1 -
s) levels in one pass before it disagrees). What a chain took in truth, as a share of what was predicted,
corrects what is predicted for it. Plain decoding, the shortest chain, is what the governor compares with
(`methods.governor`), by the clock alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from flowspec.core.head.expertise import Expertise, RequestRecord
from flowspec.core.head.fusion import Offers
from flowspec.core.head.request import Request
from flowspec.core.methods.base import Choice, Observation, View
from flowspec.core.methods.chains import Chain, by_level, chains_to_try, slowest_s
from flowspec.core.methods.continuous import Continuous
from flowspec.rounding import duration

STAY_TOKENS = 16
"""Tokens that a chain has at least, once it is chosen."""
SETTLING_TOKENS = 4
"""The first of them still owe to the chain before and are not timed."""
GAIN = 1.15
"""How much faster another chain must be: what a request's last 16 tokens tell of it is as uncertain."""
PROBE_TOKENS_MIN, PROBE_TOKENS_MAX = 32, 1024
"""Tokens from one probe to the next, each time twice as many: then the chain that was tried least has a turn,
where it might be the fastest."""
MIGHT_BE_FASTEST = 1.5
"""Times the best prediction, up to which a chain is worth a probe."""
SHARE_NEW = 0.05
"""Weight of the newest timing in a chain's correction; some tokens tell little."""
DOUBT = 5
"""Timings that the prediction as it is counts for."""
SHARE_NEW_SIMILARITY = 0.1
SIMILARITY_AT_FIRST = 0.6
FEW = 3
"""Proposals below a node that are likely to be sent."""
SIMILARITY_MAX = 0.95
TIMED_KEPT = 64
"""Chains of which it is known how they did, the last ones: what others did is too long ago."""
PLAIN: Chain = ()


@dataclass(slots=True)
class ChainChoice:
    """Where a request is: its chain since it had `began` tokens, timed from `timed` on."""

    record: RequestRecord
    chain: Chain = PLAIN
    began: int = 0
    timed: int = 0
    timed_s: float | None = None


@dataclass(slots=True)
class ChainRecords:
    """What is learnt of models and chains: who is worth what, how alike two models are, how often each chain
    was timed.

    After `tokens`, the next probe is due at `probe_at`, and the one after it `probe_after` later. What a
    chain takes as a share of what is predicted is, as a logarithm, `common` to all plus its own `correction`.
    """

    expertise: Expertise
    similar: dict[tuple[int, int], float] = field(default_factory=dict)
    times: dict[Chain, int] = field(default_factory=dict)
    common: float = 0.0
    correction: dict[Chain, float] = field(default_factory=dict)
    tokens: int = 0
    probe_at: int = PROBE_TOKENS_MIN
    probe_after: int = PROBE_TOKENS_MIN

    def compare(self, offers: Mapping[int, Offers]) -> None:
        for pair in combinations(sorted(offers), 2):
            before = self.similar.get(pair, SIMILARITY_AT_FIRST)
            self.similar[pair] = before + SHARE_NEW_SIMILARITY * (
                similarity(*(offers[model] for model in pair)) - before
            )

    def similarity(self, low: int, high: int) -> float:
        return self.similar.get((min(low, high), max(low, high)), SIMILARITY_AT_FIRST)

    def learn(self, chain: Chain, share: float) -> None:
        """A chain was timed: it took `share` of what was predicted. What all chains have in common says
        nothing of one against another."""
        total, seen = sum(self.times.values()), self.times.pop(chain, 0)
        error = math.log(share)
        apart = error - self.common - self.correction.get(chain, 0.0)
        self.common += max(SHARE_NEW, 1 / (total + 1)) * (error - self.common)
        self.correction[chain] = (
            self.correction.get(chain, 0.0) + max(SHARE_NEW, 1 / (seen + 1 + DOUBT)) * apart
        )
        self.times[chain] = seen + 1  # the last one now
        for other in list(self.times)[:-TIMED_KEPT]:
            del self.times[other]
            self.correction.pop(other, None)

    def corrected(self, chain: Chain, seconds: float) -> float:
        return seconds * math.exp(self.common + self.correction.get(chain, 0.0))


def similarity(first: Offers, second: Offers) -> float:
    """1 - TV of what two models propose below a node, as far as they do."""
    others = dict(second)
    return sum(min(confidence, others.get(token, 0.0)) for token, confidence in first)


class SpecRouter(Continuous):
    """See the module. A `chain` that is given stays; None chooses."""

    name = "specrouter"
    suits_team = True
    takes_chain = True

    def __init__(self, *, chain: Chain | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.measured = ChainRecords(Expertise(0))
        self._fixed = chain

    def begin(self, request: Request) -> None:
        super().begin(request)
        if self.measured.expertise.drafters != len(request.drafter_states):
            self.measured = ChainRecords(Expertise(len(request.drafter_states)))
            self.expertise = self.measured.expertise
        if request.plan is None:
            assert request.submit is not None
            request.plan = ChainChoice(record=self.measured.expertise.begin(request.submit.prompt))
        request.plan.timed_s = None

    def observed(self, request: Request, observation: Observation) -> None:
        super().observed(request, observation)
        found = {
            model: float(any(token == observation.token for token, _ in offers[:FEW]))
            for model, offers in observation.offers.items()
        }
        self.measured.expertise.observe(request.plan.record, found)
        self.measured.compare(observation.offers)

    def ended(self, request: Request) -> None:
        super().ended(request)
        self.measured.expertise.end(request.plan.record)

    def experience(self) -> ChainRecords:
        return self.measured

    def take(self, experience: object) -> None:
        assert isinstance(experience, ChainRecords)
        self.measured = experience
        self.expertise = experience.expertise

    def walked(self, request: Request, emitted: int) -> None:
        super().walked(request, emitted)
        self.measured.tokens += emitted

    def send(self, view: View) -> list[Choice]:
        for request in view.requests:
            self._route(view, request)
        return super().send(view)

    def requests_of(self, view: View, drafter: int) -> list[Request]:
        for request in view.requests:
            self._route(view, request)
        return [request for request in view.requests if drafter in request.plan.chain]

    def _route(self, view: View, request: Request) -> None:
        """Decides on a request's chain where that is due."""
        route: ChainChoice = request.plan
        tokens = len(request.new_tokens)
        there = [
            model
            for model, drafter_state in enumerate(request.drafter_states)
            if drafter_state.opening is not None
        ]
        if self._fixed is not None:
            chosen = tuple(model for model in self._fixed if model in there)
            if chosen != route.chain:
                self._change(view, request, chosen, "given")
            return
        if tokens and (route.timed_s is None or route.timed < route.began + SETTLING_TOKENS <= tokens):
            route.timed, route.timed_s = tokens, view.now_s
        is_gone = not set(route.chain) <= set(there)
        if not is_gone and route.chain and tokens < route.began + STAY_TOKENS:
            return
        found = self._predicted(view, request, there)
        if (
            route.chain in found
            and route.timed_s is not None
            and tokens > route.timed
            and view.now_s > route.timed_s
            and found[route.chain]
        ):
            self.measured.learn(
                route.chain, (view.now_s - route.timed_s) / (tokens - route.timed) / found[route.chain]
            )
        self._choose(
            view,
            request,
            {chain: self.measured.corrected(chain, seconds) for chain, seconds in found.items()},
        )
        route.began, route.timed_s = tokens, None

    def _choose(self, view: View, request: Request, seconds: Mapping[Chain, float]) -> None:
        """The fastest chain, or the one that is there if it is about as fast; now and then one of which
        little is known."""
        route: ChainChoice = request.plan
        if not seconds:
            if route.chain != PLAIN:
                self._change(view, request, PLAIN, "no model is there")
            return
        best = min(
            seconds, key=lambda chain: (seconds[chain], -len(chain), chain)
        )  # a judge that costs nothing may help
        likely = [
            chain
            for chain in seconds
            if seconds[chain] <= MIGHT_BE_FASTEST * seconds[best] and chain != route.chain
        ]
        if route.chain not in seconds:
            self._change(
                view,
                request,
                best,
                "predicted to be the fastest" if route.began == 0 and not route.chain else "a model is gone",
            )
        elif self.measured.tokens >= self.measured.probe_at and likely:
            self.measured.probe_after = min(2 * self.measured.probe_after, PROBE_TOKENS_MAX)
            self.measured.probe_at = self.measured.tokens + self.measured.probe_after
            least = min(likely, key=lambda chain: (self.measured.times.get(chain, 0), seconds[chain]))
            self._change(view, request, least, "a probe")
        elif GAIN * seconds[best] < seconds[route.chain]:
            self._change(
                view,
                request,
                best,
                f"{duration(seconds[best])} a token, not {duration(seconds[route.chain])}",
            )

    def _change(self, view: View, request: Request, chain: Chain, reason: str) -> None:
        request.plan.chain = chain
        request.plan.began = len(request.new_tokens)
        request.statistics.chains.append((len(request.new_tokens), view.now_s, chain, reason))

    def _predicted(self, view: View, request: Request, there: Sequence[int]) -> dict[Chain, float]:
        """Seconds for a token of each chain that comes into question, by the module's formula; of the models
        that are `there`.

        0 while the pipeline's times are not known.
        """
        turn_s = view.turnaround_s

        def step_s(low: int, high: int) -> float:
            return turn_s[high] * (1 - min(SIMILARITY_MAX, self.measured.similarity(low, high)))

        route: ChainChoice = request.plan
        groups = by_level([traits.level for traits in view.traits], there)
        known = [chain for chain in (route.chain, *self.measured.times) if chain and set(chain) <= set(there)]
        worth = self.measured.expertise.worth(route.record)
        trip_s = view.costs.trip_s(max(1, round(self._typical_rows)))
        return {
            chain: slowest_s(chain, turn_s, step_s) + (1 - max(worth[model] for model in chain)) * trip_s
            for chain in dict.fromkeys([*chains_to_try(groups, turn_s, step_s), *known])
        }
