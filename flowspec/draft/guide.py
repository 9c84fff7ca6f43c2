"""What a grammar tells drafters that look at texts alone: which of their guesses it forbids, and what follows
for certain, or as good as.

It asks the grammar of bytes, not of tokens, which takes microseconds a byte. Two things come of that.
Where one token alone can follow, it is proposed as certain. Where the next bytes are certain and several
tokens can write them (`{"name": ` is `{"`, `name`, or `{`, `"`, `n`), the longest of these is a guess like
any other: tokenizers mostly cut so, and the head learns how often the model does. What is drawn, the masks of
the last stage decide.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import islice

from flowspec.core.protocol.messages import Grammar
from flowspec.core.protocol.token_bytes import TokenBytes
from flowspec.model.grammar import (
    BYTES_COUNT,
    GrammarMasks,
    common_beginning,
    in_bytes,
    over_bytes,
    single_bytes,
)

CERTAIN = 1.0
CERTAIN_MAX = 64
"""Tokens that are said to be certain at once."""
RUN_MAX = 32
"""Bytes that are asked for at once: each costs the grammar a question of its own."""
BEYOND_MAX = 32
"""Tokens that begin with what is certain and go on, of which the grammar is asked."""
LONGEST = 0.98
"""The confidence in the longest token that writes what is certain; others seldom have this one, so that the
head learns of it alone."""
_MARK = b"\xff"
"""What stands before a mark among the bytes that are certain; in no text."""


class Words:
    """The tokens of a vocabulary by their texts."""

    def __init__(self, tokens: TokenBytes) -> None:
        self.tokens = tokens
        self._ids: dict[bytes, list[int]] = {}
        for token, text in enumerate(tokens.texts):
            if text:
                self._ids.setdefault(text, []).append(token)
        self._sorted = sorted(self._ids)
        self._longest = max(map(len, self._ids), default=0)

    def writing(self, run: bytes) -> list[int]:
        """The tokens that write the beginning of a run of bytes, or all of it; the longest last."""
        ends = range(1, min(len(run), self._longest) + 1)
        return [token for end in ends for token in self._ids.get(run[:end], ())]

    def beyond(self, run: bytes) -> Iterator[int]:
        """The tokens that write a run of bytes and more."""
        place = bisect_left(self._sorted, run)
        place += place < len(self._sorted) and self._sorted[place] == run
        while place < len(self._sorted) and self._sorted[place].startswith(run):
            yield from self._ids[self._sorted[place]]
            place += 1


class Guide:
    """That of one request. It remembers what it was asked last, so that a question costs what is new of the
    answer, however long that is."""

    def __init__(self, grammar: Grammar, words: Words) -> None:
        self._words = words
        self._bound = grammar
        self._grammar = GrammarMasks(over_bytes(grammar), single_bytes())
        self._last: list[int] = []
        self._bytes: list[int] = []
        self._ends = [0]  # of each token of the last answer, and before the first

    def guesses(
        self, answer: Sequence[int], found: Sequence[tuple[int, float]], width: int
    ) -> list[tuple[int, float]]:
        """Up to `width` tokens that may follow an answer, surest first, with the confidence in each: of those
        that were `found` the allowed ones, and what the grammar says itself. None where only the end may
        follow: nothing is drafted there."""
        text = self._text(answer)
        if text is None:
            return []
        run = self._run(text)
        if only := self._only(run, text):
            return [(only[0], CERTAIN)]
        longest = self._writing(run, text)[-1:]
        guesses = [(token, LONGEST) for token in longest]
        guesses += [
            guess for guess in found if guess[0] not in longest and self._may_follow(guess[0], text, run)
        ]
        return sorted(guesses, key=lambda guess: -guess[1])[:width]

    def certain(self, answer: Sequence[int]) -> list[int]:
        """The tokens that alone can follow an answer, one behind the other."""
        text, found, run = self._text(answer), list[int](), b""
        while text is not None and len(found) < CERTAIN_MAX:
            run = self._run(text) if len(run) < RUN_MAX // 2 else run
            tokens = self._only(run, text)
            if not tokens:
                break
            more = [each for token in tokens for each in self._in_bytes(token)]
            found, text, run = [*found, *tokens], [*text, *more], run[len(more) :]
        return found

    def _run(self, text: Sequence[int]) -> bytes:
        """What every text goes on with, or the beginning of that; a mark stands alone."""
        found = self._grammar.forced(text, RUN_MAX)
        end = next((place for place, each in enumerate(found) if each >= BYTES_COUNT), len(found))
        return bytes(found[:end]) if end or not found else _MARK

    def _in_bytes(self, token: int) -> Sequence[int]:
        return in_bytes(self._bound, self._words.tokens, token)

    def _text(self, answer: Sequence[int]) -> list[int] | None:
        """An answer in bytes; None where a token of it has none."""
        wanted = list(answer)
        kept = common_beginning(wanted, self._last)
        del self._last[kept:], self._ends[kept + 1 :], self._bytes[self._ends[kept] :]
        for token in wanted[kept:]:
            own = self._in_bytes(token)
            if not own:
                return None
            self._last.append(token)
            self._bytes += own
            self._ends.append(len(self._bytes))
        return list(self._bytes)

    def _writing(self, run: bytes, text: Sequence[int]) -> list[int]:
        """The tokens that write what is certain, or its beginning; the longest last."""
        return [token for token in self._words.writing(run) if self._may_begin(token, text)]

    def _only(self, run: bytes, text: Sequence[int]) -> list[int]:
        """The one token that can write what is certain; none where there are others, or too many to ask
        about."""
        if run.startswith(_MARK):
            return [token for token in self._bound.marks if self._may_follow(token, text, b"")]
        writing = self._writing(run, text)
        if len(writing) != 1:
            return []
        longer = list(islice(self._words.beyond(run), BEYOND_MAX + 1))
        has_others = len(longer) > BEYOND_MAX or any(self._may_follow(token, text, run) for token in longer)
        return [] if has_others else writing

    def _may_begin(self, token: int, text: Sequence[int]) -> bool:
        """Whether a token may be where it would be by the vocabulary."""
        tokens = self._words.tokens
        return bool(text) or not (tokens.drops_first_space and tokens.texts[token].startswith(b" "))

    def _may_follow(self, token: int, text: Sequence[int], run: bytes) -> bool:
        own = self._in_bytes(token)
        if not own or not self._may_begin(token, text):
            return False
        return list(run[: len(own)]) == list(own) or self._grammar.may_go_on(text, own)


def guide_of(tokens: TokenBytes) -> Callable[[Grammar], Guide]:
    """What makes a request's guide; only who needs one pays for an index of all tokens."""
    words = lru_cache(maxsize=1)(lambda: Words(tokens))
    return lambda grammar: Guide(grammar, words())


def certain_of(tokens: TokenBytes) -> Callable[[Grammar], Callable[[Sequence[int]], Sequence[int]]]:
    """What a head asks what is certain (`core.head.certain`)."""
    make = guide_of(tokens)
    return lambda grammar: make(grammar).certain
