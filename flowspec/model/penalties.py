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


def penalise(logits: F32, sampling: Sampling, text: TextBefore, columns: I64 | None) -> None:
    """Changes logits `[columns]` in place. `columns` has the column of each token, -1 where there is none
    (None: its own number). What is finite stays so, and minus infinity, too."""
    if sampling.repetition_penalty != 1:
        seen, _ = _counted(text.tokens, columns, len(logits))
        seen = seen[logits[seen] > -np.inf]
        own, penalty = logits[seen], np.float32(sampling.repetition_penalty)
        with np.errstate(over="ignore"):
            logits[seen] = np.where(
                own > 0, np.minimum(own / penalty, MOST), np.maximum(own * penalty, -MOST)
            )
    if sampling.frequency_penalty or sampling.presence_penalty:
        seen, counts = _counted(text.answer, columns, len(logits))
        if sampling.frequency_penalty:
            logits[seen] -= np.float32(sampling.frequency_penalty) * counts.astype(np.float32)
        if sampling.presence_penalty:
            logits[seen] -= np.float32(sampling.presence_penalty)


def _counted(tokens: I64, columns: I64 | None, size: int) -> tuple[I64, I64]:
    """The columns below `size` of these tokens, each once, and how often it is among them."""
    found, counts = np.unique(tokens, return_counts=True)
    if columns is not None:
        is_known = found < len(columns)
        found, counts = columns[found[is_known]], counts[is_known]
    is_here = (found >= 0) & (found < size)
    return found[is_here], counts[is_here]
