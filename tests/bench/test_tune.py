"""Tuning: the best of the grid along its coordinates, for each testbed its own, kept when it is run again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowspec.bench import tune as tune_module
from flowspec.bench.bench import TUNED_FILE, read_cases, warm_up_cases
from flowspec.bench.config import TUNING_PROMPTS, Bench, Setup, Testbed
from flowspec.bench.experiments import read_setups
from flowspec.bench.outcome import WRONG
from flowspec.bench.tune import GRIDS, todo_of, total, tune
from flowspec.bench.virtual_runs import VirtualRuns, Work
from flowspec.errors import FlowSpecError
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


class Bar:
    """What a bar would have shown."""

    def __init__(self) -> None:
        self.total = 0
        self.steps: list[tuple[str, int]] = []

    def step(self, text: str, count: int) -> None:
        self.steps.append((text, count))


def tuned(bench: Bench, path: Path, jobs: int = 1) -> tuple[tuple[Setup, ...], Bar]:
    bar = Bar()
    bar.total = total(todo_of(bench, path))
    return tune(bench, path, jobs, bar.step), bar


RATES: dict[str, float] = {}


def rate(testbed: Testbed, method: str, options: Mapping[str, Any]) -> float:
    """The harmonic mean over temperatures of tokens by time."""
    key = f"{testbed.name} {method} {sorted(options.items())}"
    if key not in RATES:
        RATES[key] = _rate(testbed, method, options)
    return RATES[key]


def _rate(testbed: Testbed, method: str, options: Mapping[str, Any]) -> float:
    cases = read_cases(replace(BENCH, limit=1), None, for_tuning=True)
    runs = VirtualRuns(BENCH, warm_up_cases(BENCH, cases, 1))
    setup = Setup(name="a", method=method, options=options)
    time_s: dict[float, float] = defaultdict(float)
    for number, case in enumerate(cases):
        (record,) = runs.records(Work(number=number, case=case, jobs=((testbed, setup),)))
        time_s[case.sampling.temperature] += record.decode_s
    return 2 / sum(each / (BENCH.new_tokens - 1) for each in time_s.values())


def best_by_hand(testbed: Testbed, method: str) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(2):
        for parameter, values in SMALL[method].items():
            tried = [found, *(found | {parameter: value} for value in values)]
            found = max(tried, key=lambda options: rate(testbed, method, options))
    return found


def test_the_best_of_the_grid_is_found_for_each_testbed(tmp_path: Path) -> None:
    path = tmp_path / "deep" / TUNED_FILE
    found, bar = tuned(BENCH, path)
    assert [(one.name, one.method, one.testbeds) for one in found] == [
        ("tree-sd tuned", "tree-sd", ("a Jetson",)),
        ("tree-sd tuned", "tree-sd", ("a Pi",)),
    ], "ar has nothing to tune, and continuous is not in the experiment"
    for one, testbed in zip(found, (JETSON, PI), strict=True):
        assert dict(one.options) == best_by_hand(testbed, "tree-sd")
        assert (one.coupled, one.published) == (True, False)
    assert found[0].options != found[1].options, "a Pi pays for every node"
    assert bar.total == 8
    assert bar.steps == [("a Jetson: tree-sd", 2)] * 2 + [("a Pi: tree-sd", 2)] * 2
    assert read_setups(path) == found, "the file says the same"

    again, bar = tuned(BENCH, path)
    assert again == found
    assert (bar.total, bar.steps) == (0, []), "nothing is tuned twice"


def test_what_a_file_has_is_kept_and_the_rest_is_added(tmp_path: Path) -> None:
    path = tmp_path / TUNED_FILE
    path.write_text(
        '[[method]]\nname = "tree-sd tuned"\nmethod = "tree-sd"\ntestbeds = ["a Pi"]\nnodes = 7\n'
    )
    (kept,) = read_setups(path)
    bench = replace(BENCH, setups=(*BENCH.setups, Setup(name="continuous", method="continuous")))
    found, bar = tuned(bench, path, jobs=2)
    assert bar.total == 8
    assert found[0] == kept
    assert [(one.name, one.testbeds) for one in found[1:]] == [
        ("continuous tuned", ("a Jetson",)),
        ("tree-sd tuned", ("a Jetson",)),
        ("continuous tuned", ("a Pi",)),
    ]
    assert read_setups(path) == found
    assert dict(found[2].options) == best_by_hand(JETSON, "tree-sd"), "the same as in one process"
    only, _ = tuned(BENCH, path)
    assert {one.method for one in only} == {"tree-sd"}, "others stay in the file, but are not run"


def test_an_interruption_keeps_what_is_tuned(tmp_path: Path) -> None:
    path = tmp_path / TUNED_FILE

    def interrupt(text: str, count: int) -> None:
        if text.startswith("a Pi"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(BENCH, path, 1, interrupt)
    assert [one.testbeds for one in read_setups(path)] == [("a Jetson",)]
    assert [one.name for one in tmp_path.iterdir()] == [TUNED_FILE]
    _, bar = tuned(BENCH, path)
    assert bar.total == 4


def test_a_wrong_answer_ends_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = VirtualRuns.records
    monkeypatch.setattr(
        VirtualRuns,
        "records",
        lambda self, work: [replace(one, agreement=WRONG) for one in right(self, work)],
    )
    with pytest.raises(
        FlowSpecError, match=r"tree-sd \{\} gave another answer than plain decoding to prompt 1000001"
    ) as caught:
        tuned(BENCH, tmp_path / TUNED_FILE)
    assert caught.value.exit_status == 1


def test_prompts_for_tuning_are_never_those_that_are_reported() -> None:
    cases, reported = (read_cases(synthetic(limit=50), None, for_tuning=each) for each in (True, False))
    assert len(cases) == len(reported) == 100
    assert {case.prompt for case in cases}.isdisjoint(case.prompt for case in reported)
    shipped, tuning = (_texts(name) for name in ("shipped", TUNING_PROMPTS))
    assert len(tuning) >= 12
    assert shipped.isdisjoint(tuning)


def _texts(name: str) -> set[tuple[str, ...]]:
    from flowspec.bench.config import prompt_path
    from flowspec.model.prompts import read_prompts

    return {prompt.turns for prompt in read_prompts(prompt_path(name))}


def test_every_value_of_the_grids_may_stand_in_a_file(tmp_path: Path) -> None:
    for method, grid in GRIDS.items():
        for parameter, values in grid.items():
            for value in values:
                (tmp_path / "a.toml").write_text(
                    f'[[method]]\nname = "a"\nmethod = "{method}"\n{parameter} = {value}\n'
                )
                assert read_setups(tmp_path / "a.toml")[0].options == {parameter: value}
