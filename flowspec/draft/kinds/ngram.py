"""`ngram`: prompt look-up, which goes with every target (`draft.ngram`)."""

from __future__ import annotations

from flowspec.draft.kinds.base import TextKind
from flowspec.draft.ngram import NgramProposer


class Ngram(TextKind):
    word = "ngram"
    plural = "n-grams"
    acceptance = 0.25  # a guess
    proposer = NgramProposer
