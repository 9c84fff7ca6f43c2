"""What stands before a token that is drawn: all tokens of its own branch of the tree, from the prompt's
first."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class TextBefore:
    """`tokens` `[position]` stand before the token at that position; those from `answer_start` on are the
    answer's, the others the prompt's."""

    tokens: I64
    answer_start: int

    @property
    def answer(self) -> I64:
        """The answer so far, `[position - answer_start]`."""
        return self.tokens[self.answer_start :]
