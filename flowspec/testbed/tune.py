"""Finds each method's best parameters for a testbed, in virtual time and on other prompts than those that are reported.

One parameter after the other: each takes the best of a few values while the others stay, until a round changes nothing. What is best
is the harmonic mean over domains and temperatures, so that no domain is bought with another.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from flowspec.core.methods import METHODS
from flowspec.errors import FlowSpecError, InputError
from flowspec.testbed import virtual_runs
from flowspec.testbed.bench import Step, read_cases, warm_up_cases
from flowspec.testbed.config import TUNING_PROMPTS, Bench, Setup, Testbed
from flowspec.testbed.experiments import read_setups
from flowspec.testbed.outcome import Record
from flowspec.testbed.plain import Case
from flowspec.testbed.virtual_runs import Work

TUNED_FILE = "tuned.toml"
TUNED = " tuned"
PROMPTS = 12
ROUNDS_MAX = 2
GRIDS: dict[str, dict[str, Sequence[float]]] = {
    "tree-sd": {"nodes": (8, 16, 24, 32, 48, 64, 96), "depth": (4, 6, 8, 10, 14), "width": (4, 6, 10)},
    "chunk-pp": {"nodes": (16, 32, 48, 80, 120), "count": (2, 3, 5, 8), "depth": (4, 6, 8, 10), "width": (6, 10)},
    "pipedec": {"level_nodes": (2, 4, 8, 16, 24, 32), "width": (4, 10, 16)},
    "flowspec-paper": {"nodes": (32, 48, 80, 120), "expansion_nodes": (16, 32, 64), "depth": (3, 4, 5, 6, 8), "width": (6, 10)},
    "continuous": {"value_min": (0.002, 0.005, 0.01), "segment_nodes": (16, 32, 64), "window_slack": (0.0, 0.5, 1.0), "width": (8, 12, 16)},
}
"""Values for each parameter of each method, the order in which they are tried; methods start from their defaults."""

Start = Callable[[int, int], None]


def tune(bench: Bench, path: Path, jobs: int, start: Start, step: Step) -> tuple[Setup, ...]:
    """The best setup of each of the experiment's methods for each of its testbeds, written to `path`; what is there is kept."""
    known = read_setups(path) if path.exists() else ()
    methods = [name for name in METHODS if name in GRIDS and any(setup.method == name for setup in bench.setups)]
    todo = [
        (testbed, method)
        for testbed in bench.testbeds
        for method in methods
        if not any(setup.name == method + TUNED and setup.runs_on(testbed.name) for setup in known)
    ]
    if not todo:
        return known
    tuning = replace(bench, prompts=(TUNING_PROMPTS,), limit=PROMPTS)
    path.parent.mkdir(parents=True, exist_ok=True)
    cases = read_cases(tuning, path.with_name("tuning-answers.json"))
    start(sum(sum(len(values) for values in GRIDS[method].values()) for _, method in todo), 0)
    found = list(known)
    with _pool(tuning, cases, jobs) as pool:
        for testbed, method in todo:
            best = _best(testbed, method, cases, pool, step)
            found.append(replace(best, name=method + TUNED, testbeds=(testbed.name,)))
            _write(path, found)
    return tuple(found)


class _pool:
    """Worker processes that keep what drafters said, or none for one job; ended at once by an error."""

    def __init__(self, bench: Bench, cases: Sequence[Case], jobs: int) -> None:
        arguments = (bench, warm_up_cases(cases)[::2], True)
        self._executor = ProcessPoolExecutor(jobs, get_context("spawn"), virtual_runs.start_worker, arguments) if jobs > 1 else None
        self._runs = None if jobs > 1 else virtual_runs.VirtualRuns(*arguments[:2], keeps=True)

    def __enter__(self) -> _pool:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=kind is None, cancel_futures=True)
            for process in list((self._executor._processes or {}).values()):
                process.terminate()

    def records(self, work: Sequence[Work]) -> Iterator[list[Record]]:
        if self._runs is not None:
            yield from (self._runs.records(one) for one in work)
            return
        assert self._executor is not None
        for result in self._executor.map(virtual_runs.work, work):
            if isinstance(result, FlowSpecError):
                raise result
            yield result


def _best(testbed: Testbed, method: str, cases: Sequence[Case], pool: _pool, step: Step) -> Setup:
    rates: dict[str, float] = {}

    def rate_all(setups: Sequence[Setup]) -> None:
        """All of these at once, so that every worker has something to do."""
        fresh = {_named(setup).name: _named(setup) for setup in setups if _named(setup).name not in rates}
        by_name: dict[str, list[Record]] = defaultdict(list)
        jobs = tuple((testbed, setup) for setup in fresh.values())
        if jobs:
            for records in pool.records([Work(number=number, case=case, jobs=jobs) for number, case in enumerate(cases)]):
                for record in records:
                    by_name[record.method].append(record)
            rates.update({name: _mean_rate(records) for name, records in by_name.items()})

    best = Setup(name=method, method=method)
    for round_number in range(ROUNDS_MAX):
        before = best
        for parameter, values in GRIDS[method].items():
            tried = [best, *(replace(best, options={**best.options, parameter: value}) for value in values)]
            rate_all(tried)
            best = max(tried, key=lambda setup: rates[_named(setup).name])
            if round_number == 0:
                step(f"{testbed.name}: {method}", len(values))
        if best == before:
            break
    return best


def _named(setup: Setup) -> Setup:
    """Under a name that says its parameters, for what heads learn belongs to it alone."""
    return replace(setup, name=f"{setup.method} {json.dumps(dict(setup.options), sort_keys=True)}")


def _mean_rate(records: Sequence[Record]) -> float:
    """The harmonic mean over domains and temperatures of tokens by time."""
    tokens: dict[tuple[str, float], float] = defaultdict(float)
    time_s: dict[tuple[str, float], float] = defaultdict(float)
    for record in records:
        if record.agreement != "exact":
            raise InputError(f"{record.method} gave another answer than plain decoding to prompt {record.prompt_id}")
        tokens[record.domain, record.temperature] += max(0, record.new_tokens - 1)
        time_s[record.domain, record.temperature] += record.decode_s
    cells = [time_s[cell] / tokens[cell] for cell in tokens if tokens[cell]]
    return len(cells) / sum(cells) if cells else 0.0


def _write(path: Path, setups: Sequence[Setup]) -> None:
    tables = [_table(setup) for setup in setups]
    path.write_text("# Found by `flowspec bench --tune`; delete it to tune again.\n\n" + "\n".join(tables), "utf-8")


def _table(setup: Setup) -> str:
    entries: dict[str, Any] = {"name": setup.name, "method": setup.method, "testbeds": list(setup.testbeds), **setup.options}
    return "[[method]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in entries.items())
