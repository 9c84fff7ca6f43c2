"""Finds each method's best parameters for a testbed, in virtual time and on other prompts than those that are
reported.

One parameter after the other: each takes the best of a few values while the others stay, until a round
changes nothing. What is best is the harmonic mean over domains, so that none is bought with another. The
experiment's first temperature decides: with coupled drafting trees that are good at one are good at another.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from msgspec import structs

from flowspec.bench.bench import Step, read_cases, warm_up_cases
from flowspec.bench.config import TUNING_PROMPTS, Bench, Setup, Testbed
from flowspec.bench.experiments import read_setups
from flowspec.bench.outcome import EXACT, Record
from flowspec.bench.plain import PlainCase
from flowspec.bench.summary import TUNED
from flowspec.bench.virtual_runs import VirtualRuns, Work, Workers, open_workers
from flowspec.core.methods import ALL, METHODS
from flowspec.errors import FlowSpecError
from flowspec.folders import write_whole
from flowspec.plan.tables import toml_of

ANSWERS = "tuning-answers.json"
PROMPTS = 6
NEW_TOKENS_MAX = 64
ROUNDS_MAX = 2
GRIDS: Mapping[str, Mapping[str, Sequence[float]]] = {
    method.name: grid
    for method in ALL
    if not method.suits_team and (grid := {each.name: each.tried for each in method.parameters if each.tried})
}
"""Values for each parameter of each method for one drafter, in the order in which they are tried; methods
start from their defaults."""


def todo_of(bench: Bench, path: Path) -> list[tuple[Testbed, str]]:
    """The experiment's methods on its testbeds that `path` has no parameters for."""
    found = list(read_setups(path)) if path.exists() else []
    return [
        (testbed, method)
        for testbed in bench.testbeds
        for method in _methods(bench)
        if not any(setup.name == method + TUNED and setup.runs_on(testbed.name) for setup in found)
    ]


def _methods(bench: Bench) -> list[str]:
    return [name for name in METHODS if name in GRIDS and any(setup.method == name for setup in bench.setups)]


def total(todo: Sequence[tuple[Testbed, str]]) -> int:
    """Values to try, which are a tuning's steps."""
    return sum(sum(len(values) for values in GRIDS[method].values()) for _, method in todo)


def tune(bench: Bench, path: Path, jobs: int, step: Step) -> tuple[Setup, ...]:
    """The best setup of each of the experiment's methods for each of its testbeds; those that `path` has are
    kept, others written to it."""
    found = list(read_setups(path)) if path.exists() else []
    todo = todo_of(bench, path)
    if todo:
        tuning = structs.replace(
            bench,
            prompts=(TUNING_PROMPTS,),
            limit=PROMPTS,
            temperatures=bench.temperatures[:1],
            new_tokens=min(NEW_TOKENS_MAX, bench.new_tokens),
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        cases = read_cases(tuning, path.with_name(ANSWERS), for_tuning=True)
        with open_workers(
            tuning, warm_up_cases(tuning, cases, 1), jobs, VirtualRuns.records, keeps=True
        ) as run:
            for testbed, method in todo:
                best = _best(testbed, method, cases, run, step)
                found.append(replace(best, name=method + TUNED, testbeds=(testbed.name,)))
                _write(path, found)
    return tuple(setup for setup in found if setup.method in _methods(bench))


def _best(
    testbed: Testbed, method: str, cases: Sequence[PlainCase], run: Workers[Work, list[Record]], step: Step
) -> Setup:
    rates: dict[str, float] = {}

    def rate_all(setups: Sequence[Setup]) -> None:
        """All of these at once, so that every worker has something to do."""
        fresh = {_named(setup).name: _named(setup) for setup in setups if _named(setup).name not in rates}
        jobs = tuple((testbed, setup) for setup in fresh.values())
        if jobs:
            done = list(run([Work(number=number, case=case, jobs=jobs) for number, case in enumerate(cases)]))
            by_name: dict[str, list[Record]] = defaultdict(list)
            for _, records in sorted(
                done, key=lambda each: each[0].number
            ):  # sums of floats depend on their order
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
    """The harmonic mean over domains of tokens by time."""
    tokens: dict[str, float] = defaultdict(float)
    time_s: dict[str, float] = defaultdict(float)
    for record in records:
        if record.agreement != EXACT:
            raise FlowSpecError(
                f"{record.method} gave another answer than plain decoding to prompt {record.prompt_id}"
            )
        tokens[record.domain] += max(0, record.new_tokens - 1)
        time_s[record.domain] += record.decode_s
    paces = [time_s[domain] / tokens[domain] for domain in tokens if tokens[domain]]
    return len(paces) / sum(paces) if paces else 0.0


def _write(path: Path, setups: Sequence[Setup]) -> None:
    tables = [
        {"name": each.name, "method": each.method, "testbeds": each.testbeds, **each.options}
        for each in setups
    ]
    note = "# Found by `flowspec bench --tune`; delete it to tune again.\n\n"
    write_whole(path, (note + toml_of({"method": tables})).encode())
