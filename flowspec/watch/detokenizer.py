"""Tokens as text, one by one, for those who watch: guesses each alone, what is committed so that it joins to
the answer's text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"
PENDING_MAX = 8
"""Tokens that one character may take; more are no character."""

Decode = Callable[[Sequence[int]], str]
"""Text of tokens, as `model.text.Tokenizer.decode`."""


def as_numbers(tokens: Sequence[int]) -> str:
    """Token ids for text, where there is no tokenizer."""
    return "".join(f"{token} " for token in tokens)


class Detokenizer:
    """Remembers the text of each token that it was asked for."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._pieces: dict[int, str] = {}

    def piece(self, token: int) -> str:
        """A token as it reads within a text: decoded twice in a row, so that a space before it counts."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._decode((token, token))[len(self._decode((token,))) :]
        return piece

    def tail(self, tokens: Sequence[int], characters: int) -> str:
        """The end of a text, so many characters at most."""
        return self._decode(tokens[-characters:]).lstrip(UNFINISHED)[-characters:]


class IncrementalDetokenizer:
    """One answer's text as its tokens come; of a character that takes several tokens the last one has it all,
    the others nothing."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._pending: list[int] = []
        self._last: list[int] = []

    def push(self, token: int) -> str:
        text = self._detokenizer.piece(token)
        if self._pending or UNFINISHED in text:
            self._pending.append(token)
            decode = self._detokenizer._decode
            text = decode([*self._last, *self._pending])[len(decode(self._last)) :]
            if text.endswith(UNFINISHED) and len(self._pending) < PENDING_MAX:
                return ""
            self._pending.clear()
        self._last = [token]
        return text
