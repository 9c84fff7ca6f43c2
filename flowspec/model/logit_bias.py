"""What a sampling changes of logits, before anything else is done with them: `logit_bias` is added, and those
of `suppress_tokens` are minus infinity.

Targets and drafters do the same, so that a drafter that agrees with the target still does.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from flowspec.core.protocol.messages import Sampling

F32 = npt.NDArray[np.float32]


class LogitBias:
    """For rows of logits whose columns are these tokens, or all below a number."""

    def __init__(self, sampling: Sampling, tokens: int | npt.NDArray[np.integer]) -> None:
        added = {**dict(sampling.logit_bias), **dict.fromkeys(sampling.suppress_tokens, -math.inf)}
        if isinstance(tokens, int):
            named = sorted(token for token in added if token < tokens)
            self._columns = np.array(named, dtype=np.int64)
        else:
            self._columns = np.flatnonzero(np.isin(tokens, list(added)))
            named = tokens[self._columns].tolist()
        self._added = np.array([added[token] for token in named], dtype=np.float32)

    def added_to(self, logits: F32) -> F32:
        """Float32 `[columns]` or the first of them, as a new array: one addition in float32 for each token
        that is named."""
        count = int(np.searchsorted(self._columns, len(logits)))
        found = logits.copy()
        found[self._columns[:count]] += self._added[:count]
        return found
