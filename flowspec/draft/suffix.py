"""Drafters without a model: what followed the end of a path where it occurred before, in the request itself,
or in others, too (SuffixDecoding, arXiv 2411.04975).

The chance of a guess is estimated from frequencies at all lengths of agreement, of which longer ones count
more. The tree of guesses is the head's: it grows best-first by the product of these chances, calibrated by
what came true, so a long agreement, which is a sure one, is followed far, and a short one is not. That is the
paper's greedy tree with its bound by the length of the agreement.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowspec.draft.suffix_index import Match, SuffixIndex
from flowspec.draft.text import TextProposer

STRENGTHS = (8.0, 6.0, 4.0, 4.0, 4.0, 3.0)
"""By length of agreement from 1, the last for all longer ones: how many places the confidence by shorter
agreement weighs. Fitted on stories, code and plays."""
DEPTH = 32
"""Tokens over which agreement is followed."""
MATCHES_MAX = 32
"""Places that one look-up visits, those that agree longest."""
PLACES_MAX = 1 << 17
"""Tokens that are remembered: 12 MiB or so."""


def new_index() -> SuffixIndex:
    return SuffixIndex(DEPTH, PLACES_MAX)


class SuffixProposer(TextProposer):
    """A request's text in an index: one of its own, which forgets what is cut off, or one that is `shared`,
    which remembers all that was ever in any text."""

    def __init__(self, shared: SuffixIndex | None = None) -> None:
        super().__init__()
        self._forgets = shared is None
        self._index = new_index() if shared is None else shared
        self._text = self._index.begin()

    def append(self, token: int) -> None:
        super().append(token)
        self._index.append(self._text, token)

    def cut(self, length: int) -> None:
        is_shorter = length < len(self.tokens)
        super().cut(length)
        if self._forgets:
            self._index.cut(self._text, length)
        elif is_shorter:
            self._text = self._index.begin(self.tokens)

    def propose(self, branch: Sequence[int], width: int) -> Sequence[tuple[int, float]]:
        end = (*self.tokens[-DEPTH:], *branch)[-DEPTH:]
        return ranked(self._index.matches(end, MATCHES_MAX))[:width]


def ranked(matches: Sequence[Match]) -> list[tuple[int, float]]:
    """The tokens that follow in matches (longest first), likeliest first, with the confidence in each.

    At length n a token's is `(count + strength * shorter) / (places + strength)` over the places that agree
    in n tokens or more, `shorter` its confidence at length n - 1. Among equals, the longest match goes first.
    """
    counts: dict[int, int] = {}
    for match in matches:
        counts[match.token] = counts.get(match.token, 0) + 1
    shares = dict.fromkeys(counts, 0.0)
    below = 0
    for places in range(len(matches), 0, -1):
        length = matches[places - 1].length
        if length > below:
            doubt = 1.0  # of these lengths together: all have the same places
            for strength in _strengths(below, length):
                doubt *= strength / (places + strength)
            for token, count in counts.items():
                shares[token] = doubt * shares[token] + (1 - doubt) * count / places
            below = length
        counts[matches[places - 1].token] -= 1
    return sorted(shares.items(), key=lambda entry: -entry[1])


def _strengths(first: int, end: int) -> Sequence[float]:
    """Those of lengths `first` + 1 to `end`."""
    return [STRENGTHS[min(at, len(STRENGTHS) - 1)] for at in range(first, end)]
