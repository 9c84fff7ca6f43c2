"""What there is to tell of single tokens: their bytes, where in the text they begin, and how likely they and
others were."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flowspec.core.protocol.messages import Logprobs
from flowspec.model.text import TextStream, Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A token of an answer; `alternatives` are the likeliest in its place, likeliest first, each with its
    bytes and log-probability.

    `offset` counts the characters of the answer's text before it.
    """

    offset: int
    content: bytes
    logprob: float
    alternatives: tuple[tuple[bytes, float], ...]


class TokenLog:
    """Pushes an answer's tokens into its text one by one, and notes each; entries leave with the text that
    they made."""

    def __init__(self, tokenizer: Tokenizer, stream: TextStream) -> None:
        self._tokenizer = tokenizer
        self._stream = stream
        self._entries: list[Entry] = []

    def push(self, tokens: Sequence[int], logprobs: Sequence[Logprobs]) -> str:
        """Takes new tokens, returns the text that can be shown now."""
        texts = []
        for token, found in zip(tokens, logprobs, strict=True):
            alternatives = tuple(
                (self._tokenizer.token_bytes(other), value)
                for other, value in zip(found.ids, found.values, strict=True)
            )
            content = self._tokenizer.token_bytes(token)
            self._entries.append(
                Entry(
                    offset=len(self._stream.text),
                    content=content,
                    logprob=found.chosen,
                    alternatives=alternatives,
                )
            )
            texts.append(self._stream.push([token]))
        return "".join(texts)

    def up_to(self, shown: int) -> tuple[Entry, ...]:
        """The entries of tokens that begin in the first `shown` characters."""
        count = sum(entry.offset < shown for entry in self._entries)
        leaving, self._entries = self._entries[:count], self._entries[count:]
        return tuple(leaving)

    def rest(self) -> tuple[Entry, ...]:
        """At the end: all others, but those of a stop string, which are no part of the answer."""
        return (
            self.up_to(len(self._stream.text))
            if self._stream.is_stopped
            else self.up_to(len(self._stream.text) + 1)
        )


def name_of(content: bytes) -> str:
    """A token as text; one that is only a part of a character as `bytes:\\\\xe2\\\\x80`."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + re.sub("..", r"\\x\g<0>", content.hex())


def chat_logprobs(entries: Sequence[Entry]) -> dict[str, Any]:
    """`logprobs` of a chat's choice."""

    def told(content: bytes, logprob: float) -> dict[str, Any]:
        return {"token": name_of(content), "logprob": logprob, "bytes": list(content)}

    content = [
        {**told(entry.content, entry.logprob), "top_logprobs": [told(*other) for other in entry.alternatives]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(entries: Sequence[Entry]) -> dict[str, Any]:
    """`logprobs` of a completion's choice; the token itself is among the likeliest, as in the API."""
    top = [
        {
            **{name_of(content): value for content, value in entry.alternatives},
            name_of(entry.content): entry.logprob,
        }
        for entry in entries
    ]
    return {
        "tokens": [name_of(entry.content) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": top,
        "text_offset": [entry.offset for entry in entries],
    }
