"""Runs what an experiment of rivals simulates: `continuous` and SpecPipe on each cell's plan, by how often a
drafter is right. Each record is kept the moment it is there; started again it goes on where it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import structs

from flowspec.bench.bench import RESULTS, Step
from flowspec.bench.config import OURS, Setup
from flowspec.bench.outcome import write_records
from flowspec.bench.planned import first_token_s, simulated, testbed_of
from flowspec.bench.rival_experiment import Cell, RivalExperiment, cells_of, request_of
from flowspec.bench.simulated import stage_curves
from flowspec.bench.workers import interrupted_later, open_pool
from flowspec.plan.planner import DoesNotFit, Plan, make_plan
from flowspec.plan.sites import PlanRequest
from flowspec.validation import Document

SPEC_PIPE = "pipedec"
FIRST = 60_000_000
"""The first case of the answers."""
FEW_NODES, MANY_NODES = 4, 16
"""Of SpecPipe's levels: few where a board takes longer for many."""
LONGER = 1.5

Key = tuple[str, str, str, float, str]


class RivalRecord(Document, frozen=True, kw_only=True):
    """Simulated answers, or why there are none: no tokens where the model does not fit (`boards` 0), or not
    with a drafter. `error` is the standard error of their rate as a share of it, 0 for a single one;
    `plain_tokens_per_s` is the plan's rate without guesses."""

    testbed: str
    network: str
    model: str
    acceptance: float
    method: str
    boards: int
    tokens: int
    seconds: float
    error: float
    plain_tokens_per_s: float
    first_token_s: float

    @property
    def key(self) -> Key:
        return (self.testbed, self.network, self.model, self.acceptance, self.method)


@dataclass(frozen=True, slots=True, kw_only=True)
class RivalWork:
    """What of a cell is still to be run, as (acceptance, method)."""

    cell: Cell
    todo: tuple[tuple[float, str], ...]


def pending(bench: RivalExperiment, done: set[Key]) -> Iterator[RivalWork]:
    """The first network's cells first, which have most to say."""
    cells = sorted(cells_of(bench), key=lambda cell: cell.network != bench.networks[0])
    for cell in cells:
        todo = tuple(
            (acceptance, method)
            for acceptance, method in _wanted(bench, cell)
            if (cell.testbed.name, cell.network.name, cell.model.name, acceptance, method) not in done
        )
        if todo:
            yield RivalWork(cell=cell, todo=todo)


def _wanted(bench: RivalExperiment, cell: Cell) -> Iterator[tuple[float, str]]:
    """SpecPipe only at the published acceptance over the first network, for simulations take their time."""
    for acceptance in cell.network.acceptances:
        yield acceptance, OURS
        if acceptance == bench.published and cell.network == bench.networks[0]:
            yield acceptance, SPEC_PIPE


def total(bench: RivalExperiment) -> int:
    return sum(len(list(_wanted(bench, cell))) for cell in cells_of(bench))


def run_rivals(
    bench: RivalExperiment, done: Sequence[RivalRecord], out: Path, jobs: int, step: Step
) -> list[RivalRecord]:
    """The records that are missing, in `jobs` processes, and those that are `done`."""
    work = list(pending(bench, {record.key for record in done}))
    found = list(done)
    if jobs == 1 or len(work) < 2:
        for one in work:
            for record in run_cell(bench, one, out / RESULTS):
                found.append(record)
                step("answers", 1)
        return found
    with open_pool(min(jobs, len(work))) as pool:
        with interrupted_later():
            running = [pool.submit(_all_of, bench, one, out / RESULTS) for one in work]
        for future in as_completed(running):
            records = future.result()
            found += records
            step("answers", len(records))
    return found


def _all_of(bench: RivalExperiment, work: RivalWork, kept: Path) -> list[RivalRecord]:
    return list(run_cell(bench, work, kept))


def run_cell(bench: RivalExperiment, work: RivalWork, kept: Path) -> Iterator[RivalRecord]:
    """All that is to be run of a cell, on the plan for the published acceptance."""
    request = request_of(bench, work.cell, bench.published)
    plan = None
    with contextlib.suppress(DoesNotFit):
        plan = make_plan(request)
        plan = make_plan(request, guesses=True)
    for acceptance, method in work.todo:
        record = _record(bench, work.cell, request, plan, acceptance, method)
        write_records(kept, [record])
        yield record


def _record(
    bench: RivalExperiment,
    cell: Cell,
    request: PlanRequest,
    plan: Plan | None,
    acceptance: float,
    method: str,
) -> RivalRecord:
    found = RivalRecord(
        testbed=cell.testbed.name,
        network=cell.network.name,
        model=cell.model.name,
        acceptance=acceptance,
        method=method,
        boards=0,
        tokens=0,
        seconds=0.0,
        error=0.0,
        plain_tokens_per_s=0.0,
        first_token_s=0.0,
    )
    if plan is None:
        return found
    used = {stage.site.name for stage in plan.stages} | {plan.head.name}
    found = structs.replace(
        found,
        boards=len(used),
        plain_tokens_per_s=plan.plain.tokens_per_s,
        first_token_s=first_token_s(request, plan, bench.prompt),
    )
    if not plan.guesses:
        return found
    assert request.drafter is not None
    made = simulated(
        replace(request, drafter=replace(request.drafter, acceptance=acceptance)),
        plan,
        answers=bench.answers,
        tokens=bench.new_tokens,
        first=FIRST,
        setup=setup_of(method, request, plan),
    )
    return structs.replace(found, tokens=sum(made.tokens), seconds=sum(made.seconds), error=made.error)


def setup_of(method: str, request: PlanRequest, plan: Plan) -> Setup:
    """The method with its defaults; SpecPipe with levels that suit the boards."""
    if method != SPEC_PIPE:
        return Setup(name=method, method=method)
    curves = stage_curves(testbed_of(request, plan))
    longer = max(curve.seconds(MANY_NODES) / curve.seconds(1) for curve in curves)
    nodes = FEW_NODES if longer > LONGER else MANY_NODES
    return Setup(name=method, method=method, options={"level_nodes": nodes})
