"""Which drafters suit which request: learnt from exact matches, for each request and across requests for each
domain.

A drafter's expertise in a request is a mean of the chances that it gave to what came true: in that request,
shrunk towards what it was worth in all requests of the domain so far, and this towards all requests whatever.
Those under way count at once, so that users who ask the same kind of thing at the same time learn from each
other. Which domain a request is of is found in its prompt (`core.head.domains`).

A drafter that is new to a domain, or might be better by an upper confidence bound (docs/methods.md),
works beside those that were chosen for a few tokens, so that a trial costs an answer nothing but the
drafter's time. It is judged by these tokens alone, so by how much better it is there than the best of the
chosen: some tokens are harder than others. One that is being tried counts as if the trial were over: one
request tries it for all. Pure; knows no sockets and no models.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flowspec.core.head.learnt import Count, Learnt, Share
from flowspec.validation import Document, expect

SHARE_NEW = 0.06
"""Weight of the newest match in a request's moving average, once there have been some; the first ones count
as a plain mean."""
SHARE_DOMAIN = 0.01
"""The same in a domain's and in the overall one."""
UNKNOWN = 0.5
"""Expertise of a drafter of which nothing is known."""
OVERALL_MAX, TRUSTED_MAX = 4, 12
"""Matches that what is known of all requests, and of a domain, counts for at most beside a domain's own, and
a request's."""
EXPLORE = 0.5
"""Times the confidence bound, while few proposals of late came true; less, as more did. A match is worth 0 to
1, so a mean of a few is off by as much."""
TRIAL = 24
"""Matches that a drafter which works for a request counts for in advance; with fewer in a domain, one request
at a time tries it."""
STAY = 0.04
"""What another drafter must be worth more than one that has the request's text already."""


class DrafterScores(Learnt, kw_only=True):
    """What each drafter was worth, from how many matches: moving averages in which the newest weighs a
    `share` at least."""

    worth: list[Share]
    seen: list[Count]

    @staticmethod
    def empty(drafters: int) -> DrafterScores:
        return DrafterScores(worth=[UNKNOWN] * drafters, seen=[0] * drafters)

    def observe(self, drafter: int, chance: float, share: float) -> None:
        self.seen[drafter] += 1
        self.worth[drafter] += max(share, 1 / self.seen[drafter]) * (chance - self.worth[drafter])

    def beside(self, drafter: int, prior: float, weight: int, share: float) -> float:
        """A drafter's worth where something known beforehand counts for `weight` matches."""
        seen = min(self.seen[drafter], round(1 / share))
        return (weight * prior + seen * self.worth[drafter]) / (weight + seen)


class Domain(Learnt, kw_only=True):
    """What drafters were worth in the answers to prompts that are alike, of which so many ended."""

    scores: DrafterScores
    answers: Count


class ExpertiseState(Document, frozen=True, kw_only=True):
    overall: DrafterScores
    domains: list[Domain]


@dataclass(slots=True)
class RequestRecord:
    """What is known of the drafters from one request alone, the number of its domain, and who works for
    it."""

    domain: int
    scores: DrafterScores
    chosen: tuple[int, ...] = ()


class Expertise:
    """See the module. `domains` is the table that people are shown, by number; `working` is for how many
    requests of a domain a drafter works now. What is `expected` of each drafter beforehand counts for so many
    matches."""

    def __init__(self, drafters: int, expected: Sequence[float] = (), matches: int = 0) -> None:
        self.drafters = drafters
        self._overall = DrafterScores.empty(drafters)
        if expected:
            self._overall = DrafterScores(worth=list(expected), seen=[matches] * drafters)
        self.domains: list[Domain] = []
        self.working: Counter[tuple[int, int]] = Counter()

    def begin(self, domain: int) -> RequestRecord:
        """A new answer, to a prompt of this domain."""
        while len(self.domains) <= domain:
            self.domains.append(Domain(scores=DrafterScores.empty(self.drafters), answers=0))
        return RequestRecord(domain=domain, scores=DrafterScores.empty(self.drafters))

    def observe(self, record: RequestRecord, chances: Mapping[int, float]) -> None:
        """Drafters had given these chances to the token that came true (0: they had not proposed it)."""
        best = next((drafter for drafter in record.chosen if drafter in chances), None)
        for scores, share in (
            (record.scores, SHARE_NEW),
            (self.domains[record.domain].scores, SHARE_DOMAIN),
            (self._overall, SHARE_DOMAIN),
        ):
            usual = 0.0 if best is None or not scores.seen[best] else scores.worth[best] - chances[best]
            for drafter, chance in chances.items():
                is_compared = drafter != best and drafter in record.chosen
                scores.observe(drafter, min(1.0, max(0.0, chance + usual)) if is_compared else chance, share)

    def end(self, record: RequestRecord) -> None:
        """The answer is over: nobody works for it any more."""
        self.put(record, ())
        self.domains[record.domain].answers += 1

    def in_domain(self, domain: Domain) -> list[float]:
        """What each drafter is worth in a domain, from 0 to 1."""
        return [self._in_domain(domain, drafter) for drafter in range(self.drafters)]

    def _in_domain(self, domain: Domain, drafter: int) -> float:
        overall = self._overall
        weight = max(1, min(OVERALL_MAX, overall.seen[drafter]))
        return domain.scores.beside(drafter, overall.worth[drafter], weight, SHARE_DOMAIN)

    def worth(self, record: RequestRecord) -> list[float]:
        """What each drafter is worth in a request, from 0 to 1."""
        domain = self.domains[record.domain]
        weights = (max(1, min(TRUSTED_MAX, seen)) for seen in domain.scores.seen)
        return [
            record.scores.beside(drafter, self._in_domain(domain, drafter), weight, SHARE_NEW)
            for drafter, weight in enumerate(weights)
        ]

    def weights(self, record: RequestRecord) -> list[float]:
        """Each drafter's worth as a share of the best one's."""
        worth = self.worth(record)
        most = max(worth, default=0.0)
        return [each / most if most > 0 else 1.0 for each in worth]

    def choose(
        self,
        record: RequestRecord,
        count: int,
        among: Iterable[int],
        delays: Sequence[float],
        hoped: Sequence[float] = (),
    ) -> tuple[int, ...]:
        """The drafters that are to work for the request now: the `count` that suit it best, best first, and
        perhaps one on trial.

        `delays` is how long each takes for a level, in trips of the pipeline: a miss costs a trip, so this is
        the share of misses that a slower drafter must save. Who would be tried is taken to be as fast as is
        `hoped` (nothing: as its delay says).
        """
        before = record.chosen
        self.put(record, ())
        domain = self.domains[record.domain]
        gains = [
            worth - delay + STAY * (drafter in before)
            for drafter, (worth, delay) in enumerate(zip(self.worth(record), delays, strict=True))
        ]
        known = [
            min(OVERALL_MAX, overall) + seen + TRIAL * self.working[record.domain, drafter]
            for drafter, (overall, seen) in enumerate(
                zip(self._overall.seen, domain.scores.seen, strict=True)
            )
        ]
        eagerness = EXPLORE * (1 - max(self.worth(record), default=0.0)) * math.sqrt(math.log(1 + sum(known)))

        def bound(drafter: int) -> float:
            faster = delays[drafter] - hoped[drafter] if hoped else 0.0
            return gains[drafter] + faster + eagerness / math.sqrt(1 + known[drafter])

        order = sorted(
            among, key=lambda drafter: (not self._overall.seen[drafter], -gains[drafter], drafter)
        )  # the unknown are tried
        chosen = order[:count]
        others = (
            drafter
            for drafter in order[count:]
            if domain.scores.seen[drafter] >= TRIAL or not self.working[record.domain, drafter]
        )
        rival = max(
            others, key=lambda drafter: (domain.scores.seen[drafter] < TRIAL, bound(drafter)), default=None
        )
        if (
            rival is not None
            and chosen
            and (domain.scores.seen[rival] < TRIAL or bound(rival) > gains[chosen[-1]])
        ):
            chosen.append(rival)
        self.put(record, tuple(chosen))
        return record.chosen

    def put(self, record: RequestRecord, chosen: tuple[int, ...]) -> None:
        """These work for the request from now on."""
        self.working.subtract((record.domain, drafter) for drafter in record.chosen)
        self.working.update((record.domain, drafter) for drafter in chosen)
        record.chosen = chosen

    def state_dict(self) -> ExpertiseState:
        return ExpertiseState(overall=self._overall, domains=self.domains)

    def load_state_dict(self, state: ExpertiseState) -> None:
        tables = [state.overall, *(domain.scores for domain in state.domains)]
        counts = {len(column) for scores in tables for column in (scores.worth, scores.seen)}
        expect(counts == {self.drafters}, "expertise", f"those of {counts}", f"those of {self.drafters}")
        self._overall, self.domains = state.overall, state.domains
