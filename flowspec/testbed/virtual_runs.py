"""Answers of an experiment in virtual time, in any order and in several processes: each depends on nothing but itself.

As in a session that has answered before, a head begins with what it learnt (costs, confidences) from the same two warm-up answers,
never from those that are measured. What a drafter says after a prefix is computed once for all methods and testbeds.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from flowspec.errors import FlowSpecError
from flowspec.model.files import ModelFiles
from flowspec.testbed.config import Bench, Setup, Testbed
from flowspec.testbed.guesses import Drafting, Maker, open_drafting
from flowspec.testbed.outcome import Record
from flowspec.testbed.plain import Case
from flowspec.testbed.simulated import Learnt, Run, run
from flowspec.testbed.synthetic import Synthetic
from flowspec.testbed.trace import Trace

Job = tuple[Testbed, Setup]


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
        self._makers: dict[tuple[Case, bool], Maker] = {}
        self._draftings: dict[bool, Drafting] = {}
        self._learnt: dict[tuple[str, str, float], Learnt | None] = {}

    def records(self, work: Work) -> list[Record]:
        return [one.record for one in self.runs(work)]

    def runs(self, work: Work) -> list[Run]:
        found = []
        for testbed, setup in work.jobs:
            learnt = copy.deepcopy(self._learnt_by(testbed, setup, work.case.sampling.temperature))
            found.append(self._run(testbed, setup, work.case, learnt))
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
                learnt = self._run(testbed, setup, case, learnt).learnt
            self._learnt[key] = learnt
        return self._learnt[key]

    def _run(self, testbed: Testbed, setup: Setup, case: Case, learnt: Learnt | None) -> Run:
        if setup.method == "ar":
            return run(self.bench, testbed, setup, case, None, learnt)
        coupled = setup.coupled or case.sampling.temperature == 0
        if (case, coupled) not in self._makers:
            self._makers[case, coupled] = self._drafting(coupled).begin(case)
        return run(self.bench, testbed, setup, case, self._makers[case, coupled](), learnt)

    def _drafting(self, coupled: bool) -> Drafting:
        if coupled not in self._draftings:
            if self.bench.is_synthetic:
                self._draftings[coupled] = Synthetic(self.bench.acceptance, self.bench.context)
            else:
                self._draftings[coupled] = open_drafting(self.bench.drafter, ModelFiles(self.bench.model), coupled=coupled)
        return self._draftings[coupled]


_runs: VirtualRuns | None = None
"""Of this worker process."""


def start_worker(bench: Bench, warm_up: Sequence[Case], keeps: bool = False) -> None:
    """Makes a process ready to `work`; Ctrl-C is its parent's to handle."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    global _runs
    _runs = VirtualRuns(bench, warm_up, keeps=keeps)


def work(work: Work) -> list[Record] | FlowSpecError:
    """The records of some work, or why there are none."""
    assert _runs is not None, "the worker was not started"
    try:
        return _runs.records(work)
    except FlowSpecError as error:
        return error
