"""Language models that cost nothing: what a simulated target says, and the plain answer that every world must
give.

A next token is a function of the whole prefix and the sampling, drawn by the real sampler, so a wrong mask,
slot, order or position anywhere gives another token. Knows nothing of stages, trees or time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from flowspec.core.protocol.messages import Logprobs, Sampling
from flowspec.core.text_before import TextBefore
from flowspec.model.grammar import GrammarVocabulary
from flowspec.model.sampler import Sampler, logprobs
from flowspec.noise import draw_bits, gumbel

SAMPLERS_MAX = 256
"""Samplings whose draws are remembered at once; a run with one seed for each answer has many."""

F32 = npt.NDArray[np.float32]
Prefix = npt.NDArray[np.int32]


class HashLanguage:
    """Logits that are a hash of the prefix, Gumbel values times `sharpness`: at 2 or 3 a few tokens hold most
    of the mass."""

    def __init__(self, vocabulary_size: int, seed: int, sharpness: float = 2.0) -> None:
        self.vocabulary_size = vocabulary_size
        self.grammars: GrammarVocabulary | None = None
        """Its tokens as texts, for samplings with a grammar."""
        self.sharpness = sharpness
        self._key = seed.to_bytes(16, "little")
        self._ids = np.arange(vocabulary_size)
        self._logits: dict[bytes, F32] = {}
        self._next: dict[tuple[Sampling, bytes, int], int] = {}
        self._sampler = lru_cache(SAMPLERS_MAX)(
            lambda sampling: Sampler(sampling, vocabulary_size, self.grammars)
        )

    def other(self, seed: int) -> HashLanguage:
        """A language with the same vocabulary and nothing else in common."""
        return HashLanguage(self.vocabulary_size, (seed + 1) << 32, self.sharpness)

    def logits(self, prefix: Prefix) -> F32:
        """float32 `[vocabulary]`, the same for the same prefix."""
        key = prefix.tobytes()
        found = self._logits.get(key)
        if found is None:
            state = int.from_bytes(blake2b(key, digest_size=7, key=self._key).digest(), "little")
            found = (self.sharpness * gumbel(draw_bits(state, 0, self._ids))).astype(np.float32)
            self._logits[key] = found
        return found

    def next_token(self, prefix: Prefix, sampling: Sampling, answer_start: int) -> int:
        """After a prefix `[position]` of token ids, in which the answer begins at `answer_start`."""
        key = (sampling, prefix.tobytes(), answer_start if sampling.needs_text else 0)
        found = self._next.get(key)
        if found is None:
            text = TextBefore(prefix.astype(np.int64), answer_start) if sampling.needs_text else None
            found = self._next[key] = self._sampler(sampling).draw(self.logits(prefix), len(prefix), text)
        return found

    def logprobs(self, prefix: Prefix, token: int, count: int) -> Logprobs:
        """Of the token after a prefix, and of the `count` likeliest ones there."""
        return logprobs(self.logits(prefix), token, count)


class AnswerLanguage:
    """Knows the plain answers to some prompts; off their paths it says 0, as nothing there ever counts.

    For comparing methods in virtual time with real drafters, where the target need not be computed. An answer
    is given with the stop token that ended it, if one did. All are for one sampling.
    """

    def __init__(self, answers: Mapping[tuple[int, ...], Sequence[int]]) -> None:
        self._next: dict[bytes, int] = {}
        for prompt, answer in answers.items():
            path = blake2b(as_prefix(prompt).tobytes(), digest_size=16)
            for token in answer:
                known = self._next.setdefault(path.digest(), token)
                assert known == token, "two answers go on differently after one prefix"
                path.update(as_prefix([token]).tobytes())

    def next_token(self, prefix: Prefix, sampling: Sampling, answer_start: int) -> int:
        return self._next.get(blake2b(prefix.tobytes(), digest_size=16).digest(), 0)

    def logprobs(self, prefix: Prefix, token: int, count: int) -> Logprobs:
        """It has no doubts, and knows of no other token."""
        return Logprobs(chosen=0.0, ids=(token,)[:count], values=(0.0,)[:count])


Language = HashLanguage | AnswerLanguage


def as_prefix(tokens: Sequence[int]) -> Prefix:
    return np.array(tokens, dtype="<i4")
