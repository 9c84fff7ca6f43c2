"""What there is to tell of single tokens: their bytes, where in the text they begin, and how likely they and
others were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowspec.core.protocol.messages import Logprobs
from flowspec.model.text import TextStream, Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprob:
    """One of the likeliest tokens in a place: its id, the bytes that it adds to the text's UTF-8 (a character
    may take several tokens; none without a tokenizer), and its log-probability."""

    token_id: int
    content: bytes
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token of an answer. `logprob` is the natural logarithm of the model's own probability, before
    temperature and filters; `top` are the likeliest in its place, likeliest first.

    `content` are the bytes that it adds to the text's UTF-8, `offset` counts the text's characters before it.
    """

    token_id: int
    content: bytes
    logprob: float
    offset: int
    top: tuple[TopLogprob, ...]


class TokenLog:
    """Pushes an answer's tokens into its text one by one, and notes each; `entries` are all, and `up_to` has
    those leave that the shown text is made of. Without a tokenizer there is no text."""

    def __init__(self, tokenizer: Tokenizer | None, stream: TextStream | None) -> None:
        self.entries: list[TokenLogprob] = []
        self._tokenizer = tokenizer
        self._stream = stream
        self._told = 0

    def push(self, tokens: Sequence[int], logprobs: Sequence[Logprobs]) -> str:
        """Takes new tokens, returns the text that can be shown now."""
        texts = []
        for token, found in zip(tokens, logprobs, strict=True):
            offset = 0 if self._stream is None else len(self._stream.text)
            self.entries.append(self._entry(token, found, offset))
            texts.append("" if self._stream is None else self._stream.push([token]))
        return "".join(texts)

    def up_to(self, shown: int) -> tuple[TokenLogprob, ...]:
        """The entries of tokens that begin in the first `shown` characters."""
        begin = self._told
        while self._told < len(self.entries) and self.entries[self._told].offset < shown:
            self._told += 1
        return tuple(self.entries[begin : self._told])

    def rest(self) -> tuple[TokenLogprob, ...]:
        """At the end: all others, but those of a stop text, which are no part of the answer's."""
        if self._stream is None:
            return self.up_to(1)
        return self.up_to(len(self._stream.text) + (not self._stream.is_cut))

    def _entry(self, token: int, found: Logprobs, offset: int) -> TokenLogprob:
        top = (
            TopLogprob(token_id=other, content=self._content(other), logprob=value)
            for other, value in zip(found.ids, found.values, strict=True)
        )
        return TokenLogprob(
            token_id=token,
            content=self._content(token),
            logprob=found.chosen,
            offset=offset,
            top=tuple(top),
        )

    def _content(self, token: int) -> bytes:
        return b"" if self._tokenizer is None else self._tokenizer.token_bytes(token)
