"""`suffix`: look-up in all that this head was asked and answered, as far as it is remembered
(`draft.suffix`)."""

from __future__ import annotations

from collections.abc import Callable

from flowspec.draft.kinds.base import TextKind
from flowspec.draft.suffix import SuffixProposer, new_index
from flowspec.draft.text import TextProposer


class Suffix(TextKind):
    word = "suffix"
    plural = "n-grams of all conversations"
    acceptance = 0.25  # a guess: where texts repeat it is far more
    shares_texts = True

    @staticmethod
    def proposers() -> Callable[[], TextProposer]:
        index = new_index()
        return lambda: SuffixProposer(index)
