"""What is kept between runs: taken again as it was, refused where it is not what it should be; and kinds of
prompts are known again."""

from __future__ import annotations

import contextlib
import copy
import json
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.head.domains import ALIKE, BUCKETS, DOMAINS_MAX, KEPT_BUCKETS, Domains, sketch
from flowspec.core.head.head import HeadCore, HeadState
from flowspec.sim.world import World
from flowspec.validation import Misfit, fit
from tests.core.test_routes import Run

RUNS = {
    "continuous": {"qualities": (0.7,)},
    "cosine": {"qualities": (0.6, 0.9, 0.3)},
    "specrouter": {"qualities": (0.3, 0.97), "levels": (0, 1)},
}


def run(method: str, answers: int = 2) -> Run:
    return Run(method, **RUNS[method], answers=answers, tokens=40)  # type: ignore[arg-type]


def plain(head: HeadCore) -> Any:
    """What a head keeps, as a file has it."""
    return json.loads(msgspec.json.encode(head.state_dict()))


@pytest.fixture(scope="module", params=RUNS)
def learnt(request: pytest.FixtureRequest) -> tuple[str, Any]:
    """A method, and what a run of it keeps, as it comes back from a file."""
    world: World = run(request.param).world
    return request.param, plain(world.head)


def fresh(method: str) -> HeadCore:
    head: HeadCore = run(method, answers=0).world.head
    return head


def test_what_is_kept_is_taken_again_as_it_was(learnt: tuple[str, Any]) -> None:
    method, kept = learnt
    head = fresh(method)
    assert plain(head) != kept
    head.load_state_dict(fit(kept, HeadState))
    assert plain(head) == kept


def test_a_run_goes_on_from_what_is_kept() -> None:
    """A drafter that is never right, and one that is: the second run asks the first hardly at all."""
    first = Run("cosine", (0.0, 0.95), count=1, answers=3, tokens=40)
    second = Run("cosine", (0.0, 0.95), count=1, answers=0)
    second.world.head.load_state_dict(fit(plain(first.world.head), HeadState))
    second.world.at(0.0, second._submit(0, 40))
    second.world.run()
    assert second.asked[0] < 0.5 * first.asked[0] / 3
    assert len(second.method.expertise.domains) == len(first.method.expertise.domains)


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in plain data."""
    if path:
        yield path
    for key, value in (
        data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    ):
        yield from places(value, (*path, key))


WRONG = st.sampled_from([None, "text", -1e9, -7, 1.5, 10**400, True, [], {}, [[]], [None, 3], {"models": 5}])


@given(st.data())
def test_whatever_a_file_says_is_taken_or_refused_with_its_place(
    learnt: tuple[str, Any], data: st.DataObject
) -> None:
    method, kept = learnt
    changed = copy.deepcopy(kept)
    *path, key = data.draw(st.sampled_from(list(places(kept))))
    inner = changed
    for each in path:
        inner = inner[each]
    inner[key] = data.draw(WRONG)
    head = fresh(method)
    with contextlib.suppress(Misfit):
        head.load_state_dict(fit(changed, HeadState))
    fit(plain(head), HeadState)


def without(data: Any, *path: Any) -> Any:
    changed = copy.deepcopy(data)
    inner = changed
    for each in path[:-1]:
        inner = inner[each]
    del inner[path[-1]]
    return changed


COUNTED = {
    "continuous": [("turnaround_s", 0), ("calibrators", 0), ("fused", "hits", 0)],
    "cosine": [
        ("method", "expertise", "overall", "worth", 0),
        ("method", "team_size", "levels_s", 0),
        ("method", "domains", "domains", 0),
    ],
    "specrouter": [
        ("method", "expertise", "overall", "seen", 0),
        ("method", "domains", "domains", 0),
    ],
}


def test_what_is_of_other_drafters_or_lacks_something_is_refused(learnt: tuple[str, Any]) -> None:
    method, kept = learnt
    names = [path for path in places(kept) if isinstance(path[-1], str) and path[-2:-1] != ("domains",)]
    spoilt = [without(kept, *path) for path in (*COUNTED[method], *names)]
    other = "cosine" if method == "specrouter" else "specrouter"
    spoilt.append(plain(run(other).world.head))
    for changed in spoilt:
        head = fresh(method)
        with pytest.raises(Misfit):
            head.load_state_dict(fit(changed, HeadState))


# ---------------------------------------------------------------------------------------------------- domains

TEMPLATE = tuple(range(1, 20))
"""What every prompt begins with."""
CODE, PLAYS = (100, 101, 102, 103), (200, 201, 202, 203)


def test_prompts_of_the_same_rare_words_are_one_of_so_many_domains() -> None:
    domains = Domains()
    found = [
        domains.find((*TEMPLATE, *words)) for words in (CODE, PLAYS, CODE[1:], PLAYS[:3], (*CODE, *CODE))
    ]
    assert found == [0, 1, 0, 1, 0]
    assert domains.examples == [(*TEMPLATE, *CODE), (*TEMPLATE, *PLAYS)]
    domains = Domains()
    for number in range(3 * DOMAINS_MAX):
        domains.find((10 * number, 10 * number + 1))
    assert len(domains) == DOMAINS_MAX
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
    kept = before.state_dict()
    assert [len(each) for each in kept.domains] == [23, 23, KEPT_BUCKETS]
    after = Domains()
    after.load_state_dict(kept)
    assert after.state_dict() == kept
    assert after.examples == [(), (), ()]
    assert [after.find(prompt) for prompt in prompts] == found
    assert after.find((*TEMPLATE, 3_000, 3_001)) == len(found)
