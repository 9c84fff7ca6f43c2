"""Kinds of prompts are found in what they use, and known again after a run."""

from __future__ import annotations

import json
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.head.domains import ALIKE, BUCKETS, DOMAINS_MAX, KEPT_BUCKETS, Domains, sketch
from flowspec.core.head.kept import Kept

TEMPLATE = tuple(range(1, 20))
"""What every prompt begins with."""
CODE, PLAYS = (100, 101, 102, 103), (200, 201, 202, 203)


def test_prompts_of_the_same_rare_words_are_one_domain_whatever_all_prompts_share() -> None:
    domains = Domains()
    found = [
        domains.find((*TEMPLATE, *words)) for words in (CODE, PLAYS, CODE[1:], PLAYS[:3], (*CODE, *CODE))
    ]
    assert found == [0, 1, 0, 1, 0]
    assert domains.examples == [(*TEMPLATE, *CODE), (*TEMPLATE, *PLAYS)]


def test_there_are_so_many_domains_and_no_more() -> None:
    domains = Domains()
    for number in range(3 * DOMAINS_MAX):
        domains.find((10 * number, 10 * number + 1))
    assert len(domains) == DOMAINS_MAX


def test_an_empty_prompt_and_one_of_a_single_word_have_a_domain_too() -> None:
    domains = Domains()
    assert [domains.find(prompt) for prompt in ((), (7,), (7,))] == [0, 1, 1]
    assert not sketch(()).any()


class Slowly:
    """The same by hand: a dictionary of weights for each prompt and domain."""

    def __init__(self) -> None:
        self.used: Counter[int] = Counter()
        self.prompts = 0
        self.centres: list[Counter[int]] = []

    def likeness(self, prompt: tuple[int, ...]) -> list[float]:
        """Of each domain so far with a new prompt, which becomes one of those that are counted."""
        found = {word % BUCKETS: 1 + math.log(count) for word, count in Counter(prompt).items()}
        self.prompts += 1
        self.used.update(found.keys())

        def weighted(sketch: dict[int, float]) -> dict[int, float]:
            return {
                word: weight
                * math.log((self.prompts + 0.2) / self.used[word])
                * math.log(1 + self.used[word])
                for word, weight in sketch.items()
            }

        def cosine(one: dict[int, float], other: dict[int, float]) -> float:
            lengths = [math.sqrt(sum(each * each for each in side.values())) for side in (one, other)]
            return sum(one.get(word, 0.0) * other[word] for word in other) / math.prod(lengths)

        return [cosine(weighted(centre), weighted(found)) for centre in self.centres]

    def add(self, domain: int, prompt: tuple[int, ...]) -> None:
        if domain == len(self.centres):
            self.centres.append(Counter())
        for word, count in Counter(prompt).items():
            self.centres[domain][word % BUCKETS] += 1 + math.log(count)  # type: ignore[assignment]


@given(
    st.lists(
        st.lists(st.integers(0, 30).map(lambda word: word * 3), min_size=1, max_size=12).map(tuple),
        min_size=1,
        max_size=12,
    )
)
def test_a_prompt_belongs_to_the_domain_most_like_it(prompts: list[tuple[int, ...]]) -> None:
    domains, slowly = Domains(), Slowly()
    for prompt in prompts:
        likeness = slowly.likeness(prompt)
        found = domains.find(prompt)
        most = max(likeness, default=0.0)
        if found == len(likeness):
            assert most < ALIKE + 1e-9
        else:
            assert likeness[found] == pytest.approx(most)
            assert most > ALIKE - 1e-9
        slowly.add(found, prompt)


def test_domains_are_known_again_after_a_run() -> None:
    """By the buckets that they use most; of the text nothing is kept."""
    before = Domains()
    prompts = [(*TEMPLATE, *words) for words in (CODE, PLAYS, tuple(range(1_000, 1_000 + 2 * KEPT_BUCKETS)))]
    found = [before.find(prompt) for prompt in prompts]
    kept = json.loads(json.dumps(before.kept()))
    assert [len(each["words"]) for each in kept["domains"]] == [23, 23, KEPT_BUCKETS]
    after = Domains()
    after.recall(Kept(kept))
    assert after.kept() == kept
    assert after.examples == [(), (), ()]
    assert [after.find(prompt) for prompt in prompts] == found
    assert after.find((*TEMPLATE, 3_000, 3_001)) == len(found)
