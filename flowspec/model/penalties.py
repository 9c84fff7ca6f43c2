"""What a sampling changes of the logits of tokens that stand in the text already.

Once each, in float32, and in this order: the repetition penalty of all tokens of prompt and answer divides
what is above 0 and multiplies the rest; the frequency penalty times how often a token stands in the answer is
taken off; the presence penalty is taken off where it stands there at all.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flowspec.core.protocol.messages import Sampling
from flowspec.core.text_before import I64, TextBefore

F32 = npt.NDArray[np.float32]
MOST = np.finfo(np.float32).max


def penalise(logits: F32, sampling: Sampling, text: TextBefore, ids: I64 | None) -> None:
    """Changes logits `[columns]` in place; a column is the token of its number, or with `ids` `[columns or
    more]` the one there. What is finite stays so, and minus infinity, too."""
    if sampling.repetition_penalty != 1:
        (seen,) = np.nonzero(_counts(text.tokens, ids, len(logits)))
        seen = seen[logits[seen] > -np.inf]
        own, penalty = logits[seen], np.float32(sampling.repetition_penalty)
        with np.errstate(over="ignore"):
            logits[seen] = np.where(
                own > 0, np.minimum(own / penalty, MOST), np.maximum(own * penalty, -MOST)
            )
    if sampling.frequency_penalty or sampling.presence_penalty:
        counts = _counts(text.answer, ids, len(logits))
        (seen,) = np.nonzero(counts)
        if sampling.frequency_penalty:
            logits[seen] -= np.float32(sampling.frequency_penalty) * counts[seen].astype(np.float32)
        if sampling.presence_penalty:
            logits[seen] -= np.float32(sampling.presence_penalty)


def _counts(tokens: I64, ids: I64 | None, columns: int) -> I64:
    """How often the token of each column is among these, `[columns]`."""
    if ids is None:
        return np.bincount(tokens, minlength=columns)[:columns]
    of = ids[:columns]
    return np.bincount(tokens, minlength=int(of.max()) + 1)[of]
