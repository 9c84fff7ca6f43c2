"""Tuning: the best of the grid along its coordinates, for each testbed its own, kept when it is run again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from flowspec.bench.bench import TUNED_FILE, read_cases, warm_up_cases
from flowspec.bench.config import TUNING_PROMPTS, Bench, Setup, Testbed, prompt_path
from flowspec.bench.experiments import read_setups
from flowspec.bench.tune import todo_of, total, tune
from flowspec.bench.virtual_runs import VirtualRuns, Work
from msgspec import structs

from flowspec.bench import tune as tune_module
from flowspec.bench.cases import read_prompts
from tests.bench.benches import boards, synthetic

SMALL: dict[str, dict[str, Any]] = {
    "tree-sd": {"nodes": (2, 16), "depth": (2, 5)},
    "continuous": {"segment_nodes": (4, 64)},
}
JETSON, PI = boards(2, name="a Jetson"), boards(2, "raspberry-pi-4", "a Pi")
BENCH = synthetic(
    testbeds=(JETSON, PI),
    setups=(
        Setup(name="ar", method="ar"),
        Setup(name="tree-sd (published)", method="tree-sd", published=True),
    ),
    new_tokens=8,
)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_module, "GRIDS", SMALL)
    monkeypatch.setattr(tune_module, "PROMPTS", 1)


def tuned(bench: Bench, path: Path) -> tuple[tuple[Setup, ...], list[tuple[str, int]]]:
    """What was found, and what was told of it on the way."""
    expected, told = total(todo_of(bench, path)), list[tuple[str, int]]()
    found = tune(bench, path, 1, lambda text, count: told.append((text, count)))
    assert sum(count for _, count in told) == expected
    return found, told


def rate(testbed: Testbed, options: Mapping[str, Any]) -> float:
    """The harmonic mean over temperatures of tokens by time."""
    cases = read_cases(structs.replace(BENCH, limit=1), None, for_tuning=True)
    runs = VirtualRuns(BENCH, warm_up_cases(BENCH, cases, 1))
    setup = Setup(name="a", method="tree-sd", options=options)
    works = [Work(number=at, case=case, jobs=((testbed, setup),)) for at, case in enumerate(cases)]
    return 1 / sum(record.decode_s for work in works for record in runs.records(work))


def test_the_best_of_the_grid_is_found_for_each_testbed_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "deep" / TUNED_FILE
    found, told = tuned(BENCH, path)
    assert [(one.name, one.method, one.testbeds) for one in found] == [
        ("tree-sd tuned", "tree-sd", ("a Jetson",)),
        ("tree-sd tuned", "tree-sd", ("a Pi",)),
    ], "ar has nothing to tune, and continuous is not in the experiment"
    alone = [{name: value} for name, values in SMALL["tree-sd"].items() for value in values]
    for one, testbed in zip(found, (JETSON, PI), strict=True):
        assert rate(testbed, one.options) == max(rate(testbed, each) for each in (one.options, *alone))
    assert found[0].options != found[1].options, "a Pi pays for every node"
    assert len(told) == 4
    assert read_setups(path) == found, "the file says the same"
    assert tuned(BENCH, path) == (found, []), "nothing is tuned twice"
    more = structs.replace(BENCH, setups=(*BENCH.setups, Setup(name="continuous", method="continuous")))
    both, told = tuned(more, path)
    assert all(one in both for one in found), "what a file has is kept"
    assert {text for text, _ in told} == {"a Jetson: continuous", "a Pi: continuous"}
    assert tuned(BENCH, path) == (found, []), "others stay in the file, but are not run"


def test_an_interruption_keeps_what_is_tuned(tmp_path: Path) -> None:
    path = tmp_path / TUNED_FILE

    def interrupt(text: str, count: int) -> None:
        if text.startswith("a Pi"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(BENCH, path, 1, interrupt)
    assert [one.testbeds for one in read_setups(path)] == [("a Jetson",)]
    _, told = tuned(BENCH, path)
    assert {text for text, _ in told} == {"a Pi: tree-sd"}


def test_prompts_for_tuning_are_never_those_that_are_reported() -> None:
    cases, reported = (read_cases(synthetic(limit=50), None, for_tuning=each) for each in (True, False))
    assert len(cases) == len(reported) == 100
    assert {case.prompt for case in cases}.isdisjoint(case.prompt for case in reported)
    shipped, tuning = (
        {prompt.turns for prompt in read_prompts(prompt_path(name))} for name in ("shipped", TUNING_PROMPTS)
    )
    assert len(tuning) >= 12
    assert shipped.isdisjoint(tuning)
