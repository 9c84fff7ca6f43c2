"""The n-gram drafter, prompt look-up: what followed the last tokens where they occurred before, in the prompt
or the answer.

It has no model and costs next to nothing. All of a request's committed tokens are indexed as they come: for
each pair of tokens, and each single one, the newest place where it occurred, and for each place the one
before it. A look-up walks the newest of these places and measures how far back each agrees with the text, so
one small index serves all lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Open, Part, Proposal, Release, Segment
from flowspec.core.stage.path import living_below, newly_committed
from flowspec.errors import PeerError

if TYPE_CHECKING:
    import torch

STRENGTHS = (8.0, 6.0, 4.0, 4.0, 4.0, 3.0, 3.0, 3.0)
"""By length of agreement from 1: how many places the confidence by shorter agreement weighs. Fitted on
stories, code and plays."""
MATCH_MAX = len(STRENGTHS)
PLACES_MAX = 64
"""Newest places that one look-up visits, for pairs and for single tokens."""


class Text:
    """A text that grows at its end and can be cut, and where its tokens and pairs occurred."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._newest: dict[int, int] = {}  # pair or token -> its newest place, that of the last token
        self._older_pair: list[int] = []  # place -> the next older one of the same pair, -1
        self._older_token: list[int] = []  # the same for single tokens

    def append(self, token: int) -> None:
        place = len(self.tokens)
        self.tokens.append(token)
        for key, older in zip(self._keys(place), (self._older_token, self._older_pair), strict=True):
            older.append(self._newest.get(key, -1))
            self._newest[key] = place

    def cut(self, length: int) -> None:
        """Forgets the tokens from position `length` on."""
        while len(self.tokens) > length:
            place = len(self.tokens) - 1
            for key, older in zip(self._keys(place), (self._older_token, self._older_pair), strict=True):
                before = older.pop()
                if before < 0:
                    del self._newest[key]
                else:
                    self._newest[key] = before
            self.tokens.pop()

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


@dataclass(slots=True)
class _Request:
    """One request. `text` is the committed path as far as its tokens are known without a gap, `ahead` is
    known beyond one.

    `nodes` holds parent and token of the root and the living nodes below it; `early` are committed nodes
    still to come.
    """

    opening: Open
    text: Text
    length: int
    root: int
    nodes: dict[int, tuple[int, int]] = field(default_factory=dict)
    ahead: dict[int, int] = field(default_factory=dict)
    early: set[int] = field(default_factory=set)

    def learn(self, part: Part) -> None:
        """Takes the part's Commit: what is on the path, and what lives below its end."""
        fresh = newly_committed(part.commit, self.length)
        if not fresh:
            return
        for position, node in enumerate(fresh, self.length):
            if node in self.nodes:
                self.ahead[position] = self.nodes[node][1]
            else:
                self.early.add(node)
        self.length, self.root = part.commit.length, fresh[-1]
        living = living_below(self.root, ((node, parent) for node, (parent, _) in self.nodes.items()))
        self.nodes = {node: known for node, known in self.nodes.items() if node in living}

    def admit(self, part: Part) -> list[int]:
        """Takes the part's rows; returns those that may be expanded."""
        found = []
        for node, parent, token, position, is_flagged in zip(
            part.ids, part.parents, part.tokens, part.positions, part.committed, strict=True
        ):
            is_committed = is_flagged or node in self.early or node == self.root
            if is_committed:
                self.ahead[position] = token
                self.early.discard(node)
            if node == self.root or (not is_committed and parent in self.nodes):
                self.nodes[node] = (parent, token)
                found.append(node)
        while (token_ahead := self.ahead.pop(len(self.text.tokens), None)) is not None:
            self.text.append(token_ahead)
        return found

    def end_at(self, node: int) -> list[int]:
        """The last tokens up to a node, or none while the path has a gap."""
        if len(self.text.tokens) < self.length:
            return []
        branch: list[int] = []
        while node != self.root and len(branch) < MATCH_MAX:
            node, token = self.nodes[node]
            branch.append(token)
        first = max(0, len(self.text.tokens) - MATCH_MAX + len(branch))
        return self.text.tokens[first:] + branch[::-1]


class NgramDrafter:
    """A `Drafter`; see the module."""

    captures: tuple[int, ...] = ()
    weight_bytes = 0
    cache_slots = limits.ID_MAX  # texts, and no keys and values

    def __init__(self, context: int = limits.CONTEXT_MAX) -> None:
        self.context = context
        self._requests: dict[int, _Request] = {}

    def draft(self, segment: Segment, width: int) -> tuple[Proposal, ...]:
        """Up to `width` children for every root or uncommitted row that lives; none where nothing like it
        occurred before."""
        proposals = []
        for part in segment.parts:
            number, epoch = part.commit.request, part.commit.epoch
            if part.opening is not None:
                self._open(part.opening)
            request = self._requests.get(number)
            if request is None or request.opening.epoch != epoch:
                continue
            request.learn(part)
            for node in request.admit(part):
                end = request.end_at(node)
                found = request.text.followers(end, width) if end else []
                tokens, confidences = tuple(token for token, _ in found), tuple(share for _, share in found)
                proposals.append(
                    Proposal(request=number, epoch=epoch, node=node, tokens=tokens, confidences=confidences)
                )
        return tuple(proposals)

    def release(self, message: Release) -> None:
        """Forgets a request."""
        self._requests.pop(message.request, None)

    def take_features(self, request: int, epoch: int, ids: Sequence[int], features: torch.Tensor) -> None:
        raise AssertionError("features came for a drafter that wants none")

    def _open(self, opening: Open) -> None:
        known = self._requests.get(opening.request)
        if known is None and opening.keep:
            raise PeerError(
                f"request {opening.request} keeps {opening.keep} tokens, but nothing of it is held here"
            )
        if known is not None and opening.epoch <= known.opening.epoch:
            return
        text = Text() if known is None else known.text
        text.cut(opening.keep)
        self._requests[opening.request] = _Request(opening, text, opening.length, opening.root)
