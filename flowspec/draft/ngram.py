"""The n-gram drafter, prompt look-up: what followed the last tokens where they occurred before, in the prompt
or the answer.

It has no model and costs next to nothing. All of a request's committed tokens are indexed as they come: for
each pair of tokens, and each single one, the newest place where it occurred, and for each place the one
before it. A look-up walks the newest of these places and measures how far back each agrees with the text, so
one small index serves all lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowspec.core.protocol import limits
from flowspec.draft.text import TextProposer

STRENGTHS = (8.0, 6.0, 4.0, 4.0, 4.0, 3.0, 3.0, 3.0)
"""By length of agreement from 1: how many places the confidence by shorter agreement weighs. Fitted on
stories, code and plays."""
MATCH_MAX = len(STRENGTHS)
PLACES_MAX = 64
"""Newest places that one look-up visits, for pairs and for single tokens."""


class NgramProposer(TextProposer):
    """A text, and where its tokens and pairs occurred."""

    def __init__(self) -> None:
        super().__init__()
        self._newest: dict[int, int] = {}  # pair or token -> its newest place, that of the last token
        self._older_pair: list[int] = []  # place -> the next older one of the same pair, -1
        self._older_token: list[int] = []  # the same for single tokens

    def append(self, token: int) -> None:
        place = len(self.tokens)
        super().append(token)
        for key, older in zip(self._keys(place), (self._older_token, self._older_pair), strict=True):
            older.append(self._newest.get(key, -1))
            self._newest[key] = place

    def cut(self, length: int) -> None:
        while len(self.tokens) > length:
            place = len(self.tokens) - 1
            for key, older in zip(self._keys(place), (self._older_token, self._older_pair), strict=True):
                before = older.pop()
                if before < 0:
                    del self._newest[key]
                else:
                    self._newest[key] = before
            self.tokens.pop()

    def propose(self, branch: Sequence[int], width: int) -> Sequence[tuple[int, float]]:
        return self.followers((*self.tokens[-MATCH_MAX:], *branch)[-MATCH_MAX:], width)

    def followers(self, end: Sequence[int], width: int) -> list[tuple[int, float]]:
        """Up to `width` tokens that may follow `end` (the newest token last), likeliest first, with the
        confidence in each.

        Blends all lengths of agreement: at length n, `(count + strength * shorter) / (places + strength)`,
        where `shorter` is the token's confidence by shorter agreement.
        """
        seen: list[dict[int, int]] = [
            {} for _ in range(MATCH_MAX + 1)
        ]  # by length of agreement: tokens that followed, and how often
        tokens, last = self.tokens, len(end) - 1
        for place in self._places(end[last], self._older_token):
            token = tokens[place + 1]
            seen[1][token] = seen[1].get(token, 0) + 1
        for place in self._places(_pair(end[last - 1], end[last]), self._older_pair) if last else ():
            longest, length, token = min(len(end), MATCH_MAX, place + 1), 2, tokens[place + 1]
            while length < longest and tokens[place - length] == end[last - length]:
                length += 1
            for followed in seen[2 : length + 1]:
                followed[token] = followed.get(token, 0) + 1
        shares: dict[int, float] = {}
        for followed, strength in zip(seen[1:], STRENGTHS, strict=True):
            if not followed:
                break
            whole = sum(followed.values()) + strength
            shares = {token: share * strength / whole for token, share in shares.items()}
            for token, count in followed.items():
                shares[token] = shares.get(token, 0.0) + count / whole
        return sorted(shares.items(), key=lambda entry: -entry[1])[:width]

    def _places(self, key: int, older: list[int]) -> list[int]:
        """The newest places of a pair or token, all but the text's end, which nothing follows yet."""
        found: list[int] = []
        place = self._newest.get(key, -1)
        while place >= 0 and len(found) < PLACES_MAX:
            if place + 1 < len(self.tokens):
                found.append(place)
            place = older[place]
        return found

    def _keys(self, place: int) -> tuple[int, int]:
        """The keys under which a place is found: its token, and the pair that ends there."""
        token = self.tokens[place]
        return token, _pair(self.tokens[place - 1] if place else limits.VOCABULARY_MAX + 1, token)


def _pair(first: int, second: int) -> int:
    """One number for two tokens, above all single ones."""
    return (first + 1) * 2 * limits.VOCABULARY_MAX + second
