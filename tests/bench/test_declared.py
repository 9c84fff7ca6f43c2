"""Declared drafters: each as often right as it is declared to be, together as often as the correlation says,
and always the same."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from flowspec.bench.config import DeclaredDrafter
from flowspec.bench.declared import Declared
from flowspec.bench.guesses import Guesses, MemoDrafter
from flowspec.bench.plain import PlainCase
from flowspec.bench.synthetic import synthetic_cases
from flowspec.core.head.domains import Domains
from flowspec.core.protocol.messages import Sampling

DOMAINS = ("code", "plays")
STRONG = DeclaredDrafter(name="strong", acceptance=(("code", 0.8), ("plays", 0.4)))
WEAK = DeclaredDrafter(name="weak", acceptance=(("code", 0.5), ("plays", 0.5)))
TOKENS = 2_000


def cases(tokens: int = TOKENS) -> list[PlainCase]:
    return synthetic_cases(2, [Sampling()], tokens, domains=DOMAINS, have_words=True)


def guesses_of(case: PlainCase, drafter: DeclaredDrafter, number: int, correlation: float) -> Guesses:
    made = Declared(drafter, number, correlation, 100_000).begin(case)()
    assert isinstance(made, MemoDrafter)
    return made._guesses


def hits(case: PlainCase, drafter: DeclaredDrafter, number: int, correlation: float) -> np.ndarray:
    """For each token of the answer whether it was the best guess."""
    guesses = guesses_of(case, drafter, number, correlation)
    path = guesses.prefixes.chain((*case.prompt, *case.answer))[len(case.prompt) - 1 : -1]
    said = guesses.children(path)
    return np.array([each.tokens[0] == token for each, token in zip(said, case.answer, strict=True)])


def test_each_is_right_as_often_as_declared_and_both_miss_the_same_as_the_correlation_says() -> None:
    phi = []
    for correlation in (0.0, 0.5, 1.0):
        found = {}
        for case, shares in zip(cases(), ((0.8, 0.5), (0.4, 0.5)), strict=True):
            for number, (drafter, share) in enumerate(zip((STRONG, WEAK), shares, strict=True)):
                right = found[case.domain, drafter.name] = hits(case, drafter, number, correlation)
                assert abs(right.mean() - share) < 4 * np.sqrt(share * (1 - share) / TOKENS) + 0.005
        strong, weak = found["code", "strong"], found["code", "weak"]
        phi.append(float(np.corrcoef(strong, weak)[0, 1]))
    assert abs(phi[0]) < 4 / np.sqrt(TOKENS)
    assert all(later > earlier + 0.1 for earlier, later in pairwise(phi))
    assert not (weak & ~strong).any(), "the weaker one knows nothing that the stronger one does not"


def test_of_what_is_wrong_they_say_the_same_as_often() -> None:
    case = cases(200)[0]
    found = []
    for correlation in (0.0, 1.0):
        both = [guesses_of(case, STRONG, number, correlation) for number in (0, 1)]
        said = [
            guesses.children([guesses.prefixes.after(guesses.prefixes.chain(case.prompt)[-1], token)])[
                0
            ].tokens
            for guesses in both
            for token in range(50)
        ]
        found.append(sum(first[0] == second[0] for first, second in zip(said[:50], said[50:], strict=True)))
    assert found == [0, 50]


def test_prompts_of_a_domain_are_known_by_their_words() -> None:
    domains = Domains()
    prompts = synthetic_cases(12, [Sampling()], 8, domains=("a", "b", "c"), have_words=True)
    found = [domains.find(case.prompt) for case in prompts]
    assert found == [0, 1, 2] * 4
    apart = Domains()
    others = synthetic_cases(12, [Sampling()], 8, domains=("a", "b", "c"))
    assert len({apart.find(case.prompt) for case in others}) > 3
