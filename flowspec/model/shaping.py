"""What is drawn from, of what a model computed: a sampling's biases are added first (`model.logit_bias`),
then tokens of the text so far are penalised (`model.penalties`), and last only those stay that a grammar
allows (`model.grammar`).

Targets and drafters do the same, so that a drafter that agrees with the target still does.
"""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from flowspec.core.protocol.messages import Sampling
from flowspec.core.text_before import I64, TextBefore
from flowspec.model.grammar import GrammarVocabulary, Mask, masks_of
from flowspec.model.logit_bias import F32, LogitBias
from flowspec.model.penalties import penalise

BESIDE_TOKENS_MIN = 1 << 14
"""Of a smaller vocabulary a mask takes less than the thread that would compute it: .02 to .1 ms."""


def are_masks_beside(grammars: GrammarVocabulary | None) -> bool:
    """Whether masks are to be computed by another thread (`model.ahead`) while layers run."""
    is_large = grammars is not None and len(grammars.tokens.texts) >= BESIDE_TOKENS_MIN
    return is_large and len(os.sched_getaffinity(0)) > 1


class Shaping:
    """For rows of logits whose columns are these tokens, or all below a number.

    Without the vocabulary of a grammar (`grammars`) an answer that one binds can only end.
    """

    def __init__(
        self,
        sampling: Sampling,
        tokens: int | npt.NDArray[np.integer],
        grammars: GrammarVocabulary | None = None,
    ) -> None:
        self._sampling = sampling
        self._bias = LogitBias(sampling, tokens) if sampling.is_biased else None
        self._ids = None if isinstance(tokens, int) else tokens.astype(np.int64)
        self._columns: I64 | None = None
        if sampling.needs_text and self._ids is not None:
            self._columns = np.full(int(self._ids.max()) + 1, -1, dtype=np.int64)
            self._columns[self._ids] = np.arange(len(self._ids))
        self._masks = None if sampling.grammar is None else masks_of(sampling.grammar, grammars)

    def mask(self, text: TextBefore) -> Mask | None:
        """Which tokens the grammar allows behind a text, `[vocabulary]`; None where none binds it. One thread
        at a time asks."""
        return None if self._masks is None else self._masks.allowed(text.answer.tolist())

    def of(self, logits: F32, text: TextBefore | None, mask: Mask | None = None) -> F32:
        """Float32 `[columns]` or the first of them, as a new array; `text` may be None where the sampling
        needs none. A `mask` that is known already is not asked for again."""
        found = logits.copy() if self._bias is None else self._bias.added_to(logits)
        if self._sampling.needs_text:
            assert text is not None, "what is drawn depends on the text before it"
            penalise(found, self._sampling, text, self._columns)
            allowed = self.mask(text) if mask is None else mask
            if allowed is not None:
                self._mask(found, logits, allowed)
        return found

    def _mask(self, shaped: F32, logits: F32, allowed: Mask) -> None:
        """Takes the others out. Where none of the allowed ones may be drawn by the biases, these do not
        count: an answer has a next token, and it is one that the grammar allows."""
        ids = np.arange(len(shaped)) if self._ids is None else self._ids[: len(shaped)]
        known = ids < len(allowed)
        columns = np.zeros(len(shaped), dtype=np.bool_)
        columns[known] = allowed[ids[known]]
        if not (shaped[columns] > -np.inf).any():
            shaped[columns] = logits[columns]
        shaped[~columns] = -np.inf
