"""The least time in which an answer could have come: the schedule of an oracle that has the guesses of a
recorded answer, and no others.

The oracle knows the answer, and so which guesses are right. It sends the answer's tokens in order, as many in
a segment and whenever it likes, and never a wrong one; a token that the drafter said and the method never
believed is as good as any. It is told of verdicts the moment they are at the head, and nothing but segments
takes the stations' time. What it may not do:

- *Send what is not there.* A token is there when it is known (the segment that carried the token before it is
  back), or from when it is guessed. A token that nobody guessed before it was known costs it a trip, too.
- *Guess otherwise.* The drafter is asked for a guess as long as in the recorded answer after what that may
  have waited for: the token before it being there, or a verdict that came between. Of these the oracle has
  the one that is earliest in its own time (a verdict never before the token that the guess is below). The
  pass then takes as long as it did. So the drafter makes up no time by leaving out wrong branches; but where
  it was asked because of a verdict, it is asked earlier if the verdict is.
- *Change costs.* A station (a stage, a link, the head) carries segments one by one, in the order in which
  they were sent, and takes as long for so many rows as it does.

No schedule with those guesses is faster than what `earliest_s` computes. Let `here(k)` and `known(k)` be when
token k is there and known in some schedule, `through(s, k)` when station s is through with the segment that
carries it. By induction over k all three are no earlier than what is computed:

1. `here(k)` is the earlier of `known(k)` and of sums and minima of earlier ones, and grows with each.
2. Tokens are sent in order, since none runs before the one that it follows. So a segment with token k carries
   the last n of the first k for some n, and perhaps later ones, which only add time. It was sent when token k
   was there at the earliest, so it is at station s after `here(k)` and what n rows take until there. And s is
   through with the first k - n before it begins. So `through(s, k)` is at least the later of the two and what
   n rows take at s; the least of this over n is what is computed.
3. `known(k + 1)` is at least that and what n rows take from s to the head, for every s. So the greatest over
   all s of the least over n is a bound, too.

The recorded answer is one of these schedules, at costs that waits and wrong rows only raise. The bound may be
lower than what any schedule reaches: each token is given the best schedule for itself, and each station is
taken to be the only one where segments wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenToken:
    """A token of an answer, by the head's clock: when it was `known`, when it was `here` as a guess, when the
    drafter was `asked` for that, and when it was `sent`. One that was not guessed before it was known was
    here when it was known, and nobody was asked. Nothing follows the last one, so that it may be not sent.

    `rank` is its place, from 1, among the guesses of whoever said it first before it was known; a drafter
    `has_spoken` if by then one had said what may come there, this token or others."""

    known_s: float
    here_s: float
    asked_s: float | None = None
    sent_s: float | None = None
    rank: int | None = None
    has_spoken: bool = False

    @property
    def is_guessed(self) -> bool:
        return self.here_s < self.known_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Station:
    """What carries one segment at a time, for so many seconds by its rows, and then hands it on `delay_s`
    later. `stage` is its number where it is one."""

    busy_s: Callable[[int], float]
    delay_s: float = 0.0
    stage: int | None = None


def earliest_s(
    tokens: Sequence[SeenToken], stations: Sequence[Station], free_s: Sequence[float]
) -> list[float]:
    """When an oracle knows each of an answer's tokens, at the earliest.

    The first one it knows when that was known: it comes of the prompt, with which each of the `stations`, in
    their order from the head and back to it, is busy until `free_s`.
    """
    count = len(tokens) - 1
    before_s, busy_s, after_s = _costs(stations, count)
    through_s = np.empty((len(stations), count + 1))
    through_s[:, 0] = free_s
    known_s, here_s = [tokens[0].known_s], list[float]()
    for sent in range(1, count + 1):  # the first so many tokens, of which the last n are in the last segment
        here_s.append(_here_s(tokens, known_s, here_s))
        begins_s = np.maximum(through_s[:, :sent][:, ::-1], here_s[-1] + before_s[:, :sent])
        ends_s = begins_s + busy_s[:, :sent]
        through_s[:, sent] = ends_s.min(axis=1)
        back_s = float((ends_s + after_s[:, :sent]).min(axis=1).max())
        known_s.append(max(back_s, known_s[-1]))
    return known_s


def _costs(stations: Sequence[Station], most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Seconds of 1 to `most` rows before, at, and after each station, `[stations, rows]`. Where more rows are
    quicker, fewer are taken to be as quick."""
    busy_s = np.array([[each.busy_s(rows) for rows in range(1, most + 1)] for each in stations])
    busy_s = np.minimum.accumulate(busy_s[:, ::-1], axis=1)[:, ::-1]
    passed_s = np.cumsum(busy_s + np.array([[each.delay_s] for each in stations]), axis=0)
    before_s = np.vstack([np.zeros((1, most)), passed_s[:-1]])
    return before_s, busy_s, passed_s[-1] - before_s - busy_s


def _here_s(tokens: Sequence[SeenToken], known_s: Sequence[float], here_s: Sequence[float]) -> float:
    """When the next token is there: `known_s` are those that are known up to it, `here_s` those before it."""
    at = len(here_s)
    token = tokens[at]
    if not token.is_guessed:
        return known_s[at]
    if at == 0:  # nothing before it is earlier than it was
        return token.here_s
    asked_s = token.here_s if token.asked_s is None else token.asked_s
    parent = tokens[at - 1]
    asked_here_s = here_s[-1] + asked_s - parent.here_s
    for verdict in range(at - 1, -1, -1):
        if tokens[verdict].known_s < parent.here_s:
            break  # the token before was there later, and is what the guess waited for
        if tokens[verdict].known_s <= asked_s:
            after_s = max(here_s[-1], known_s[verdict]) + asked_s - tokens[verdict].known_s
            asked_here_s = min(asked_here_s, after_s)
    return min(known_s[at], asked_here_s + token.here_s - asked_s)
