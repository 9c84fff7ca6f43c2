"""What is drawn from, of what a model computed. Once each, in float32, and in this order:

- `logit_bias` is added, and the logits of `suppress_tokens` are minus infinity.
- Tokens of the text so far are penalised. The repetition penalty of all tokens of prompt and answer divides
  what is above 0 and multiplies the rest; the frequency penalty times how often a token stands in the answer
  is taken off; the presence penalty is taken off where it stands there at all.
- Only those stay that a grammar allows (`model.grammar`).

Targets and drafters do the same, so that a drafter that agrees with the target still does.
"""

from __future__ import annotations

import math
import os

import numpy as np
import numpy.typing as npt

from flowspec.core.protocol.messages import Sampling
from flowspec.core.text_before import I64, TextBefore
from flowspec.model.grammar import GrammarMasks, GrammarVocabulary, Mask

F32 = npt.NDArray[np.float32]
MOST = np.finfo(np.float32).max
BESIDE_TOKENS_MIN = 1 << 14
"""Of a smaller vocabulary a mask takes less than the thread that would compute it: .02 to .1 ms."""


def are_masks_beside(grammars: GrammarVocabulary | None) -> bool:
    """Whether masks are to be computed by another thread (`model.ahead`) while layers run."""
    is_large = grammars is not None and len(grammars.tokens.texts) >= BESIDE_TOKENS_MIN
    return is_large and len(os.sched_getaffinity(0)) > 1


class Shaping:
    """For rows of logits whose columns are the tokens `ids`. Without the vocabulary of a grammar (`grammars`)
    an answer that one binds can only end."""

    def __init__(
        self,
        sampling: Sampling,
        ids: npt.NDArray[np.integer],
        grammars: GrammarVocabulary | None = None,
    ) -> None:
        self._sampling = sampling
        self._ids: I64 = ids.astype(np.int64)
        biases = {**dict(sampling.logit_bias), **dict.fromkeys(sampling.suppress_tokens, -math.inf)}
        self._biased = np.flatnonzero(np.isin(self._ids, list(biases)))
        named = self._ids[self._biased].tolist()
        self._biases: F32 = np.array([biases[token] for token in named], dtype=np.float32)
        self._columns: I64 = np.full(int(self._ids.max()) + 1, -1, dtype=np.int64)
        self._columns[self._ids] = np.arange(len(self._ids))
        self._masks = None
        if sampling.grammar is not None and grammars is not None:
            self._masks = GrammarMasks(sampling.grammar, grammars)

    def mask(self, text: TextBefore) -> Mask | None:
        """Which tokens the grammar allows behind a text, `[vocabulary]`; None where none binds it. One thread
        at a time asks."""
        grammar = self._sampling.grammar
        if grammar is None:
            return None
        if self._masks is not None:
            return self._masks.allowed(text.answer.tolist())
        only_ends: Mask = np.zeros(grammar.ends[-1] + 1, dtype=np.bool_)
        only_ends[list(grammar.ends)] = True
        return only_ends

    def of(self, logits: F32, text: TextBefore | None, mask: Mask | None = None) -> F32:
        """Float32 `[columns]` or the first of them, as a new array; `text` may be None where the sampling
        needs none, `mask` where it is not known yet."""
        shaped = logits.copy()
        count = int(np.searchsorted(self._biased, len(logits)))
        shaped[self._biased[:count]] += self._biases[:count]
        if self._sampling.needs_text:
            assert text is not None, "what is drawn depends on the text before it"
            self._penalise(shaped, text)
            allowed = self.mask(text) if mask is None else mask
            if allowed is not None:
                self._mask(shaped, logits, allowed)
        return shaped

    def _penalise(self, logits: F32, text: TextBefore) -> None:
        """Changes logits in place. What is finite stays so, and minus infinity, too."""
        sampling = self._sampling
        if sampling.repetition_penalty != 1:
            seen, _ = self._count(text.tokens, len(logits))
            seen = seen[logits[seen] > -np.inf]
            own, penalty = logits[seen], np.float32(sampling.repetition_penalty)
            with np.errstate(over="ignore"):
                logits[seen] = np.where(
                    own > 0, np.minimum(own / penalty, MOST), np.maximum(own * penalty, -MOST)
                )
        if sampling.frequency_penalty or sampling.presence_penalty:
            seen, counts = self._count(text.answer, len(logits))
            if sampling.frequency_penalty:
                logits[seen] -= np.float32(sampling.frequency_penalty) * counts.astype(np.float32)
            if sampling.presence_penalty:
                logits[seen] -= np.float32(sampling.presence_penalty)

    def _count(self, tokens: I64, size: int) -> tuple[I64, I64]:
        """The columns below `size` of these tokens, each once, and how often it is among them."""
        ids, counts = np.unique(tokens, return_counts=True)
        is_known = ids < len(self._columns)
        columns, counts = self._columns[ids[is_known]], counts[is_known]
        is_here = (columns >= 0) & (columns < size)
        return columns[is_here], counts[is_here]

    def _mask(self, shaped: F32, logits: F32, allowed: Mask) -> None:
        """Takes the others out. Biases that leave none of the allowed ones do not count."""
        ids = self._ids[: len(shaped)]
        known = ids < len(allowed)
        columns = np.zeros(len(shaped), dtype=np.bool_)
        columns[known] = allowed[ids[known]]
        if not (shaped[columns] > -np.inf).any():
            shaped[columns] = logits[columns]
        shaped[~columns] = -np.inf
