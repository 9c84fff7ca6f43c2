"""Answers of an experiment in virtual time, in any order and in several processes: each depends on nothing
but itself.

As in a session that has answered before, a head begins with what it learnt (costs, confidences) from the same
two warm-up answers, never from those that are measured. What a drafter says after a prefix is computed once
for all methods and testbeds.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from flowspec.bench.config import Bench, Setup, Testbed
from flowspec.bench.declared import Declared
from flowspec.bench.drafting import VirtualDrafter, open_drafting
from flowspec.bench.guesses import Maker
from flowspec.bench.outcome import Record, write_records
from flowspec.bench.plain import PlainCase
from flowspec.bench.profiled import Profiled
from flowspec.bench.simulated import Drafters, Run, run
from flowspec.bench.synthetic import Synthetic
from flowspec.bench.workers import interrupted_later, open_pool
from flowspec.core.head.head import Experience
from flowspec.errors import FlowSpecError
from flowspec.model.files import ModelFiles
from flowspec.watch.detokenizer import Decode

COUNTED_EVERY_S = 0.2
"""How often the workers' answers are counted."""

Job = tuple[Testbed, Setup]
Finished = Callable[[int], None]
"""Hears within a task how many answers, or loads, are done, and on disk."""
Makers = dict[tuple[PlainCase, str, bool], Maker]
"""What makes drafters for a case, by name, coupled or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One case on some testbeds with some setups; `number` is its place among the experiment's cases."""

    number: int
    case: PlainCase
    jobs: tuple[Job, ...]


class VirtualRuns:
    """Runs work of one experiment; `warm_up` are the cases that heads learn from beforehand, at each
    temperature.

    `keeps` what drafters said, for cases that come again. `kept` is the file that gets the record of each
    answer or load the moment it is there, then `finished` hears of it.
    """

    def __init__(
        self,
        bench: Bench,
        warm_up: Sequence[PlainCase],
        *,
        keeps: bool = False,
        kept: Path | None = None,
        finished: Finished = lambda count: None,
    ) -> None:
        self.bench = bench
        self._kept = kept
        self._finished = finished
        self._warm_up = warm_up
        self._keeps = keeps
        self._makers: Makers = {}
        # Passes of a model differ in the last bit with what is run together, so what is learnt first must not
        # depend on what came before.
        self._warm_up_makers: Makers = {}
        self._draftings: dict[tuple[str, bool], VirtualDrafter] = {}
        self._learnt: dict[tuple[str, str, float], Experience | None] = {}

    def records(self, work: Work) -> list[Record]:
        return [one.record for one in self.runs(work)]

    def runs(self, work: Work) -> list[Run]:
        found = []
        for testbed, setup in work.jobs:
            experience = self.learnt_by(testbed, setup, work.case.sampling.temperature)
            one = run(self.bench, testbed, setup, work.case, self.drafters(setup, work.case), experience)
            found.append(one)
            self.finish(one.record)
        self.end()
        return found

    def finish(self, record: Any) -> None:
        """An answer or a load is done: from now on no interruption takes it away."""
        if self._kept is not None:
            write_records(self._kept, [record])
        self._finished(1)

    def end(self) -> None:
        """Some work is done; what drafters said in it is forgotten, unless its cases come again."""
        if not self._keeps:
            self._makers.clear()

    def recorded(self, testbed: Testbed, setup: Setup, case: PlainCase, decode: Decode) -> Run:
        """One answer with all that happened in it; `decode` gives tokens' text."""
        experience = self.learnt_by(testbed, setup, case.sampling.temperature)
        found = run(self.bench, testbed, setup, case, self.drafters(setup, case), experience, decode)
        self.end()
        return found

    def learnt_by(self, testbed: Testbed, setup: Setup, temperature: float) -> Experience | None:
        """What a head has learnt from the warm-up; a copy, from which it may learn on."""
        key = (testbed.name, setup.name, temperature)
        if key not in self._learnt:
            experience = None
            for case in (case for case in self._warm_up if case.sampling.temperature == temperature):
                experience = run(
                    self.bench,
                    testbed,
                    setup,
                    case,
                    self._made(setup, case, self._warm_up_makers),
                    experience,
                ).experience
            self._learnt[key] = experience
        return copy.deepcopy(self._learnt[key])

    def drafters(self, setup: Setup, case: PlainCase) -> Drafters:
        """The setup's models beside the target for one case in one world."""
        return self._made(setup, case, self._makers)

    def _made(self, setup: Setup, case: PlainCase, makers: Makers) -> Drafters:
        coupled = setup.coupled or case.sampling.temperature == 0
        drafters = {}
        for name in self.bench.drafters_of(setup):
            key = (case, name, coupled)
            if key not in makers:
                makers[key] = self._drafting(name, coupled).begin(case)
            if (drafter := makers[key]()) is not None:
                drafters[name] = drafter
        return drafters

    def _drafting(self, name: str, coupled: bool) -> VirtualDrafter:
        key = (name, coupled)
        if key not in self._draftings:
            if self.bench.profile is not None:
                self._draftings[key] = Profiled(self.bench.profile, self.bench.context)
            elif self.bench.declared:
                names = [each.name for each in self.bench.declared]
                self._draftings[key] = Declared(
                    self.bench.declared[names.index(name)],
                    names.index(name),
                    self.bench.correlation,
                    self.bench.context,
                )
            elif self.bench.is_synthetic:
                self._draftings[key] = Synthetic(self.bench.acceptance, self.bench.context)
            else:
                self._draftings[key] = open_drafting(name, ModelFiles(self.bench.model), coupled=coupled)
        return self._draftings[key]


Task = TypeVar("Task")
Found = TypeVar("Found")
Do = Callable[[VirtualRuns, Task], Found]
"""Does a task; it goes to other processes, so it is a function of a module or a method of `VirtualRuns`."""
Workers = Callable[[Sequence[Task]], Iterator[tuple[Task, Found]]]
"""Does tasks, and gives each with what came of it when it is there."""


@contextlib.contextmanager
def open_workers(
    bench: Bench,
    warm_up: Sequence[PlainCase],
    jobs: int,
    do: Do[Task, Found],
    *,
    keeps: bool = False,
    kept: Path | None = None,
    finished: Finished = lambda count: None,
) -> Iterator[Workers[Task, Found]]:
    """`jobs` processes for tasks of one experiment, or none for one job; an error and Ctrl-C end them at
    once."""
    if jobs == 1:
        runs = VirtualRuns(bench, warm_up, keeps=keeps, kept=kept, finished=finished)
        yield lambda tasks: ((one, do(runs, one)) for one in tasks)
        return
    counter = get_context("spawn").Value("q", 0)
    with open_pool(jobs, _start_worker, bench, warm_up, keeps, kept, counter) as pool:

        def run_all(tasks: Sequence[Task]) -> Iterator[tuple[Task, Found]]:
            running: dict[Future[Found | FlowSpecError], Task] = {}
            with interrupted_later():
                for one in tasks:
                    running[pool.submit(_do, do, one)] = one
            waiting = set(running)
            counted = counter.get_obj().value  # a lock that a killed worker held would never be free
            while waiting:
                done, waiting = wait(waiting, COUNTED_EVERY_S, FIRST_COMPLETED)
                if count := counter.get_obj().value - counted:
                    counted += count
                    finished(count)
                for future in done:
                    result = future.result()
                    if isinstance(result, FlowSpecError):
                        raise result
                    yield running[future], result

        yield run_all


_runs: VirtualRuns | None = None
"""Of this worker process."""


def _start_worker(
    bench: Bench, warm_up: Sequence[PlainCase], keeps: bool, kept: Path | None, counter: Any
) -> None:
    """Makes a process ready for work, which adds to what all of them have finished."""

    def finished(count: int) -> None:
        with counter.get_lock():
            counter.value += count

    global _runs
    _runs = VirtualRuns(bench, warm_up, keeps=keeps, kept=kept, finished=finished)


def _do(do: Do[Task, Found], task: Task) -> Found | FlowSpecError:
    """What comes of a task, or why nothing does."""
    assert _runs is not None, "the worker was not started"
    try:
        return do(_runs, task)
    except FlowSpecError as error:
        return error
