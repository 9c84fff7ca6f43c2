"""Runs an experiment's loads of steps: each testbed and setup, kept the moment it is there, in several
processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flowspec.bench.bench import LOADS, Step, warm_up_cases
from flowspec.bench.config import SIMULATED, Bench
from flowspec.bench.load_steps import StepsKey, StepsRecord, run_step_load
from flowspec.bench.plain import PlainCase
from flowspec.bench.virtual_runs import Job, VirtualRuns, open_workers


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsWork:
    """The cases that users ask in all steps, on one testbed with one setup."""

    cases: tuple[PlainCase, ...]
    job: Job


def record_of(runs: VirtualRuns, work: StepsWork) -> StepsRecord:
    testbed, setup = work.job
    experience = runs.learnt_by(testbed, setup, work.cases[0].sampling.temperature)
    found = run_step_load(runs.bench, testbed, setup, work.cases, partial(runs.drafters, setup), experience)
    runs.finish(found)
    runs.end()
    return found


def run_step_loads(
    bench: Bench, cases: Sequence[PlainCase], done: Sequence[StepsRecord], out: Path, jobs: int, step: Step
) -> list[StepsRecord]:
    """The loads that are missing, in `jobs` processes, and those that are `done`, in the experiment's
    order."""
    assert bench.world == SIMULATED
    work = list(pending(bench, cases, {record.key for record in done}))
    found = list(done)
    with open_workers(
        bench,
        warm_up_cases(bench, cases),
        max(1, min(jobs, len(work))),
        record_of,
        kept=out / LOADS,
        finished=lambda count: step("loads", count),
    ) as run:
        for _, record in run(work):
            found.append(record)
    testbeds = {testbed.name: at for at, testbed in enumerate(bench.testbeds)}
    setups = {setup.name: at for at, setup in enumerate(bench.setups)}
    return sorted(
        found,
        key=lambda record: (
            testbeds[record.testbed],
            record.temperature,
            record.seed,
            setups[record.method],
        ),
    )


def pending(bench: Bench, cases: Sequence[PlainCase], done: set[StepsKey]) -> Iterator[StepsWork]:
    """What is still to be run, by sampling."""
    for sampling in dict.fromkeys(case.sampling for case in cases):
        asked = tuple(case for case in cases if case.sampling == sampling)
        for testbed in bench.testbeds:
            for setup in bench.setups:
                key = (testbed.name, setup.name, sampling.temperature, sampling.seed)
                if setup.runs_on(testbed.name) and key not in done:
                    yield StepsWork(cases=asked, job=(testbed, setup))


def total(bench: Bench, cases: Sequence[PlainCase]) -> int:
    return len(list(pending(bench, cases, set())))
