"""What is drawn from, of what a model computed: a sampling's biases are added first (`model.logit_bias`),
then tokens of the text so far are penalised (`model.penalties`).

Targets and drafters do the same, so that a drafter that agrees with the target still does.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flowspec.core.protocol.messages import Sampling
from flowspec.core.text_before import I64, TextBefore
from flowspec.model.logit_bias import F32, LogitBias
from flowspec.model.penalties import penalise


class Shaping:
    """For rows of logits whose columns are these tokens, or all below a number."""

    def __init__(self, sampling: Sampling, tokens: int | npt.NDArray[np.integer]) -> None:
        self._sampling = sampling
        self._bias = LogitBias(sampling, tokens) if sampling.is_biased else None
        self._columns: I64 | None = None
        if sampling.needs_text and not isinstance(tokens, int):
            self._columns = np.full(int(tokens.max()) + 1, -1, dtype=np.int64)
            self._columns[tokens] = np.arange(len(tokens))

    def of(self, logits: F32, text: TextBefore | None) -> F32:
        """Float32 `[columns]` or the first of them, as a new array; `text` may be None where the sampling
        needs none."""
        found = logits.copy() if self._bias is None else self._bias.added_to(logits)
        if self._sampling.needs_text:
            assert text is not None, "what is drawn depends on the text before it"
            penalise(found, self._sampling, text, self._columns)
        return found
