"""Answers of an experiment in virtual time, in any order and in several processes: each depends on nothing but itself.

As in a session that has answered before, a head begins with what it learnt (costs, confidences) from the same two warm-up answers,
never from those that are measured. What a drafter says after a prefix is computed once for all methods and testbeds.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass

from flowspec.core.learnt import Learnt
from flowspec.errors import FlowSpecError
from flowspec.model.files import ModelFiles
from flowspec.testbed.config import Bench, Setup, Testbed
from flowspec.testbed.guesses import Drafting, Maker, open_drafting
from flowspec.testbed.outcome import Record
from flowspec.testbed.plain import Case
from flowspec.testbed.simulated import Run, run
from flowspec.testbed.synthetic import Synthetic
from flowspec.testbed.trace import Trace
from flowspec.testbed.workers import interrupted_later, open_pool

Job = tuple[Testbed, Setup]
Makers = dict[tuple[Case, str, bool], Maker]
"""What makes drafters for a case, by name, coupled or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One case on some testbeds with some setups; `number` is its place among the experiment's cases."""

    number: int
    case: Case
    jobs: tuple[Job, ...]


class VirtualRuns:
    """Runs work of one experiment; `warm_up` are the cases that heads learn from beforehand, at each temperature.

    `keeps` what drafters said, for cases that come again.
    """

    def __init__(self, bench: Bench, warm_up: Sequence[Case], *, keeps: bool = False) -> None:
        self.bench = bench
        self._warm_up = warm_up
        self._keeps = keeps
        self._makers: Makers = {}
        # Passes of a model differ in the last bit with what is run together, so what is learnt first must not depend on what came before.
        self._warm_up_makers: Makers = {}
        self._draftings: dict[tuple[str, bool], Drafting] = {}
        self._learnt: dict[tuple[str, str, float], Learnt | None] = {}

    def records(self, work: Work) -> list[Record]:
        return [one.record for one in self.runs(work)]

    def runs(self, work: Work) -> list[Run]:
        found = []
        for testbed, setup in work.jobs:
            learnt = copy.deepcopy(self._learnt_by(testbed, setup, work.case.sampling.temperature))
            found.append(self._run(testbed, setup, work.case, learnt, self._makers))
        if not self._keeps:
            self._makers.clear()
        return found

    def trace(self, testbed: Testbed, setup: Setup, case: Case) -> Trace:
        """What happened in one answer."""
        return self.runs(Work(number=0, case=case, jobs=((testbed, setup),)))[0].trace

    def _learnt_by(self, testbed: Testbed, setup: Setup, temperature: float) -> Learnt | None:
        key = (testbed.name, setup.name, temperature)
        if key not in self._learnt:
            learnt = None
            for case in (case for case in self._warm_up if case.sampling.temperature == temperature):
                learnt = self._run(testbed, setup, case, learnt, self._warm_up_makers).learnt
            self._learnt[key] = learnt
        return self._learnt[key]

    def _run(self, testbed: Testbed, setup: Setup, case: Case, learnt: Learnt | None, makers: Makers) -> Run:
        coupled = setup.coupled or case.sampling.temperature == 0
        drafters = {}
        for name in self.bench.drafters_of(setup):
            key = (case, name, coupled)
            if key not in makers:
                makers[key] = self._drafting(name, coupled).begin(case)
            if (drafter := makers[key]()) is not None:
                drafters[name] = drafter
        return run(self.bench, testbed, setup, case, drafters, learnt)

    def _drafting(self, name: str, coupled: bool) -> Drafting:
        key = (name, coupled)
        if key not in self._draftings:
            if self.bench.is_synthetic:
                self._draftings[key] = Synthetic(self.bench.acceptance, self.bench.context)
            else:
                self._draftings[key] = open_drafting(name, ModelFiles(self.bench.model), coupled=coupled)
        return self._draftings[key]


Workers = Callable[[Sequence[Work]], Iterator[tuple[Work, list[Record]]]]
"""Runs work, and gives each with its records when they are there."""


@contextlib.contextmanager
def open_workers(bench: Bench, warm_up: Sequence[Case], jobs: int, *, keeps: bool = False) -> Iterator[Workers]:
    """`jobs` processes for work of one experiment, or none for one job; an error and Ctrl-C end them at once."""
    if jobs == 1:
        runs = VirtualRuns(bench, warm_up, keeps=keeps)
        yield lambda works: ((one, runs.records(one)) for one in works)
        return
    with open_pool(jobs, _start_worker, bench, warm_up, keeps) as pool:

        def run_all(works: Sequence[Work]) -> Iterator[tuple[Work, list[Record]]]:
            running: dict[Future[list[Record] | FlowSpecError], Work] = {}
            with interrupted_later():
                for one in works:
                    running[pool.submit(_work, one)] = one
            for future in as_completed(running):
                result = future.result()
                if isinstance(result, FlowSpecError):
                    raise result
                yield running[future], result

        yield run_all


_runs: VirtualRuns | None = None
"""Of this worker process."""


def _start_worker(bench: Bench, warm_up: Sequence[Case], keeps: bool) -> None:
    """Makes a process ready for work."""
    global _runs
    _runs = VirtualRuns(bench, warm_up, keeps=keeps)


def _work(work: Work) -> list[Record] | FlowSpecError:
    """The records of some work, or why there are none."""
    assert _runs is not None, "the worker was not started"
    try:
        return _runs.records(work)
    except FlowSpecError as error:
        return error
