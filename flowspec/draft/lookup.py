"""Drafters without a model: what followed the end of a path where it occurred before, in the request itself
(`ngram`), or in all that this head was asked and answered (`suffix`; SuffixDecoding, arXiv 2411.04975).

The chance of a guess is estimated from frequencies at all lengths of agreement. The head's tree grows
best-first by the product of these chances, so a long agreement, which is a sure one, is followed far: that is
the paper's greedy tree. Its suffix tree is a sorted array here. A *place* is a token that another one
follows. Places are sorted by the text before them, read backwards from the place, so all that agree with a
path in their last n tokens are neighbours, and those next to where the path would stand agree the longest.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Grammar, Open, Proposal, Release, Segment, SegmentPart
from flowspec.core.protocol.token_bytes import TokenBytes
from flowspec.core.stage.path import newly_committed
from flowspec.draft.base import WordKind
from flowspec.draft.guide import Guide, guide_of
from flowspec.errors import PeerError
from flowspec.plan.shape import ModelShape
from flowspec.plan.sites import PlannedDrafter

STRENGTHS = (8.0, 6.0, 4.0, 4.0, 4.0, 3.0)
"""By length of agreement from 1, the last for all longer ones: how many places the confidence by shorter
agreement weighs. Fitted on stories, code and plays."""
DEPTH = 32
"""Tokens over which agreement is followed."""
MATCHES_MAX = 32
"""Places that one look-up visits, those that agree longest."""
PLACES_MAX = 1 << 17
"""Tokens that are remembered: 12 MiB or so."""
BLOCK_TOKENS = 256
"""What is given up at once."""
SPAN = 1 << 10
"""Numbers of places for each block: its tokens, and those before it."""


@dataclass(slots=True)
class _Block:
    """Tokens of a text from position `first` on, behind the `before` ones in front of them, which tell the
    order of their places. A block that was given up has no tokens."""

    number: int
    first: int
    before: int
    tokens: list[int]

    @property
    def end(self) -> int:
        return self.first + len(self.tokens) - self.before

    @property
    def last_place(self) -> int:
        return self.number * SPAN + len(self.tokens) - 2


@dataclass(slots=True)
class Text:
    """A text that grows at its end, to `length` by now; `before` are the last tokens in front of its blocks,
    of which some may have been given up."""

    length: int = 0
    before: Sequence[int] = ()
    blocks: list[_Block] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Match:
    """A place whose last `length` tokens, itself among them, are the path's; `token` follows there."""

    length: int
    token: int


class SuffixIndex:
    """Where texts end as a path does, over `depth` tokens. Where there are more than `places_max` places, the
    block that was found or written longest ago is given up."""

    def __init__(self, depth: int = DEPTH, places_max: int = PLACES_MAX) -> None:
        assert depth + BLOCK_TOKENS <= SPAN, "a block has more places than numbers"
        assert places_max >= BLOCK_TOKENS, "the block that is written would be given up"
        self._depth = depth
        self._places_max = places_max
        self._places: list[int] = []
        self._blocks: OrderedDict[int, _Block] = OrderedDict()  # the one used longest ago first
        self._count = 0

    def __len__(self) -> int:
        return len(self._places)

    def begin(self, before: Sequence[int] = ()) -> Text:
        """A text that goes on behind these tokens, which are no places of it."""
        return Text(len(before), tuple(before[-self._depth :]))

    def append(self, text: Text, token: int) -> None:
        block = text.blocks[-1] if text.blocks else None
        if block is None or not block.tokens or text.length - block.first == BLOCK_TOKENS:
            before = text.before if block is None else block.tokens[-self._depth :]
            block = _Block(self._count, text.length, len(before), list(before))
            self._count += 1
            self._blocks[block.number] = block
            text.blocks.append(block)
        self._blocks.move_to_end(block.number)
        block.tokens.append(token)
        text.length += 1
        if len(block.tokens) > 1:
            insort(self._places, block.last_place, key=self._key)
            if len(self._places) > self._places_max:
                number, given_up = self._blocks.popitem(last=False)
                self._places = [place for place in self._places if place // SPAN != number]
                given_up.before, given_up.tokens = 0, []

    def cut(self, text: Text, length: int) -> None:
        """Forgets a text's tokens from position `length` on."""
        while text.blocks and text.blocks[-1].end > length:
            block = text.blocks[-1]
            while block.end > length and len(block.tokens) > block.before:
                if len(block.tokens) > 1:
                    key = self._key(block.last_place)
                    del self._places[bisect_left(self._places, key, key=self._key)]
                block.tokens.pop()
            if len(block.tokens) == block.before:
                self._blocks.pop(block.number, None)
                text.blocks.pop()
        text.length = min(text.length, length)

    def matches(self, end: Sequence[int], most: int = MATCHES_MAX) -> list[Match]:
        """Up to `most` places that agree with the path's `end` (its newest token last) in one token at least,
        longest agreement first. Where they agree longest, they are used."""
        needle = list(end[: -self._depth - 1 : -1])
        right = bisect_left(self._places, needle, key=self._key)
        left = right - 1
        matches: list[Match] = []
        lengths = self._agreement(left, needle), self._agreement(right, needle)
        while len(matches) < most and (length := max(lengths)):
            if lengths[1] == length:
                place, right = self._places[right], right + 1
                lengths = lengths[0], self._agreement(right, needle)
            else:
                place, left = self._places[left], left - 1
                lengths = self._agreement(left, needle), lengths[1]
            block = self._blocks[place // SPAN]
            matches.append(Match(length, block.tokens[place % SPAN + 1]))
            if length == matches[0].length:
                self._blocks.move_to_end(block.number)
        return matches

    def _key(self, place: int) -> list[int]:
        """The text before a place, backwards, and then what no other has."""
        tokens, at = self._blocks[place // SPAN].tokens, place % SPAN
        back = tokens[at : at - self._depth : -1] if at >= self._depth else tokens[at::-1]
        back.append(~place)
        return back

    def _agreement(self, at: int, needle: Sequence[int]) -> int:
        """How many tokens the place at a number of the order has in common with the needle."""
        if not 0 <= at < len(self._places):
            return 0
        place = self._places[at]
        tokens, last = self._blocks[place // SPAN].tokens, place % SPAN
        length, most = 0, min(len(needle), last + 1)
        while length < most and tokens[last - length] == needle[length]:
            length += 1
        return length


def rank(matches: Sequence[Match]) -> list[tuple[int, float]]:
    """The tokens that follow in matches (longest first), likeliest first, with the confidence in each.

    At length n a token's is `(count + strength * shorter) / (places + strength)` over the places that agree
    in n tokens or more, `shorter` its confidence at length n - 1. Among equals, the longest match goes first.
    """
    counts = Counter(match.token for match in matches)
    shares = dict.fromkeys(counts, 0.0)
    below = 0
    for places in range(len(matches), 0, -1):
        length = matches[places - 1].length
        if length > below:
            doubt = 1.0  # of these lengths together: all have the same places
            for at in range(below, length):
                strength = STRENGTHS[min(at, len(STRENGTHS) - 1)]
                doubt *= strength / (places + strength)
            for token, count in counts.items():
                shares[token] = doubt * shares[token] + (1 - doubt) * count / places
            below = length
        counts[matches[places - 1].token] -= 1
    return sorted(shares.items(), key=lambda entry: -entry[1])


class LookUp:
    """Guesses what follows the committed `tokens` of one request, by an index of its own, which forgets what
    is cut off, or by a `shared` one, which remembers all that was ever in any text."""

    def __init__(self, shared: SuffixIndex | None = None) -> None:
        self.tokens: list[int] = []
        self._forgets = shared is None
        self._index = SuffixIndex() if shared is None else shared
        self._text = self._index.begin()

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self._index.append(self._text, token)

    def cut(self, length: int) -> None:
        """Forgets the tokens from position `length` on: a new turn begins there."""
        if length >= len(self.tokens):
            return
        del self.tokens[length:]
        if self._forgets:
            self._index.cut(self._text, length)
        else:
            self._text = self._index.begin(self.tokens)

    def propose(self, branch: Sequence[int], width: int) -> list[tuple[int, float]]:
        """Up to `width` tokens that may follow `tokens` and then `branch`, likeliest first, with the
        confidence in each (0 to 1)."""
        return rank(self._index.matches((*self.tokens[-DEPTH:], *branch)[-DEPTH:]))[:width]


@dataclass(slots=True)
class _Request:
    """One request, whose output's path has `length` tokens and ends at `root`. Its look-up has the path as
    far as its tokens are known without a gap, `path` the nodes by position beyond. A `guide` says what a
    grammar makes of its guesses. `nodes` holds parent and token."""

    opening: Open
    look_up: LookUp
    guide: Guide | None
    length: int
    root: int
    path: dict[int, int] = field(default_factory=dict)
    nodes: dict[int, tuple[int, int]] = field(default_factory=dict)

    def learn(self, part: SegmentPart) -> None:
        """Takes a part's Commit, and its rows."""
        if fresh := newly_committed(part.commit, self.length):
            self.path.update(enumerate(fresh, self.length))
            self.length, self.root = part.commit.length, fresh[-1]
        self.nodes.update(zip(part.ids, zip(part.parents, part.tokens, strict=True), strict=True))
        for node, position, is_committed in zip(part.ids, part.positions, part.committed, strict=True):
            if is_committed or node == self.root:
                self.path[position] = node
        tokens = self.look_up.tokens
        while (node := self.path.get(len(tokens), -1)) in self.nodes:
            del self.path[len(tokens)]
            self.look_up.append(self.nodes[node][1])
        if len(tokens) == self.length:  # ids grow along a path: no node before the root is needed any more
            self.nodes = {node: known for node, known in self.nodes.items() if node >= self.root}

    def propose(self, node: int, width: int) -> Proposal | None:
        """Up to `width` children of a node that may be drawn, or none while the path has a gap; None for a
        node that is not below the root."""
        branch, above = list[int](), node
        while above > self.root and above in self.nodes:
            above, token = self.nodes[above]
            branch.insert(0, token)
        if above != self.root:
            return None
        tokens, guesses = self.look_up.tokens, list[tuple[int, float]]()
        if len(tokens) == self.length:
            guesses = self.look_up.propose(branch, width)
            if self.guide is not None:
                answer = (*tokens[self.opening.answer_start :], *branch)
                guesses = self.guide.guesses(answer, guesses, width)
        suppressed = self.opening.sampling.suppress_tokens
        guesses = [guess for guess in guesses if guess[0] not in suppressed]
        return Proposal(
            request=self.opening.request,
            epoch=self.opening.epoch,
            node=node,
            tokens=tuple(token for token, _ in guesses),
            confidences=tuple(confidence for _, confidence in guesses),
        )


class LookUpDrafter:
    """A `Drafter` that proposes what the look-up of a request, begun empty by `begin`, says: but for what may
    not be drawn, and with what a grammar knows of the text."""

    captures: tuple[int, ...] = ()
    weight_bytes = 0
    cache_slots = limits.ID_MAX  # texts, and no keys and values

    def __init__(self, begin: Callable[[], LookUp] = LookUp, context: int = limits.CONTEXT_MAX) -> None:
        self.context = context
        self.begin = begin
        self._requests: dict[int, _Request] = {}
        self._guide_of: Callable[[Grammar], Guide] | None = None

    def take_tokens(self, tokens: TokenBytes) -> None:
        """From now on answers that a grammar binds are guessed by it, too; the tokens are the target's."""
        self._guide_of = guide_of(tokens)

    def draft(self, segment: Segment, width: int) -> tuple[Proposal, ...]:
        """Up to `width` children for every root or uncommitted row that lives; none where nothing may
        follow."""
        proposals: list[Proposal | None] = []
        for part in segment.parts:
            if part.opening is not None:
                self._open(part.opening)
            request = self._requests.get(part.commit.request)
            if request is not None and request.opening.epoch == part.commit.epoch:
                request.learn(part)
                proposals += [request.propose(node, width) for node in part.ids]
        return tuple(filter(None, proposals))

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
        look_up = self.begin() if known is None else known.look_up
        look_up.cut(opening.keep)
        grammar = opening.sampling.grammar
        guide = self._guide_of(grammar) if self._guide_of and grammar else None
        self._requests[opening.request] = _Request(opening, look_up, guide, opening.length, opening.root)


class Ngram(WordKind):
    word = "ngram"
    plural = "n-grams"
    acceptance = 0.25  # a guess
    has_tensors = False

    def load(self, *_: object, context: int, **__: object) -> LookUpDrafter:
        return LookUpDrafter(context=context)

    def plan(self, target: ModelShape) -> PlannedDrafter:
        return PlannedDrafter(name=self.name, shape=None, acceptance=self.acceptance)


class Suffix(Ngram):
    word = "suffix"
    plural = "n-grams of all conversations"
    shares_texts = True

    def load(self, *_: object, context: int, **__: object) -> LookUpDrafter:
        index = SuffixIndex()
        return LookUpDrafter(lambda: LookUp(index), context)
