"""A model and a drafter that need no weights: answers drawn by chance, and guesses that are right as often as they claim.

After a prefix the drafter's confidences fall off geometrically, `c (1 - c)^i`, where c is drawn for each prefix from a Beta distribution:
models are sure of some tokens and unsure of others. On the path of the answer the true token has rank i with just that
probability. The mean of c, the `acceptance`, is the one parameter.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np

from flowspec.core.messages import Sampling
from flowspec.draft.ranking import Children
from flowspec.testbed.guesses import WIDTH_MAX, Guesses, Maker, MemoDrafter
from flowspec.testbed.plain import Case

VOCABULARY = 32_000
CONCENTRATION = 2.0
"""Sum of the Beta distribution's parameters: at 2 with a mean of .5 it is uniform, below it leans to the extremes."""
SURE_MAX = 0.995
RECENT = 8
"""Tokens of a prefix that decide what the drafter says after it."""
PROMPT_TOKENS = 64
OTHERS = tuple(rank * (VOCABULARY // WIDTH_MAX) for rank in range(WIDTH_MAX))
"""Tokens that are not the same, whatever is added to them all."""
STOP_NEVER: frozenset[int] = frozenset()


def synthetic_cases(count: int, samplings: Sequence[Sampling], new_tokens: int, first: int = 0) -> list[Case]:
    """Prompts and answers by chance, always the same for a number of a prompt (counted from `first`) and a sampling."""
    found = []
    for sampling in samplings:
        for number in range(first, first + count):
            chance = np.random.default_rng((number, sampling.seed, round(1000 * sampling.temperature)))
            tokens = tuple(int(token) for token in chance.integers(0, VOCABULARY, PROMPT_TOKENS + new_tokens))
            case = Case(
                prompt_id=str(number + 1),
                domain="synthetic",
                prompt=tokens[:PROMPT_TOKENS],
                sampling=sampling,
                new_tokens_max=new_tokens,
                stop_ids=STOP_NEVER,
                answer=tokens[PROMPT_TOKENS:],
            )
            found.append(case)
    return found


class Synthetic:
    """`testbed.guesses.Drafting` for synthetic cases."""

    def __init__(self, acceptance: float, context: int) -> None:
        assert 0 < acceptance < 1
        self.acceptance = acceptance
        self.context = context

    def begin(self, case: Case) -> Maker:
        guesses = _SyntheticGuesses(self, case)
        return lambda: MemoDrafter(guesses)


class _SyntheticGuesses(Guesses):
    def __init__(self, drafting: Synthetic, case: Case) -> None:
        super().__init__(case, drafting.context)
        path = (*case.prompt, *case.answer)
        self._path = path
        self._on_path = {prefix: position for position, prefix in enumerate(self.prefixes.chain(path), 1)}
        self._a = drafting.acceptance * CONCENTRATION
        self._b = CONCENTRATION - self._a

    def _rank(self, prefixes: Sequence[int]) -> list[Children]:
        return [self._children(prefix) for prefix in prefixes]

    def _children(self, prefix: int) -> Children:
        position = self._on_path.get(prefix)
        # What is said after a prefix depends on its tokens, not on its number, which differs between methods.
        length, recent = self.prefixes.length(prefix), self.prefixes.recent(prefix, RECENT)
        chance = random.Random(hash((self.case.sampling.seed, length, position is None, *recent)))
        sure = min(SURE_MAX, max(1 - SURE_MAX, chance.betavariate(self._a, self._b)))
        first = chance.randrange(VOCABULARY // WIDTH_MAX)
        tokens = [first + other for other in OTHERS]
        if position is not None and position < len(self._path):
            true, rank = self._path[position], int(math.log(1 - chance.random()) / math.log(1 - sure))
            tokens = [token if token != true else VOCABULARY for token in tokens]
            if rank < WIDTH_MAX:
                tokens[rank] = true
        return Children(tokens=tuple(tokens), confidences=tuple(sure * (1 - sure) ** rank for rank in range(WIDTH_MAX)))
