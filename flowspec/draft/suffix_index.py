"""Where texts end as a path does: the suffix tree of SuffixDecoding (arXiv 2411.04975), as a sorted array.

A *place* is a token that another one follows. Places are kept sorted by the text before them, read backwards
from the place, so all that agree with a path in their last n tokens are neighbours, for every n, and those
next to where the path itself would stand agree the longest. That is the array of a suffix tree of the
reversed texts: it tells the same counts, takes one number for a place, and grows and shrinks at any point.

Texts are stored in blocks. Where there are more places than the bound, the block that was found or written
longest ago is given up. The same calls always give the same places. Pure; knows nothing of requests.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

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
    """See the module. Agreement is followed over `depth` tokens, and at most `places_max` places are held."""

    def __init__(self, depth: int, places_max: int) -> None:
        assert depth + BLOCK_TOKENS <= SPAN, "a block has more places than numbers"
        assert places_max >= BLOCK_TOKENS, "the block that is written would be given up"
        self._depth = depth
        self._places_max = places_max
        self._places: list[int] = []
        self._blocks: OrderedDict[int, _Block] = OrderedDict()  # the one used longest ago first
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._places)

    def begin(self, before: Sequence[int] = ()) -> Text:
        """A text that goes on behind these tokens, which are no places of it."""
        return Text(len(before), tuple(before[-self._depth :]))

    def append(self, text: Text, token: int) -> None:
        block = text.blocks[-1] if text.blocks else None
        if block is None or not block.tokens or text.length - block.first == BLOCK_TOKENS:
            block = self._begin(text)
        self._blocks.move_to_end(block.number)
        block.tokens.append(token)
        text.length += 1
        if len(block.tokens) > 1:
            insort(self._places, block.number * SPAN + len(block.tokens) - 2, key=self._key)
            if len(self._places) > self._places_max:
                self._give_up()

    def cut(self, text: Text, length: int) -> None:
        """Forgets a text's tokens from position `length` on."""
        while text.blocks and text.blocks[-1].end > length:
            block = text.blocks[-1]
            while block.end > length and len(block.tokens) > block.before:
                if len(block.tokens) > 1:
                    place = block.number * SPAN + len(block.tokens) - 2
                    del self._places[bisect_left(self._places, self._key(place), key=self._key)]
                block.tokens.pop()
            if len(block.tokens) == block.before:
                self._blocks.pop(block.number, None)
                text.blocks.pop()
        text.length = min(text.length, length)

    def matches(self, end: Sequence[int], most: int) -> list[Match]:
        """Up to `most` places that agree with the path's `end` (its newest token last) in one token at least,
        longest agreement first. Where they agree longest, they are used."""
        needle = list(end[: -self._depth - 1 : -1])
        right = bisect_left(self._places, needle, key=self._key)
        left = right - 1
        found: list[Match] = []
        lengths = self._agreement(left, needle), self._agreement(right, needle)
        while len(found) < most and (length := max(lengths)):
            if lengths[1] == length:
                place, right = self._places[right], right + 1
                lengths = lengths[0], self._agreement(right, needle)
            else:
                place, left = self._places[left], left - 1
                lengths = self._agreement(left, needle), lengths[1]
            block = self._blocks[place // SPAN]
            found.append(Match(length, block.tokens[place % SPAN + 1]))
            if length == found[0].length:
                self._blocks.move_to_end(block.number)
        return found

    def _begin(self, text: Text) -> _Block:
        """A new block of a text behind its last one."""
        before = text.blocks[-1].tokens[-self._depth :] if text.blocks else text.before
        block = _Block(self._numbers, text.length, len(before), list(before))
        self._numbers += 1
        self._blocks[block.number] = block
        text.blocks.append(block)
        return block

    def _give_up(self) -> None:
        number, block = self._blocks.popitem(last=False)
        self._places = [place for place in self._places if place // SPAN != number]
        block.before, block.tokens = 0, []

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
