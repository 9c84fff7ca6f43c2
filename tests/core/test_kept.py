"""What is kept between runs: taken again as it was, refused where it is not what it should be."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.head.head import HeadCore
from flowspec.core.head.kept import Kept
from flowspec.sim.world import World
from tests.core.test_routes import Run

RUNS = {
    "continuous": {"qualities": (0.7,)},
    "cosine": {"qualities": (0.6, 0.9, 0.3)},
    "specrouter": {"qualities": (0.3, 0.97), "levels": (0, 1)},
}


def run(method: str, answers: int = 2) -> Run:
    return Run(method, **RUNS[method], answers=answers, tokens=40)  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=RUNS)
def learnt(request: pytest.FixtureRequest) -> tuple[str, Any]:
    """A method, and what a run of it keeps, as it comes back from a file."""
    world: World = run(request.param).world
    return request.param, json.loads(json.dumps(world.head.kept(), allow_nan=False))


def fresh(method: str) -> HeadCore:
    head: HeadCore = run(method, answers=0).world.head
    return head


def test_what_is_kept_is_taken_again_as_it_was(learnt: tuple[str, Any]) -> None:
    method, kept = learnt
    head = fresh(method)
    assert json.loads(json.dumps(head.kept())) != kept
    head.recall(kept)
    found = json.loads(json.dumps(head.kept()))
    if method == "cosine":  # tokens until the next trial are counted anew
        assert found["method"]["team_size"] == kept["method"]["team_size"]
    assert found == kept


def test_a_run_goes_on_from_what_is_kept() -> None:
    """A drafter that is never right, and one that is: the second run asks the first hardly at all."""
    first = Run("cosine", (0.0, 0.95), count=1, answers=3, tokens=40)
    second = Run("cosine", (0.0, 0.95), count=1, answers=0)
    second.world.head.recall(json.loads(json.dumps(first.world.head.kept())))
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
    told = ""
    try:
        head.recall(changed)
    except ValueError as error:
        told = str(error)
    assert not told or re.match(r"learnt\S*: expected ", told)
    json.dumps(head.kept(), allow_nan=False)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"seen": []}, "learnt.worth: expected a value, got none"),
        ({"worth": 3}, "learnt.worth: expected a list, got '3'"),
        ({"worth": [0.5]}, "learnt.worth: expected 2 values, got 1"),
        ({"worth": [0.5, 1.5]}, "learnt.worth[1]: expected a number from 0 to 1, got '1.5'"),
        ({"worth": [0.5, True]}, "learnt.worth[1]: expected a number, got 'True'"),
        ([], "learnt: expected names with values, got '[]'"),
    ],
)
def test_the_line_says_where_and_what(data: Any, told: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(told)}$"):
        Kept(data)["worth"].numbers(2, most=1.0)
