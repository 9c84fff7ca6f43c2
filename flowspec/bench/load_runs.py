"""Runs an experiment's loads: each testbed, setup and number of users, kept the moment it is there, in
several processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowspec.bench.bench import LOADS, Step, warm_up_cases
from flowspec.bench.config import SIMULATED, Bench
from flowspec.bench.load import LoadKey, LoadRecord, drawn, run_load
from flowspec.bench.plain import PlainCase
from flowspec.bench.virtual_runs import Job, VirtualRuns, open_workers
from flowspec.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWork:
    """The cases that so many users ask, on some testbeds with some setups; what drafters say is computed once
    for all of these."""

    users: int
    cases: tuple[PlainCase, ...]
    jobs: tuple[Job, ...]


def loads_of(runs: VirtualRuns, work: LoadWork) -> list[LoadRecord]:
    found = []
    for testbed, setup in work.jobs:
        drafters = [runs.drafters(setup, case) for case in work.cases]
        experience = runs.learnt_by(testbed, setup, work.cases[0].sampling.temperature)
        one = run_load(runs.bench, testbed, setup, work.users, work.cases, drafters, experience)
        found.append(one)
        runs.finish(one)
    runs.end()
    return found


def run_loads(
    bench: Bench, cases: Sequence[PlainCase], done: Sequence[LoadRecord], out: Path, jobs: int, step: Step
) -> list[LoadRecord]:
    """The loads that are missing, in `jobs` processes, and those that are `done`, in the experiment's
    order."""
    assert bench.world == SIMULATED
    work = list(pending(bench, cases, {record.key for record in done}))
    found = list(done)
    with open_workers(
        bench,
        warm_up_cases(bench, cases),
        max(1, min(jobs, len(work))),
        loads_of,
        kept=out / LOADS,
        finished=lambda count: step("loads", count),
    ) as run:
        for _, records in run(work):
            found += records
    return in_order(bench, found)


def pending(bench: Bench, cases: Sequence[PlainCase], done: set[LoadKey]) -> Iterator[LoadWork]:
    """What is still to be run, by users and sampling."""
    for sampling in dict.fromkeys(case.sampling for case in cases):
        some = [case for case in cases if case.sampling == sampling]
        asked = tuple(drawn(some, bench.answers or len(some), bench.seeds[0]))
        for users in bench.users:
            if users > len(asked):
                raise InputError(
                    f"{users} users have {len(asked)} answers to wait for; give at least one each (--answers)"
                )
            jobs = tuple(
                (testbed, setup)
                for testbed in bench.testbeds
                for setup in bench.setups
                if setup.runs_on(testbed.name)
                and (testbed.name, setup.name, users, sampling.temperature, sampling.seed) not in done
            )
            if jobs:
                yield LoadWork(users=users, cases=asked, jobs=jobs)


def in_order(bench: Bench, records: Sequence[LoadRecord]) -> list[LoadRecord]:
    """Whatever order they were made in, so that equal runs give equal files."""
    testbeds = {testbed.name: at for at, testbed in enumerate(bench.testbeds)}
    setups = {setup.name: at for at, setup in enumerate(bench.setups)}

    def place(record: LoadRecord) -> tuple[float, ...]:
        return (
            testbeds[record.testbed],
            record.temperature,
            record.seed,
            record.users,
            setups[record.method],
        )

    return sorted(records, key=place)


def total(bench: Bench, cases: Sequence[PlainCase]) -> int:
    samplings = len(dict.fromkeys(case.sampling for case in cases))
    return (
        samplings
        * len(bench.users)
        * sum(setup.runs_on(testbed.name) for testbed in bench.testbeds for setup in bench.setups)
    )
