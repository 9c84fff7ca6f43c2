"""`specrouter`: `continuous` with a chain of models before the target, chosen anew while it answers
(SpecRouter, arXiv 2505.07680).

A chain is some of the models, at most one of each level: the lowest drafts, and each above it judges what is
there: it values nodes anew, drops those that it rejects and adds its own. What a node is worth decides when
it goes to the target, judged or not, so an idle pipeline does not wait for a judge. Models outside of the
chain are not asked; they catch up when they are needed again.

Which chain is the fastest is predicted for each request from what was measured: a token takes as long as the
chain needs to draft another level, and where it was not foreseen a trip of the pipeline more. With `a` the
share of tokens in this request (started from others of its domain) that were the best guess of the chain's
surest model:

    time per token = level + (1 - a) trip,   level = max(t_drafter, t_judge (1 - s), ...)

`t` is a model's turnaround and `s` the agreement of neighbours, SimScore = 1 - TV (a judge looks at 1 / (1 -
s) levels in one pass before it disagrees). What a chain took in truth, as a share of what was predicted,
corrects what is predicted for it. Plain decoding, the shortest chain, is what the governor compares with
(`methods.governor`), by the clock alone.

Nothing need be learnt before the first answer. An intermediate is taken to miss half of what the model below
it misses, until tokens tell. The turnaround of a model that was never asked is not known, so the first chain
has a model of each level, and is looked at again as soon as all have answered once. A chain that is not
predicted to be the fastest is tried where the tokens to come would pay for it: as many are taken to come as
there were, and what another timing teaches is known by how many there were.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Annotated, Any

from msgspec import Meta
from msgspec.structs import asdict

from flowspec.core.head.domains import Domains
from flowspec.core.head.drafter_traits import DrafterTraits
from flowspec.core.head.expertise import UNKNOWN, Expertise, RequestRecord
from flowspec.core.head.fusion import Offers
from flowspec.core.head.learnt import Count, Share
from flowspec.core.head.request import Request
from flowspec.core.methods.base import Choice, Observation, View
from flowspec.core.methods.chains import Chain, by_level, chains_to_try, slowest_s
from flowspec.core.methods.continuous import Continuous, ContinuousState
from flowspec.rounding import duration
from flowspec.validation import Document, expect

STAY_TOKENS = 16
"""Tokens that a chain has at least, once it is chosen."""
SETTLING_TOKENS = 4
"""The first of them still owe to the chain before and are not timed."""
GAIN = 1.15
"""How much faster another chain must be: what a request's last 16 tokens tell of it is as uncertain."""
SPREAD = 0.5
"""Standard deviation of a timing by what is predicted, as a logarithm."""
CHANGE_TOKENS = 3.0
"""What a try costs even if the chain is as fast: whoever comes in reads what it lacks."""
TO_COME_MAX = 4096
"""Tokens to come, at most, for which a chain that is tried may pay: the models and texts of later ones may be
others."""
MISSES_BELOW = 0.5
"""Share of what a model misses that the one above it misses, too, before tokens tell."""
EXPECTED_MATCHES = 4
"""Tokens that this counts for."""
SHARE_NEW = 0.05
"""Weight of the newest timing in a chain's correction; some tokens tell little."""
DOUBT = 5
"""Timings that the prediction as it is counts for."""
SHARE_NEW_SIMILARITY = 0.1
SIMILARITY_AT_FIRST = 0.6
SIMILARITY_MAX = 0.95
CORRECTION_MAX = 20.0
"""As a logarithm; more is no time."""
TIMED_KEPT = 64
"""Chains of which it is known how they did, the last ones: what others did is too long ago."""
PLAIN: Chain = ()


@dataclass(slots=True)
class ChainChoice:
    """Where a request is: its chain since it had `began` tokens, timed from `timed` on.

    `is_blind`: it was chosen while not all models had answered once; `is_trial`: it is not predicted to be
    the fastest.
    """

    record: RequestRecord
    chain: Chain = PLAIN
    began: int = 0
    timed: int = 0
    timed_s: float | None = None
    is_blind: bool = False
    is_trial: bool = False


_Correction = Annotated[float, Meta(ge=-CORRECTION_MAX, le=CORRECTION_MAX)]


class ChainsState(Document, frozen=True, kw_only=True):
    tokens: Count
    similar: tuple[tuple[int, int, Share], ...]
    common: _Correction
    chains: Annotated[tuple[tuple[Chain, Count, _Correction], ...], Meta(max_length=TIMED_KEPT)]


class SpecRouterState(ContinuousState, frozen=True, kw_only=True, tag="specrouter"):
    measured: ChainsState


@dataclass(slots=True)
class ChainRecords:
    """What is learnt of chains in so many `tokens`: how alike two models are, how often each chain was timed.

    What a chain takes as a share of what is predicted is, as a logarithm, `common` to all plus its own
    `correction`.
    """

    similar: dict[tuple[int, int], float] = field(default_factory=dict)
    times: dict[Chain, int] = field(default_factory=dict)
    common: float = 0.0
    correction: dict[Chain, float] = field(default_factory=dict)
    tokens: int = 0

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

    def state_dict(self) -> ChainsState:
        return ChainsState(
            tokens=self.tokens,
            similar=tuple((*pair, alike) for pair, alike in self.similar.items()),
            common=self.common,
            chains=tuple((each, seen, self.correction.get(each, 0.0)) for each, seen in self.times.items()),
        )

    def load_state_dict(self, state: ChainsState) -> None:
        self.tokens, self.common = state.tokens, state.common
        self.similar = {(low, high): alike for low, high, alike in state.similar}
        self.times = {chain: seen for chain, seen, _ in state.chains}
        self.correction = {chain: correction for chain, _, correction in state.chains}

    def corrected(self, chain: Chain, seconds: float) -> float:
        """What a chain is expected to take where `seconds` are predicted, and what that may be off by: of two
        that are as fast, the one that is better known is taken."""
        doubt = SPREAD / math.sqrt(self.times.get(chain, 0) + DOUBT)
        return seconds * math.exp(self.common + self.correction.get(chain, 0.0) + doubt)

    def gain(self, chain: Chain, slower: float) -> float:
        """By how many tokens' time it is expected to be better to try a chain for `STAY_TOKENS` than to stay
        with the best one, of which it is predicted to take `slower` times the time (1 or more).

        One timing more moves what is predicted of it by `moved`, up or down. Where it becomes the best one,
        all tokens to come have what that saves: the knowledge gradient (Frazier, Powell, Dayanik 2008).
        """
        seen = min(self.times.get(chain, 0), 1 / SHARE_NEW) + DOUBT
        moved = SPREAD * math.sqrt(1 / seen - 1 / (seen + 1))
        far = math.log(slower) / moved
        density = math.exp(-far * far / 2) / math.sqrt(2 * math.pi)
        saved = moved * (density - far * math.erfc(far / math.sqrt(2)) / 2)
        return saved * min(self.tokens, TO_COME_MAX) - (slower - 1) * STAY_TOKENS - CHANGE_TOKENS


def similarity(first: Offers, second: Offers) -> float:
    """1 - TV of what two models propose below a node, as far as they do."""
    others = dict(second)
    return sum(min(confidence, others.get(token, 0.0)) for token, confidence in first)


class SpecRouter(Continuous):
    """See the module. A `chain` that is given stays; None chooses."""

    name = "specrouter"
    suits_team = True
    takes_chain = True
    expertise: Expertise

    def __init__(self, *, chain: Chain | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.expertise = Expertise(0)
        self.measured = ChainRecords()
        self._fixed = chain

    def meet(self, traits: Sequence[DrafterTraits]) -> None:
        expected = [1 - (1 - UNKNOWN) * MISSES_BELOW**each.level for each in traits]
        self.expertise = Expertise(len(traits), expected, EXPECTED_MATCHES)

    def begin(self, request: Request) -> None:
        super().begin(request)
        if request.plan is None:
            record = self.expertise.begin(self._domain_of[request.number])
            request.plan = ChainChoice(record=record)
        request.plan.timed_s = None

    def observed(self, request: Request, observation: Observation) -> None:
        super().observed(request, observation)
        found = {
            model: float(bool(offers) and offers[0][0] == observation.token)
            for model, offers in observation.offers.items()
        }
        self.expertise.observe(request.plan.record, found)
        self.measured.compare(observation.offers)

    def experience(self) -> tuple[Domains, Expertise, ChainRecords]:
        return self.domains, self.expertise, self.measured

    def take(self, experience: object) -> None:
        assert isinstance(experience, tuple)
        self.domains, self.expertise, self.measured = experience

    def state_dict(self) -> SpecRouterState:
        return SpecRouterState(**asdict(super().state_dict()), measured=self.measured.state_dict())

    def load_state_dict(self, state: Any) -> None:
        measured, count = state.measured, self.expertise.drafters
        named = {model for *pair, _ in measured.similar for model in pair}
        named.update(model for chain, *_ in measured.chains for model in chain)
        expect(named <= {*range(count)}, "measured", sorted(named), f"numbers of {count} models")
        super().load_state_dict(state)
        self.measured.load_state_dict(measured)

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
        is_seen = view.costs.is_known and all(view.turnaround_s[model] for model in there)
        is_due = tokens >= route.began + STAY_TOKENS or (route.is_blind and is_seen)
        if route.chain and not is_gone and not is_due:
            return
        found = self._predicted(view, request, there)
        if (
            route.chain in found
            and route.timed_s is not None
            and tokens > route.timed
            and view.now_s > route.timed_s
            and found[route.chain]
            and not route.is_blind
        ):
            self.measured.learn(
                route.chain, (view.now_s - route.timed_s) / (tokens - route.timed) / found[route.chain]
            )
        self._choose(
            view,
            request,
            {chain: self.measured.corrected(chain, seconds) for chain, seconds in found.items()},
            is_seen=is_seen,
        )
        route.began, route.timed_s = tokens, None

    def _choose(self, view: View, request: Request, seconds: Mapping[Chain, float], *, is_seen: bool) -> None:
        """The fastest chain, or the one that is there if it is about as fast, or one that is worth a try."""
        route: ChainChoice = request.plan
        was_trial = route.is_trial
        route.is_blind, route.is_trial = not is_seen, False
        if not seconds:
            if route.chain != PLAIN:
                self._change(view, request, PLAIN, "no model is there")
            return
        best = min(
            seconds, key=lambda chain: (seconds[chain], -len(chain), chain)
        )  # a judge that costs nothing may help
        if route.chain not in seconds:
            is_first = route.began == 0 and not route.chain
            self._change(
                view, request, best, "predicted to be the fastest" if is_first else "a model is gone"
            )
        elif (tried := self._worth_a_try(seconds, best)) is not None and tried != route.chain:
            route.is_trial = True
            self._change(view, request, tried, "a try")
        elif (1.0 if was_trial else GAIN) * seconds[best] < seconds[route.chain]:
            told = f"{duration(seconds[best])} a token, not {duration(seconds[route.chain])}"
            self._change(view, request, best, told)

    def _worth_a_try(self, seconds: Mapping[Chain, float], best: Chain) -> Chain | None:
        """The chain that it pays most to try, if one is expected to pay."""
        if not seconds[best]:
            return None
        gains = {
            chain: self.measured.gain(chain, each / seconds[best])
            for chain, each in seconds.items()
            if chain != best
        }
        tried = max(gains, key=gains.__getitem__, default=None)
        return tried if tried is not None and gains[tried] > 0 else None

    def _change(self, view: View, request: Request, chain: Chain, reason: str) -> None:
        request.plan.chain = chain
        request.plan.began = len(request.new_tokens)
        request.statistics.chains.append((len(request.new_tokens), view.now_s, chain, reason))

    def _predicted(self, view: View, request: Request, there: Sequence[int]) -> dict[Chain, float]:
        """Seconds for a token of each chain that comes into question, by the module's formula; of the models
        that are `there`.

        0 while the pipeline's times are not known.
        """
        turn_s = [
            known_s or (view.now_s - asked_s if asked_s is not None else 0.0)  # at its first job: no less
            for known_s, asked_s in zip(view.turnaround_s, view.asked_s, strict=True)
        ]

        def step_s(low: int, high: int) -> float:
            return turn_s[high] * (1 - min(SIMILARITY_MAX, self.measured.similarity(low, high)))

        route: ChainChoice = request.plan
        groups = by_level([traits.level for traits in view.traits], there)
        known = [chain for chain in (route.chain, *self.measured.times) if chain and set(chain) <= set(there)]
        worth = self.expertise.worth(route.record)
        trip_s = view.costs.trip_s(max(1, round(self._typical_rows)))
        return {
            chain: slowest_s(chain, turn_s, step_s) + (1 - max(worth[model] for model in chain)) * trip_s
            for chain in dict.fromkeys([*chains_to_try(groups, turn_s, step_s), *known])
        }
