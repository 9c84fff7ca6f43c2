"""How many drafters should work for a request: what one more finds, beside how much it slows the others down.

Drafters that share a board wait for each other, and so does a token for the drafting of its level; what one
more drafter finds of those that the others missed saves a trip of the pipeline. So one more pays while

    level(n + 1) - level(n) < gain(n) trip

with `level(n)` the time that a level takes where n drafters work for each request, and `gain(n)` the share of
tokens that are among the best few of what n + 1 propose and not of what n do. Both are measured; what is not
known yet is tried, ever more seldom as it does not pay. (CoSine goes by the ratio of drafting time to
verification time; in a pipeline that is full a level that comes late costs before that.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from msgspec import Meta

from flowspec.core.head.fusion import Offers
from flowspec.core.head.learnt import Count, Learnt, Number
from flowspec.validation import expect

FEW = 3
"""Proposals below a node that are likely to be sent."""
SHARE_NEW = 0.02
"""Weight of the newest token in what one more drafter finds; the first ones count as a plain mean."""
SHARE_NEW_LEVEL = 0.3
STAY_TOKENS = 24
"""Tokens of an answer between two decisions."""
SETTLING_TOKENS = 12
"""The first of them still owe to the number before."""
TRIAL_AFTER_MIN, TRIAL_AFTER_MAX = 32, 1024
"""Tokens until one more drafter is tried again, each time twice as many."""
MARGIN = 0.9
"""As a share of what it saves, what one more drafter may cost to be taken in."""


class TeamSize(Learnt, kw_only=True):
    """See the module. `size` is how many drafters work for each request now, `tokens` how many an answer has
    got since. Of `gains` and what was `seen` there is one for each drafter, of `levels_s` one for each size.
    """

    size: Annotated[int, Meta(ge=1)]
    gains: list[Annotated[float, Meta(ge=-1, le=1)]]
    seen: list[Count]
    levels_s: list[Number]
    tokens: Number
    decide_at: Number
    trial_at: Number
    trial_after: Annotated[int, Meta(ge=TRIAL_AFTER_MIN, le=TRIAL_AFTER_MAX)]

    @staticmethod
    def of(most: int) -> TeamSize:
        return TeamSize(
            size=1,
            gains=[0.0] * most,
            seen=[0] * most,
            levels_s=[0.0] * (most + 1),
            tokens=0.0,
            decide_at=STAY_TOKENS,
            trial_at=TRIAL_AFTER_MIN,
            trial_after=TRIAL_AFTER_MIN,
        )

    def __post_init__(self) -> None:
        most = len(self.gains)
        expect(self.size <= max(1, most), "size", self.size, f"at most {most}")
        is_whole = (len(self.seen), len(self.levels_s)) == (most, most + 1)
        expect(is_whole, "gains", f"{most} of them", "as many as numbers of what was seen")

    def observe(self, team: Sequence[int], offers: Mapping[int, Offers], token: int) -> None:
        """A token became known for which a team, best drafter first, had made these offers."""
        doubts: dict[int, float] = {}
        was_found = False
        for size, drafter in enumerate(team[: len(self.gains)]):
            for proposed, confidence in offers.get(drafter, ()):
                doubts[proposed] = doubts.get(proposed, 1.0) * (1 - confidence)
            is_found = token in sorted(doubts, key=doubts.__getitem__)[:FEW]
            if size > 0:
                self.seen[size] += 1
                self.gains[size] += max(SHARE_NEW, 1 / self.seen[size]) * (
                    is_found - was_found - self.gains[size]
                )
            was_found = is_found

    def look(self, level_s: float, trip_s: float) -> None:
        """Decides anew where that is due; a level takes `level_s` with the present teams."""
        if self.tokens < self.decide_at - STAY_TOKENS + SETTLING_TOKENS:
            return
        before_s = self.levels_s[self.size]
        self.levels_s[self.size] = before_s + SHARE_NEW_LEVEL * (level_s - before_s) if before_s else level_s
        if self.tokens < self.decide_at:
            return
        self.decide_at = self.tokens + STAY_TOKENS
        more = self.size + 1
        if self.size > 1 and self._costs_s(self.size) >= self.gains[self.size - 1] * trip_s:
            self.size -= 1
        elif more > len(self.gains):
            return
        elif self.levels_s[more] and self._costs_s(more) < MARGIN * self.gains[self.size] * trip_s:
            self.size = more
        elif self.tokens >= self.trial_at:
            self.size = more
            self.trial_after = min(2 * self.trial_after, TRIAL_AFTER_MAX)
            self.trial_at = self.tokens + self.trial_after

    def _costs_s(self, size: int) -> float:
        """What the last of so many drafters adds to a level."""
        return max(0.0, self.levels_s[size] - self.levels_s[size - 1])
