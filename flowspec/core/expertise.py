"""Which drafters suit which request: learnt from exact matches, for each request and across requests for each domain.

A drafter's expertise in a request is a moving average of the chance that it gave to what came true, started from what it was worth in the
request's domain. Nobody says what a request is about, so domains are found: prompts that use the same tokens, of those that not every
prompt uses, belong together (leader clustering by the cosine of tf-idf vectors). A choice of drafters weighs expertise against
ignorance by an upper confidence bound (ALGORITHMS section 5). Pure; knows no sockets and no models.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

SHARE_NEW = 0.06
"""Weight of the newest match in a request's moving average, once there have been some; the first ones count as a plain mean."""
SHARE_DOMAIN = 0.2
"""Weight of the newest answer in a domain's."""
UNKNOWN = 0.5
"""Expertise of a drafter of which nothing is known."""
TRUSTED_MAX = 12
"""Matches that what is known of a domain counts for, at most, when a request begins."""
EXPLORE = 0.25
"""Times the confidence bound, while few proposals of late came true; less, as more did."""
BUCKETS = 4096
DOMAINS_MAX = 32
ALIKE = 0.25
"""Cosine from which on two prompts are taken to be about the same."""
EXAMPLE_TOKENS = 48
EVERYWHERE = 0.2
"""What keeps a word that all prompts use from counting for nothing: the same prompt twice is the same domain."""

Sketch = dict[int, float]


def sketch(tokens: Sequence[int]) -> Sketch:
    """What a text uses: log-weighted counts by bucket of token ids."""
    return {bucket: 1 + math.log(count) for bucket, count in Counter(token % BUCKETS for token in tokens).items()}


@dataclass(slots=True)
class Domain:
    """Prompts that are alike: the sum of their sketches, what each drafter was worth in the answers to them, and from how many matches.

    `example` is how the first of them ends.
    """

    example: tuple[int, ...]
    centre: Sketch
    worth: list[float]
    seen: list[int]
    answers: int = 0

    def add(self, found: Sketch) -> None:
        for bucket, weight in found.items():
            self.centre[bucket] = self.centre.get(bucket, 0.0) + weight


@dataclass(slots=True)
class Record:
    """What is known of the drafters in one request: `worth` of each, from so many matches (`seen`), and the number of its domain."""

    domain: int
    worth: list[float]
    seen: list[int]
    matched: list[int] = field(default_factory=list)
    """Matches in this request alone."""


class Expertise:
    """See the module. `domains` is the table that people are shown."""

    def __init__(self, drafters: int) -> None:
        self.drafters = drafters
        self._prompts = 0
        self._used: Counter[int] = Counter()  # prompts that use a bucket
        self.domains: list[Domain] = []

    def begin(self, prompt: Sequence[int]) -> Record:
        """A new answer: begins with what is known of its domain, or of all where it is a new one."""
        found = sketch(prompt)
        self._prompts += 1
        self._used.update(found.keys())
        best, likeness = max(
            ((at, self._likeness(domain.centre, found)) for at, domain in enumerate(self.domains)), key=_second, default=(-1, 0.0)
        )
        if best < 0 or (likeness < ALIKE and len(self.domains) < DOMAINS_MAX):
            self.domains.append(Domain(example=tuple(prompt[-EXAMPLE_TOKENS:]), centre={}, worth=self._overall(), seen=[0] * self.drafters))
            best = len(self.domains) - 1
        domain = self.domains[best]
        domain.add(found)
        return Record(
            domain=best, worth=list(domain.worth), seen=[min(TRUSTED_MAX, seen) for seen in domain.seen], matched=[0] * self.drafters
        )

    def _likeness(self, centre: Sketch, found: Sketch) -> float:
        """Their cosine, in which a bucket counts the less the more prompts use it, and little where only one does: it tells of no other."""
        rarity = {
            bucket: math.log((self._prompts + EVERYWHERE) / used) * math.log(1 + used)
            for bucket in (*centre, *found)
            for used in (self._used[bucket],)
        }
        dot = sum(weight * centre.get(bucket, 0.0) * rarity[bucket] ** 2 for bucket, weight in found.items())
        squares = [sum((weight * rarity[bucket]) ** 2 for bucket, weight in each.items()) for each in (centre, found)]
        return dot / math.sqrt(squares[0] * squares[1]) if min(squares) > 0 else 0.0

    def _overall(self) -> list[float]:
        """What each drafter was worth in all answers so far."""
        answers = sum(domain.answers for domain in self.domains)
        if not answers:
            return [UNKNOWN] * self.drafters
        return [sum(domain.answers * domain.worth[drafter] for domain in self.domains) / answers for drafter in range(self.drafters)]

    def observe(self, record: Record, drafter: int, chance: float) -> None:
        """A drafter had given `chance` to the token that came true (0: it had not proposed it)."""
        record.seen[drafter] += 1
        record.matched[drafter] += 1
        share = max(SHARE_NEW, 1 / (1 + record.seen[drafter]))
        record.worth[drafter] += share * (chance - record.worth[drafter])

    def end(self, record: Record) -> None:
        """The answer is over: its domain learns from what was seen."""
        domain = self.domains[record.domain]
        domain.answers += 1
        for drafter, (worth, matched) in enumerate(zip(record.worth, record.matched, strict=True)):
            if matched:
                share = max(SHARE_DOMAIN, matched / (matched + domain.seen[drafter]))
                domain.worth[drafter] += share * (worth - domain.worth[drafter])
                domain.seen[drafter] += matched

    def weights(self, record: Record) -> list[float]:
        """Each drafter's worth as a share of the best one's."""
        most = max(record.worth, default=0.0)
        return [worth / most if most > 0 else 1.0 for worth in record.worth]

    def choose(self, record: Record, count: int, among: Iterable[int], delays: Sequence[float]) -> tuple[int, ...]:
        """The `count` drafters that suit the request best, or of which too little is known; best first.

        `delays` is how long each takes for a level, in trips of the pipeline: a miss costs a trip, so this is the share of misses that a
        slower drafter must save.
        """
        total = 1 + sum(record.seen)
        eagerness = EXPLORE * (1 - max(record.worth, default=0.0))

        def bound(drafter: int) -> float:
            return record.worth[drafter] - delays[drafter] + eagerness * math.sqrt(math.log(total) / (1 + record.seen[drafter]))

        return tuple(sorted(among, key=lambda drafter: (-bound(drafter), drafter))[:count])


def _second(pair: tuple[int, float]) -> float:
    return pair[1]
