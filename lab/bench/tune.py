"""Finds each method's best parameters for a testbed, on other prompts than those that are reported.

One parameter after the other: each takes the best of a few values while the others stay, until a round
changes nothing. What is best is the harmonic mean over domains, so that none is bought with another. The
experiment's first temperature decides: with coupled drafting trees that are good at one are good at another.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from msgspec import structs

from flowspec.bench.cases import PlainCase, warm_up_cases
from flowspec.bench.console import Step, progress
from flowspec.bench.engine import Engine, Work, Workers, open_workers
from flowspec.bench.experiment import TUNING_PROMPTS, Setup, Testbed, read_setups
from flowspec.bench.records import EXACT, Record
from flowspec.bench.statistics import OVERALL, TUNED, rates, sums
from flowspec.core.methods import ALL
from flowspec.errors import FlowSpecError, InputError
from flowspec.folders import write_whole
from flowspec.plan.tables import toml_of
from lab.bench.experiment import Study, open_drafter_of

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


def tune(study: Study, path: Path, jobs: int, *, quiet: bool = False) -> list[Setup]:
    """The best setup of each of the experiment's methods for each of its testbeds; those that `path` has
    stay, others are written to it."""
    if len(study.drafters) > 1 or study.is_load:
        raise InputError("--tune works on single answers with one drafter: expected such an experiment")
    methods = {setup.method for setup in study.setups}
    known = list(read_setups(path)) if path.exists() else []
    places = {(setup.method, *setup.testbeds) for setup in known}
    todo = [
        (testbed, name)
        for testbed in study.testbeds
        for name in GRIDS
        if name in methods and (name, testbed.name) not in places
    ]
    tuning = structs.replace(
        study,
        prompts=(TUNING_PROMPTS,),
        limit=PROMPTS,
        temperatures=study.temperatures[:1],
        new_tokens=min(NEW_TOKENS_MAX, study.new_tokens),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    cases = tuning.cases(path.with_name(ANSWERS), for_tuning=True) if todo else []
    make = partial(Engine, tuning, warm_up_cases(cases, 1), keeps=True, open_drafter=open_drafter_of)
    values = sum(len(values) for _, name in todo for values in GRIDS[name].values())
    with progress("tuning", values, quiet=quiet) as step, open_workers(make, jobs) as workers:
        for testbed, name in todo:
            best = _best(testbed, name, cases, workers, step)
            known.append(replace(best, name=name + TUNED, testbeds=(testbed.name,)))
            tables = [
                {"name": each.name, "method": each.method, "testbeds": each.testbeds, **each.options}
                for each in known
            ]
            note = "# Found by `python -m lab.bench --tune`; delete it to tune again.\n\n"
            write_whole(path, (note + toml_of({"method": tables})).encode())
    return [setup for setup in known if setup.method in methods]


def _best(testbed: Testbed, method: str, cases: Sequence[PlainCase], workers: Workers, step: Step) -> Setup:
    of_name: dict[str, float] = {}

    def rate_all(setups: Sequence[Setup]) -> None:
        """All of these at once, so that every worker has something to do."""
        jobs = tuple((testbed, _named(setup)) for setup in setups if _named(setup).name not in of_name)
        works = [Work(asked=case, jobs=jobs) for case in cases if jobs]
        by_name: dict[str, list[Record]] = defaultdict(list)
        for records in workers(Engine.records, works):
            for record in records:
                by_name[record.method].append(record)
        for name, some in by_name.items():
            if any(record.agreement != EXACT for record in some):
                raise FlowSpecError(f"{name} gave another answer than plain decoding")
            of_name[name] = rates(sums(some)).get(OVERALL, 0.0)

    best = Setup(name=method, method=method)
    for round_number in range(ROUNDS_MAX):
        before = best
        for parameter, values in GRIDS[method].items():
            tried = [best, *(replace(best, options={**best.options, parameter: value}) for value in values)]
            rate_all(tried)
            best = max(tried, key=lambda setup: of_name[_named(setup).name])
            if round_number == 0:
                step(f"{testbed.name}: {method}", len(values))
        if best == before:
            break
    return best


def _named(setup: Setup) -> Setup:
    """Under a name that says its parameters, for what heads learn belongs to it alone."""
    return replace(setup, name=f"{setup.method} {json.dumps(dict(setup.options), sort_keys=True)}")
