"""Runs an experiment in virtual time: every case, or load, with every setup on every testbed, in any order
and in several processes; each depends on nothing but itself, and is on disk the moment it is there.

As in a session that has answered before, a head begins with what it learnt (costs, confidences) from the same
two warm-up answers, never from those that are measured. What a drafter says after a prefix is computed once
for all methods and testbeds. `results.jsonl` grows while it runs; started again, it goes on where it was.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

from flowspec.bench.cases import PlainCase, warm_up_cases
from flowspec.bench.console import Step
from flowspec.bench.drafters import Maker, OpenDrafter, open_drafter
from flowspec.bench.experiment import SIMULATED, Experiment, Setup, Testbed
from flowspec.bench.records import RESULTS, AnyRecord, Key, write_records
from flowspec.bench.simulated import Drafters, Load, LoadedWorld, Run, run, shuffle_cases
from flowspec.core.head.head import Experience
from flowspec.errors import FlowSpecError, InputError
from flowspec.watch.detokenizer import Decode

COUNTED_EVERY_S = 0.2
"""How often the workers' answers are counted."""
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end the command."""

Makers = dict[tuple[PlainCase, str, bool], Maker]
"""Of a drafter for a case, by its name and whether it is coupled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is asked, on some testbeds with some setups; what drafters say is computed once for all of
    these."""

    asked: PlainCase | Load
    jobs: tuple[tuple[Testbed, Setup], ...]

    @property
    def case(self) -> PlainCase:
        """The first."""
        return self.asked.cases[0] if isinstance(self.asked, Load) else self.asked


# ------------------------------------------------------------------------------------------ what is to be run


def works_of(experiment: Experiment, cases: Sequence[PlainCase], done: Set[Key] = frozenset()) -> list[Work]:
    """What is still to be run, by what is asked; where guesses cost next to nothing, also by testbed, so that
    all processes have work."""
    testbeds = experiment.testbeds
    groups = [(testbed,) for testbed in testbeds] if experiment.is_synthetic else [testbeds]
    # A schedule is long: its setups are given out one by one.
    shares = [(setup,) for setup in experiment.setups] if experiment.steps else [experiment.setups]
    works = []
    for asked, group, share in itertools.product(_all_asked(experiment, cases), groups, shares):
        jobs = tuple(
            (testbed, setup)
            for testbed, setup in itertools.product(group, share)
            if setup.runs_on(testbed.name) and not done >= set(keys_of(testbed.name, setup, asked))
        )
        if jobs:
            works.append(Work(asked=asked, jobs=jobs))
    return works


def _all_asked(experiment: Experiment, cases: Sequence[PlainCase]) -> Iterator[PlainCase | Load]:
    if not experiment.is_load:
        yield from cases
        return
    for sampling in dict.fromkeys(case.sampling for case in cases):
        some = tuple(case for case in cases if case.sampling == sampling)
        if experiment.steps:
            yield Load(cases=some, steps=experiment.steps)
            continue
        asked = tuple(shuffle_cases(some, experiment.answers or len(some), experiment.seeds[0]))
        for users in experiment.users:
            if users > len(asked):
                raise InputError(
                    f"{users} users have {len(asked)} answers to wait for; give at least one each (--answers)"
                )
            yield Load(cases=asked, users=users)


def keys_of(testbed: str, setup: Setup, asked: PlainCase | Load, repeat: int = 0) -> list[Key]:
    """The keys of the records that come of it."""
    sampling = (asked.cases[0] if isinstance(asked, Load) else asked).sampling
    way = (sampling.temperature, sampling.seed)
    if isinstance(asked, PlainCase):
        return [(testbed, setup.name, asked.prompt_id, *way, repeat)]
    steps = [(number, step.users) for number, step in enumerate(asked.steps, 1)] or [(0, asked.users)]
    return [(testbed, setup.name, f"step {number}", *way, users) for number, users in steps]


def all_keys(experiment: Experiment, cases: Sequence[PlainCase]) -> list[Key]:
    """Of all records that the experiment has, in the order in which they are shown: methods in the same one
    on every testbed, though a name may stand for another setup there."""
    places = [testbed.name for testbed in experiment.testbeds] or [""]
    order = {setup.name: at for at, setup in enumerate(experiment.setups)}
    return [
        key
        for place in places
        for asked in _all_asked(experiment, cases)
        for setup in sorted(experiment.setups, key=lambda setup: order[setup.name])
        if setup.runs_on(place)
        for repeat in range(experiment.repeat)
        for key in keys_of(place, setup, asked, repeat)
    ]


def in_order(experiment: Experiment, cases: Sequence[PlainCase], records: Sequence[AnyRecord]) -> list[Any]:
    """Whatever order they were made in, so that equal runs give equal files."""
    places = {key: at for at, key in enumerate(all_keys(experiment, cases))}
    is_named = bool(experiment.testbeds)
    return sorted(records, key=lambda record: places[record.key if is_named else ("", *record.key[1:])])


# ------------------------------------------------------------------------------------------ running it


def run_simulated(
    experiment: Experiment,
    cases: Sequence[PlainCase],
    done: Sequence[AnyRecord],
    out: Path,
    jobs: int,
    step: Step,
    make: Callable[[], Engine] | None = None,
) -> list[AnyRecord]:
    """The records that are missing, in `jobs` processes, each with the engine that it `make`s (None: one that
    learns from the warm-up), and those that are `done`."""
    assert experiment.world == SIMULATED
    keys = frozenset(record.key for record in done)
    works = works_of(experiment, cases, keys)
    make = make or partial(Engine, experiment, warm_up_cases(cases))
    keep = partial(_keep_records, out / RESULTS, keys if experiment.is_load else frozenset())
    jobs = max(1, min(jobs, len(works)))
    records = list(done)
    with open_workers(make, jobs, partial(step, "loads" if experiment.is_load else "answers")) as run_all:
        for some in run_all(keep, works):
            records += some
    return records


def _keep_records(path: Path, done: Set[Key], engine: Engine, work: Work) -> Iterator[Sequence[AnyRecord]]:
    """Without those of steps of a schedule that were there before."""
    for some in engine.records(work):
        new = [record for record in some if record.key not in done]
        write_records(path, new)  # from now on no interruption takes them away
        yield new


class Engine:
    """Runs work of one experiment; `warm_up` are the cases that heads learn from beforehand, at each
    temperature. `keeps` what drafters said, for cases that come again."""

    def __init__(
        self,
        experiment: Experiment,
        warm_up: Sequence[PlainCase],
        *,
        keeps: bool = False,
        open_drafter: OpenDrafter = open_drafter,
    ) -> None:
        self.experiment = experiment
        self._virtual = cache(partial(open_drafter, experiment))
        self._warm_up = warm_up
        self._keeps = keeps
        self._makers: Makers = {}
        # Passes of a model differ in the last bit with what is run together, so what is learnt first must not
        # depend on what came before.
        self._warm_up_makers: Makers = {}
        self._learnt: dict[tuple[str, str, float], Experience | None] = {}

    def records(self, work: Work) -> Iterator[Sequence[AnyRecord]]:
        """Those of each job, the moment they are there."""
        for testbed, setup in work.jobs:
            if isinstance(work.asked, Load):
                experience = self.learnt(testbed, setup, work.case.sampling.temperature)
                drafters_of = partial(self.drafters, setup)
                asked = LoadedWorld(self.experiment, testbed, setup, work.asked, drafters_of, experience)
                yield asked.records()
            else:
                yield [self.run(testbed, setup, work.asked).record]
        if not self._keeps:
            self._makers.clear()

    def run(self, testbed: Testbed, setup: Setup, case: PlainCase, decode: Decode | None = None) -> Run:
        """One answer; with a `decode`, which gives tokens' text, recorded."""
        experience = self.learnt(testbed, setup, case.sampling.temperature)
        drafters = self.drafters(setup, case)
        return run(self.experiment, testbed, setup, case, drafters, experience, decode)

    def learnt(self, testbed: Testbed, setup: Setup, temperature: float) -> Experience | None:
        """What a head has learnt from the warm-up; a copy, from which it may learn on."""
        key = (testbed.name, setup.name, temperature)
        if key not in self._learnt:
            experience = None
            for case in (case for case in self._warm_up if case.sampling.temperature == temperature):
                drafters = self.drafters(setup, case, self._warm_up_makers)
                experience = run(self.experiment, testbed, setup, case, drafters, experience).experience
            self._learnt[key] = experience
        return copy.deepcopy(self._learnt[key])

    def drafters(self, setup: Setup, case: PlainCase, makers: Makers | None = None) -> Drafters:
        """The setup's models other than the target for one case in one world."""
        makers = self._makers if makers is None else makers
        coupled = setup.coupled or case.sampling.temperature == 0
        drafters = {}
        for name in self.experiment.drafters_of(setup):
            key = (case, name, coupled)
            if key not in makers:
                makers[key] = self._virtual(name, coupled)(case)
            drafters[name] = makers[key]()
        return drafters


# ------------------------------------------------------------------------------------------ processes

Records = Callable[[Engine, Work], Iterator[Sequence[AnyRecord]]]
Workers = Callable[[Records, Sequence[Work]], Iterator[list[Any]]]
"""Does work, and gives what came of each, in order."""


@contextlib.contextmanager
def open_workers(
    make: Callable[[], Engine], jobs: int, on_record: Callable[[int], None] = lambda count: None
) -> Iterator[Workers]:
    """`jobs` processes for work of one experiment, or none for one job; an error and Ctrl-C end them at once.
    `on_record` hears how many records came."""
    if jobs == 1:
        engine = make()
        yield lambda do, works: (_do(engine, on_record, do, work) for work in works)
        return
    counts = get_context("spawn").SimpleQueue()
    with open_pool(jobs, _start_worker, make, counts.put) as pool:

        def run_all(do: Records, works: Sequence[Work]) -> Iterator[list[Any]]:
            with interrupted_later():
                futures = [pool.submit(_do_here, do, work) for work in works]
            for future in futures:
                while not future.done() or not counts.empty():
                    wait([future], COUNTED_EVERY_S)
                    while not counts.empty():
                        on_record(counts.get())
                yield future.result()

        yield run_all


def _do(engine: Engine, on_record: Callable[[int], None], do: Records, work: Work) -> list[Any]:
    records: list[Any] = []
    for some in do(engine, work):
        records += some
        on_record(len(some))
    return records


_do_in_worker: Callable[[Records, Work], list[Any]]
"""Of this worker process."""


def _start_worker(make: Callable[[], Engine], on_record: Callable[[int], None]) -> None:
    global _do_in_worker
    _do_in_worker = partial(_do, make(), on_record)


def _do_here(do: Records, work: Work) -> list[Any]:
    return _do_in_worker(do, work)


@contextlib.contextmanager
def open_pool(
    jobs: int, prepare: Callable[..., None] | None = None, *given: Any
) -> Iterator[ProcessPoolExecutor]:
    """`jobs` new processes, each made ready by `prepare(*given)` if there is one; work is submitted within
    `interrupted_later`.

    Raises `FlowSpecError` when one of them ends before its work is done.
    """
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), _start, (prepare, *given))
    try:
        yield pool
    except BaseException as error:  # also Ctrl-C: no process outlives the work
        for process in list((pool._processes or {}).values()):  # before the pool forgets them
            process.terminate()
        pool.shutdown(cancel_futures=True)
        if isinstance(error, BrokenProcessPool):
            raise FlowSpecError(
                "a worker process ended, perhaps for want of memory; what is done is kept, try fewer --jobs"
            ) from None
        raise
    pool.shutdown()


@contextlib.contextmanager
def interrupted_later() -> Iterator[None]:
    """What would end this process comes after this; those that are started in it never see Ctrl-C, which is
    their parent's to handle."""
    came: list[int] = []
    handlers = {
        number: signal.signal(number, lambda came_now, frame: came.append(came_now)) for number in ENDING
    }
    # The mask is inherited; here another thread may take the signal.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if came:
        signal.raise_signal(came[0])


def _start(prepare: Callable[..., None] | None, *given: Any) -> None:
    """Makes a process ready for work; it does not outlive its parent."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if prepare is not None:
        prepare(*given)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
