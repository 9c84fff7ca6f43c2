"""Which drafters suit which request: learnt from exact matches, for each request and across requests for each
domain.

A drafter's expertise in a request is a mean of the chances that it gave to what came true: in that request,
shrunk towards what it was worth in all requests of the domain so far, and this towards all requests whatever.
Those under way count at once, so that users who ask the same kind of thing at the same time learn from each
other. Nobody says what a request is about, so domains are found: prompts that use the same tokens, of those
that not every prompt uses, belong together (leader clustering by the cosine of tf-idf vectors).

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
from typing import Any

from flowspec.core.head.kept import COUNT_MAX, Kept

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
BUCKETS = 4096
DOMAINS_MAX = 32
ALIKE = 0.25
"""Cosine from which on two prompts are taken to be about the same."""
EXAMPLE_TOKENS = 48
KEPT_BUCKETS = 256
"""Of a domain between runs, the heaviest: by these it is known again."""
EVERYWHERE = 0.2
"""What keeps a word that all prompts use from counting for nothing: the same prompt twice is the same domain.
"""

Sketch = dict[int, float]


def sketch(tokens: Sequence[int]) -> Sketch:
    """What a text uses: log-weighted counts by bucket of token ids."""
    return {
        bucket: 1 + math.log(count) for bucket, count in Counter(token % BUCKETS for token in tokens).items()
    }


@dataclass(slots=True)
class DrafterScores:
    """What each drafter was worth, from how many matches: moving averages in which the newest weighs `share`
    at least."""

    worth: list[float]
    seen: list[int]
    share: float

    @staticmethod
    def empty(drafters: int, share: float) -> DrafterScores:
        return DrafterScores([UNKNOWN] * drafters, [0] * drafters, share)

    def observe(self, drafter: int, chance: float) -> None:
        self.seen[drafter] += 1
        self.worth[drafter] += max(self.share, 1 / self.seen[drafter]) * (chance - self.worth[drafter])

    def kept(self) -> dict[str, Any]:
        return {"worth": self.worth, "seen": self.seen}

    def recall(self, kept: Kept) -> None:
        """Raises `ValueError`."""
        worth = kept["worth"].numbers(len(self.worth), most=1.0)
        self.worth, self.seen = worth, kept["seen"].wholes(len(self.seen))

    def beside(self, drafter: int, prior: float, weight: int) -> float:
        """A drafter's worth where something known beforehand counts for `weight` matches."""
        seen = min(self.seen[drafter], round(1 / self.share))
        return (weight * prior + seen * self.worth[drafter]) / (weight + seen)


@dataclass(slots=True)
class Domain:
    """Prompts that are alike: the sum of their sketches, and what drafters were worth in the answers to them,
    of which so many ended.

    `example` is how the first of them in this run ends, `working` how many requests each drafter works for
    now.
    """

    example: tuple[int, ...]
    centre: Sketch
    scores: DrafterScores
    working: list[int]
    answers: int = 0

    def add(self, found: Sketch) -> None:
        for bucket, weight in found.items():
            self.centre[bucket] = self.centre.get(bucket, 0.0) + weight


@dataclass(slots=True)
class RequestRecord:
    """What is known of the drafters from one request alone, the number of its domain, and who works for
    it."""

    domain: int
    scores: DrafterScores
    chosen: tuple[int, ...] = ()


class Expertise:
    """See the module. `domains` is the table that people are shown. What is `expected` of each drafter
    beforehand counts for so many matches."""

    def __init__(self, drafters: int, expected: Sequence[float] = (), matches: int = 0) -> None:
        self.drafters = drafters
        self._prompts = 0
        self._used: Counter[int] = Counter()  # prompts that use a bucket
        self._overall = DrafterScores.empty(drafters, SHARE_DOMAIN)
        if expected:
            self._overall = DrafterScores(list(expected), [matches] * drafters, SHARE_DOMAIN)
        self.domains: list[Domain] = []

    def begin(self, prompt: Sequence[int]) -> RequestRecord:
        """A new answer, which belongs to the domain most like it or to a new one."""
        found = sketch(prompt)
        self._prompts += 1
        self._used.update(found.keys())
        best, likeness = max(
            ((at, self._likeness(domain.centre, found)) for at, domain in enumerate(self.domains)),
            key=_second,
            default=(-1, 0.0),
        )
        if best < 0 or (likeness < ALIKE and len(self.domains) < DOMAINS_MAX):
            scores = DrafterScores.empty(self.drafters, SHARE_DOMAIN)
            self.domains.append(
                Domain(
                    example=tuple(prompt[-EXAMPLE_TOKENS:]),
                    centre={},
                    scores=scores,
                    working=[0] * self.drafters,
                )
            )
            best = len(self.domains) - 1
        domain = self.domains[best]
        domain.add(found)
        domain.example = domain.example or tuple(prompt[-EXAMPLE_TOKENS:])
        return RequestRecord(domain=best, scores=DrafterScores.empty(self.drafters, SHARE_NEW))

    def _likeness(self, centre: Sketch, found: Sketch) -> float:
        """Their cosine, in which a bucket counts the less the more prompts use it, and little where only one
        does: it tells of no other."""
        rarity = {
            bucket: math.log((self._prompts + EVERYWHERE) / used) * math.log(1 + used)
            for bucket in (*centre, *found)
            for used in (self._used[bucket],)
        }
        dot = sum(weight * centre.get(bucket, 0.0) * rarity[bucket] ** 2 for bucket, weight in found.items())
        squares = [
            sum((weight * rarity[bucket]) ** 2 for bucket, weight in each.items()) for each in (centre, found)
        ]
        return dot / math.sqrt(squares[0] * squares[1]) if min(squares) > 0 else 0.0

    def observe(self, record: RequestRecord, chances: Mapping[int, float]) -> None:
        """Drafters had given these chances to the token that came true (0: they had not proposed it)."""
        best = next((drafter for drafter in record.chosen if drafter in chances), None)
        for scores in (record.scores, self.domains[record.domain].scores, self._overall):
            usual = 0.0 if best is None or not scores.seen[best] else scores.worth[best] - chances[best]
            for drafter, chance in chances.items():
                is_compared = drafter != best and drafter in record.chosen
                scores.observe(drafter, min(1.0, max(0.0, chance + usual)) if is_compared else chance)

    def end(self, record: RequestRecord) -> None:
        """The answer is over: nobody works for it any more."""
        self.put(record, ())
        self.domains[record.domain].answers += 1

    def in_domain(self, domain: Domain) -> list[float]:
        """What each drafter is worth in a domain, from 0 to 1."""
        return [self._in_domain(domain, drafter) for drafter in range(self.drafters)]

    def _in_domain(self, domain: Domain, drafter: int) -> float:
        overall = self._overall
        return domain.scores.beside(
            drafter, overall.worth[drafter], max(1, min(OVERALL_MAX, overall.seen[drafter]))
        )

    def worth(self, record: RequestRecord) -> list[float]:
        """What each drafter is worth in a request, from 0 to 1."""
        domain = self.domains[record.domain]
        weights = (max(1, min(TRUSTED_MAX, seen)) for seen in domain.scores.seen)
        return [
            record.scores.beside(drafter, self._in_domain(domain, drafter), weight)
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
            min(OVERALL_MAX, overall) + seen + TRIAL * working
            for overall, seen, working in zip(
                self._overall.seen, domain.scores.seen, domain.working, strict=True
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
            if domain.scores.seen[drafter] >= TRIAL or not domain.working[drafter]
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
        working = self.domains[record.domain].working
        for drafter in record.chosen:
            working[drafter] -= 1
        for drafter in chosen:
            working[drafter] += 1
        record.chosen = chosen

    def kept(self) -> dict[str, Any]:
        """Of prompts no text, but which buckets they use."""
        domains = []
        for domain in self.domains:
            heaviest = sorted(domain.centre, key=lambda bucket: (-domain.centre[bucket], bucket))[
                :KEPT_BUCKETS
            ]
            words = [[bucket, domain.centre[bucket], self._used[bucket]] for bucket in heaviest]
            domains.append({"answers": domain.answers, **domain.scores.kept(), "words": words})
        return {"prompts": self._prompts, "overall": self._overall.kept(), "domains": domains}

    def recall(self, kept: Kept) -> None:
        """Raises `ValueError`."""
        prompts = kept["prompts"].whole()
        overall = DrafterScores.empty(self.drafters, SHARE_DOMAIN)
        overall.recall(kept["overall"])
        used: Counter[int] = Counter()
        domains = []
        for found in kept["domains"].each(most=DOMAINS_MAX):
            scores = DrafterScores.empty(self.drafters, SHARE_DOMAIN)
            scores.recall(found)
            centre: Sketch = {}
            for word in found["words"].each(most=KEPT_BUCKETS):
                bucket = word[0].whole(0, BUCKETS - 1)
                centre[bucket] = word[1].number(most=COUNT_MAX)
                used[bucket] = word[2].whole(1, max(1, prompts))
            domains.append(
                Domain(
                    example=(),
                    centre=centre,
                    scores=scores,
                    working=[0] * self.drafters,
                    answers=found["answers"].whole(),
                )
            )
        self._prompts, self._overall, self._used, self.domains = prompts, overall, used, domains


def _second(pair: tuple[int, float]) -> float:
    return pair[1]
