"""A model and a drafter that need no weights: answers drawn by chance, and guesses that are right as often as
they claim.

After a prefix the drafter's confidences fall off geometrically, `c (1 - c)^i`, where c is drawn for each
prefix from a Beta distribution: models are sure of some tokens and unsure of others. On the path of the
answer the true token has rank i with just that probability. The mean of c, the `acceptance`, is the one
parameter.

Chance makes some answers easier to guess than others, and their rates differ by a quarter. A `balanced`
answer has its share of easy and hard tokens, in an order by chance: what is drawn for its tokens are the
points of a lattice, moved by chance, which fill the unit square evenly (Cranley and Patterson, 1976). So a
few balanced answers tell the mean rate that many others have.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np

from flowspec.bench.guesses import WIDTH_MAX, Guesses, Maker, MemoDrafter
from flowspec.bench.plain import PlainCase
from flowspec.core.protocol.messages import Sampling
from flowspec.draft.ranking import Children

VOCABULARY = 32_000
SYNTHETIC_DOMAIN = "synthetic"
CONCENTRATION = 2.0
"""Sum of the Beta distribution's parameters: at 2 with a mean of .5 it is uniform, below it leans to the
extremes."""
SURE_MAX = 0.995
RECENT = 8
"""Tokens of a prefix that decide what the drafter says after it."""
PROMPT_TOKENS = 64
WORDS = 16
"""Tokens that prompts of a domain use."""
OTHERS = tuple(rank * (VOCABULARY // WIDTH_MAX) for rank in range(WIDTH_MAX))
"""Tokens that are not the same, whatever is added to them all."""
STOP_NEVER: frozenset[int] = frozenset()
GOLDEN = (math.sqrt(5) - 1) / 2
QUANTILES = 4096
"""Draws that stand for a Beta distribution's quantiles."""


def synthetic_cases(
    count: int,
    samplings: Sequence[Sampling],
    new_tokens: int,
    first: int = 0,
    prompt_tokens: int = PROMPT_TOKENS,
    domains: Sequence[str] = (SYNTHETIC_DOMAIN,),
    *,
    have_words: bool = False,
) -> list[PlainCase]:
    """Prompts and answers by chance, always the same for a number of a prompt (counted from `first`) and a
    sampling; of these domains in turns. Where they `have_words`, half of a prompt is of its domain's own, by
    which it can be known."""
    found = []
    for sampling in samplings:
        for number in range(first, first + count):
            chance = np.random.default_rng((number, sampling.seed, round(1000 * sampling.temperature)))
            tokens = tuple(int(token) for token in chance.integers(0, VOCABULARY, prompt_tokens + new_tokens))
            if have_words:
                words = np.random.default_rng((number % len(domains), WORDS)).integers(0, VOCABULARY, WORDS)
                said = chance.choice(words, prompt_tokens)
                mixed = np.where(chance.random(prompt_tokens) < 0.5, said, tokens[:prompt_tokens])
                tokens = (*(int(token) for token in mixed), *tokens[prompt_tokens:])
            case = PlainCase(
                prompt_id=str(number + 1),
                domain=domains[number % len(domains)],
                prompt=tokens[:prompt_tokens],
                sampling=sampling,
                new_tokens_max=new_tokens,
                stop_ids=STOP_NEVER,
                answer=tokens[prompt_tokens:],
            )
            found.append(case)
    return found


def children_of(first: int, sure: float, true: int | None = None, lucky: float = 0.0) -> Children:
    """What is said where the best guess has the confidence `sure`: tokens from `first` on, but for the true
    one, whose rank is drawn by `lucky` from 0 to 1."""
    sure = min(SURE_MAX, max(1 - SURE_MAX, sure))
    tokens = [first + other for other in OTHERS]
    if true is not None:
        rank = int(math.log(1 - lucky) / math.log(1 - sure))
        tokens = [token if token != true else VOCABULARY for token in tokens]
        if rank < WIDTH_MAX:
            tokens[rank] = true
    return Children(
        tokens=tuple(tokens), confidences=tuple(sure * (1 - sure) ** rank for rank in range(WIDTH_MAX))
    )


class Synthetic:
    """`bench.drafting.Drafting` for synthetic cases."""

    def __init__(self, acceptance: float, context: int, *, balanced: bool = False) -> None:
        assert 0 < acceptance < 1
        self.acceptance = acceptance
        self.context = context
        self.balanced = balanced

    def begin(self, case: PlainCase) -> Maker:
        guesses = _SyntheticGuesses(self, case)
        return lambda: MemoDrafter(guesses)


class _SyntheticGuesses(Guesses):
    def __init__(self, drafting: Synthetic, case: PlainCase) -> None:
        super().__init__(case, drafting.context)
        path = (*case.prompt, *case.answer)
        self._path = path
        self._on_path = {prefix: position for position, prefix in enumerate(self.prefixes.chain(path), 1)}
        self._a = drafting.acceptance * CONCENTRATION
        self._b = CONCENTRATION - self._a
        self._drawn = self._balanced() if drafting.balanced else None

    def _balanced(self) -> list[tuple[float, float]]:
        """For each token of the answer the confidence, and the chance that decides its rank."""
        count = len(self.case.answer)
        chance = np.random.default_rng((self.case.sampling.seed, *self.case.prompt[:RECENT]))
        quantiles = np.sort(np.random.default_rng(0).beta(self._a, self._b, QUANTILES))
        along, across = chance.random(2)
        at = np.arange(count)
        sure = quantiles[((at + along) / count * QUANTILES).astype(int)]
        lucky = (at * GOLDEN + across) % 1
        order = chance.permutation(count)
        return list(zip(sure[order].tolist(), lucky[order].tolist(), strict=True))

    def _rank(self, prefixes: Sequence[int]) -> list[Children]:
        return [self._children(prefix) for prefix in prefixes]

    def _children(self, prefix: int) -> Children:
        position = self._on_path.get(prefix)
        # What is said after a prefix depends on its tokens, not on its number, which differs between methods.
        length, recent = self.prefixes.length(prefix), self.prefixes.recent(prefix, RECENT)
        chance = random.Random(hash((self.case.sampling.seed, length, position is None, *recent)))
        sure = chance.betavariate(self._a, self._b)
        first = chance.randrange(VOCABULARY // WIDTH_MAX)
        if position is None or position >= len(self._path):
            return children_of(first, sure)
        lucky = chance.random()
        if self._drawn is not None and position >= len(self.case.prompt):
            sure, lucky = self._drawn[position - len(self.case.prompt)]
        return children_of(first, sure, self._path[position], lucky)
