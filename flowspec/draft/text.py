"""What every drafter shares that has no cache: it proposes by the text alone.

A drafter is a `TextProposer`, which says what may follow. Which tokens are the text, which nodes live below
it and what they hold is kept here, by the Commits that all drafters are told. What may not be drawn is left
out here, too, and what a grammar knows of the text (`draft.guide`) is added.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Grammar, Open, Proposal, Release, Segment, SegmentPart
from flowspec.core.protocol.token_bytes import TokenBytes
from flowspec.core.stage.path import living_below, newly_committed
from flowspec.draft.guide import Guide, Words
from flowspec.errors import PeerError


class TextProposer(ABC):
    """Guesses what follows the committed `tokens` of one request. They grow at their end, and are cut where a
    new turn begins."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def append(self, token: int) -> None:
        self.tokens.append(token)

    def cut(self, length: int) -> None:
        """Forgets the tokens from position `length` on."""
        del self.tokens[length:]

    @abstractmethod
    def propose(self, branch: Sequence[int], width: int) -> Sequence[tuple[int, float]]:
        """Up to `width` tokens that may follow `tokens` and then `branch`, likeliest first, with the
        confidence in each (0 to 1)."""


@dataclass(slots=True)
class _Request:
    """One request. `proposer` has the committed path as far as its tokens are known without a gap, `ahead` is
    known beyond one. A `guide` says what a grammar makes of its guesses.

    `nodes` holds parent and token of the root and the living nodes below it; `early` are committed nodes
    still to come.
    """

    opening: Open
    proposer: TextProposer
    length: int
    root: int
    guide: Guide | None
    nodes: dict[int, tuple[int, int]] = field(default_factory=dict)
    ahead: dict[int, int] = field(default_factory=dict)
    early: set[int] = field(default_factory=set)

    def learn(self, part: SegmentPart) -> None:
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

    def admit(self, part: SegmentPart) -> list[int]:
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
        while (token_ahead := self.ahead.pop(len(self.proposer.tokens), None)) is not None:
            self.proposer.append(token_ahead)
        return found

    def propose(self, node: int, width: int) -> Sequence[tuple[int, float]]:
        """What may follow a node and be drawn; nothing while the path has a gap."""
        if len(self.proposer.tokens) < self.length:
            return ()
        suppressed = self.opening.sampling.suppress_tokens
        branch: list[int] = []
        while node != self.root:
            node, token = self.nodes[node]
            branch.append(token)
        found = self.proposer.propose(branch[::-1], width)
        if self.guide is not None:
            answer = (*self.proposer.tokens[self.opening.answer_start :], *branch[::-1])
            found = self.guide.guesses(answer, found, width)
        return [each for each in found if each[0] not in suppressed] if suppressed else found


class TextDrafter:
    """A `Drafter` that proposes what the `proposer` of a request, begun empty, says."""

    captures: tuple[int, ...] = ()
    weight_bytes = 0
    cache_slots = limits.ID_MAX  # texts, and no keys and values

    def __init__(self, proposer: Callable[[], TextProposer], context: int = limits.CONTEXT_MAX) -> None:
        self.context = context
        self._proposer = proposer
        self._requests: dict[int, _Request] = {}
        self._tokens: TokenBytes | None = None
        self._words: Words | None = None

    def take_tokens(self, tokens: TokenBytes) -> None:
        """From now on answers that a grammar binds are guessed by it, too; the tokens are the target's."""
        self._tokens, self._words = tokens, None

    def draft(self, segment: Segment, width: int) -> tuple[Proposal, ...]:
        """Up to `width` children for every root or uncommitted row that lives; none where nothing may
        follow."""
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
                found = request.propose(node, width)
                tokens, confidences = tuple(token for token, _ in found), tuple(share for _, share in found)
                proposals.append(
                    Proposal(request=number, epoch=epoch, node=node, tokens=tokens, confidences=confidences)
                )
        return tuple(proposals)

    def release(self, message: Release) -> None:
        self._requests.pop(message.request, None)

    def take_features(self, request: int, epoch: int, ids: Sequence[int], features: Any) -> None:
        raise AssertionError("features came for a drafter that wants none")

    def _open(self, opening: Open) -> None:
        known = self._requests.get(opening.request)
        if known is None and opening.keep:
            raise PeerError(
                f"request {opening.request} keeps {opening.keep} tokens, but nothing of it is held here"
            )
        if known is not None and opening.epoch <= known.opening.epoch:
            return
        proposer = self._proposer() if known is None else known.proposer
        proposer.cut(opening.keep)
        guide = self._guide(opening.sampling.grammar)
        self._requests[opening.request] = _Request(opening, proposer, opening.length, opening.root, guide)

    def _guide(self, grammar: Grammar | None) -> Guide | None:
        """Only who needs it pays for an index of all tokens."""
        if grammar is None or self._tokens is None:
            return None
        if self._words is None:
            self._words = Words(self._tokens)
        return Guide(grammar, self._words)
