"""`ngram`: prompt look-up in the request alone, which goes with every target (`draft.suffix`)."""

from __future__ import annotations

from collections.abc import Callable

from flowspec.draft.kinds.base import TextKind
from flowspec.draft.suffix import SuffixProposer
from flowspec.draft.text import TextProposer


class Ngram(TextKind):
    word = "ngram"
    plural = "n-grams"
    acceptance = 0.25  # a guess

    @staticmethod
    def proposers() -> Callable[[], TextProposer]:
        return SuffixProposer
