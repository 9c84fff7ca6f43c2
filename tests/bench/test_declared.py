"""Declared drafters: each as often right as it is declared to be, together as often as the correlation says,
and always the same."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from flowspec.bench.bench import read_cases
from flowspec.bench.config import Bench, DeclaredDrafter
from flowspec.bench.declared import Declared
from flowspec.bench.experiments import find_experiment, read_experiment
from flowspec.bench.guesses import Guesses, MemoDrafter
from flowspec.bench.plain import PlainCase
from flowspec.bench.synthetic import synthetic_cases
from flowspec.core.head.domains import Domains
from flowspec.core.protocol.messages import Sampling
from flowspec.errors import InputError

DOMAINS = ("code", "plays")
STRONG = DeclaredDrafter(name="strong", acceptance=(("code", 0.8), ("plays", 0.4)))
WEAK = DeclaredDrafter(name="weak", acceptance=(("code", 0.5), ("plays", 0.5)))
TOKENS = 4_000


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


@pytest.mark.parametrize("correlation", [0.0, 0.5, 1.0])
def test_each_is_right_as_often_as_it_is_declared_whatever_the_correlation(correlation: float) -> None:
    for case, shares in zip(cases(), ((0.8, 0.5), (0.4, 0.5)), strict=True):
        for number, (drafter, share) in enumerate(zip((STRONG, WEAK), shares, strict=True)):
            found = hits(case, drafter, number, correlation).mean()
            assert abs(found - share) < 4 * np.sqrt(share * (1 - share) / TOKENS) + 0.005


def test_what_they_miss_is_the_same_as_often_as_the_correlation_says() -> None:
    case = cases()[0]
    phi = []
    for correlation in (0.0, 0.5, 1.0):
        strong = hits(case, STRONG, 0, correlation)
        weak = hits(case, WEAK, 1, correlation)
        phi.append(float(np.corrcoef(strong, weak)[0, 1]))
        if correlation == 1:
            assert not (weak & ~strong).any(), "the weaker one knows nothing that the stronger one does not"
    assert abs(phi[0]) < 4 / np.sqrt(TOKENS)
    assert all(later > earlier + 0.1 for earlier, later in pairwise(phi))


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


def test_the_published_setting_is_read_with_its_drafters_and_domains() -> None:
    bench = read_experiment(find_experiment("cosine-published"))
    assert bench.drafters == tuple(each.name for each in bench.declared)
    assert {case.domain for case in read_cases(bench, None)} == set(bench.declared[0].domains)
    assert bench.correlation == 0.5


EXPERIMENT = """
model = "synthetic"
methods = ["ar"]
{}
[[testbed]]
name = "a"
devices = ["raspberry-pi-5"]
bandwidth_mbps = 1000
shape = "llama-2-7b"
"""


def read(tmp_path: Path, text: str) -> Bench:
    path = tmp_path / "experiment.toml"
    path.write_text(EXPERIMENT.format(text))
    return read_experiment(path)


ONE = '[[drafter]]\nname = "one"\nacceptance = { code = 0.5 }\n'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("correlation = 0.5\nacceptance = 0.5", "correlation: expected nothing without tables"),
        ("acceptance = 0.5\n" + ONE, "acceptance: expected nothing beside tables"),
        ("correlation = 1.5\n" + ONE, "correlation: expected a number from 0 to 1, got 1.5"),
        (ONE + ONE, "drafter 2: name: expected a name of its own, got 'one'"),
        (ONE.replace("0.5", "1.5"), "acceptance: code: expected a number above 0 to 0.99"),
        (ONE.replace("{ code = 0.5 }", "0.5"), "acceptance: expected a table"),
        (ONE.replace("code = 0.5", ""), "acceptance: expected a share for each domain"),
        (ONE + ONE.replace("one", "two").replace("code", "plays"), "expected the domains of one: code"),
        (ONE.replace("name", "nom"), "unknown key 'nom'"),
    ],
)
def test_what_is_wrong_with_a_declaration_is_one_line(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(InputError, match=told) as caught:
        read(tmp_path, text)
    assert "\n" not in str(caught.value)
