"""Thousands of short answers while devices fail: does anything grow, and is every answer right? `python -m
lab.checks.soak`.

Daemons of their own on this machine, the head in this process; from session to session another method. Before
an answer a seed may draw a fault and
its moment: `kill` (-9, and started again at once) or `stop` (SIGSTOP, SIGCONT when the answer is there).
Every answer is compared with plain decoding's; resident memory, file descriptors, threads and sockets of
every process are sampled.

What grows is told by a straight line through a process from when it is warm, one slope for all the lives of
all daemons and one for the head. A daemon that takes over a lost one's layers has more to hold, so each life
has a level of its own for each number of layers, and the head for each number of stages. What malloc keeps
free differs from session to session and from recovery to recovery, so the line is through the means of as
many answers as a session has; its noise is twice the standard error, for which means count as fewer the more
each resembles the one before it. `flat`: the slope is, with its noise, below what is allowed; `grows`: above
it even without; `unclear`: more answers would tell.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from flowspec.bench.console import Step, progress
from flowspec.bench.records import WRONG
from flowspec.bench.verify import STOPPED, Case
from flowspec.core.methods import METHODS, find_method
from flowspec.core.protocol.messages import Sampling
from flowspec.errors import FlowSpecError, InputError
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.step_by_step import StepByStep
from flowspec.model.text import Tokenizer, recommended
from flowspec.runtime import timeouts
from flowspec.runtime.cluster import Device
from flowspec.runtime.decoding import AUTO, Decoding
from flowspec.runtime.pipeline_connections import StageStatus
from flowspec.runtime.session import Limits, OpenCluster, RecoveryOptions, Session
from lab.checks.rigs import QUESTIONS, SAMPLINGS, Daemon, agreement, cluster_of
from lab.command import Parser, add_dtype, chosen, run_command, show

FAULTS = ("kill", "stop")
ALLOWED = {"rss_mib": 1.0, "fds": 0.5, "threads": 0.5, "sockets": 0.5}
"""What may come in a thousand answers and still be called flat."""
EVERY = 20
"""Answers from sample to sample: with samples oftener, the soak itself would grow by a third of what it
allows."""
SETTLE_S = 0.2
"""From an answer to a sample: its caches are closed by then, and what they took is given back."""
SESSION_ANSWERS = 250
"""After so many the head lets go of the devices and connects anew, as one command follows another."""
BLOCKS_MIN = 6
"""Means of so many answers that a slope needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A process after so many answers of its life; `life` names the process, and with a restart another one.

    `holds` is how many layers a daemon had, or how many stages the head; without any, a process waits, and
    its memory says nothing.
    """

    life: str
    answers: int
    holds: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slope:
    """How a quantity grows in a thousand answers; `first` and `last` are its means at the beginning and the
    end of lives that are warm."""

    whose: str
    quantity: str
    means: int
    first: float
    last: float
    per_thousand: float
    noise: float
    verdict: str


@dataclass(slots=True)
class Found:
    """What a soak has seen. `ended` tells why it ended early, if it did; `pending` are the last samples, and
    the stages that they are of."""

    verdicts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    recoveries: int = 0
    samples: list[Sample] = field(default_factory=list)
    pending: tuple[Sequence[StageStatus], list[Sample]] = ((), [])
    spent_s: float = 0.0
    ended: str = ""

    @property
    def answers(self) -> int:
        return self.verdicts.total()

    def keep(self, stages: Sequence[StageStatus]) -> None:
        """Counts the last samples in if the stages, an answer later, are still those that they were taken
        of."""
        if stages is self.pending[0]:
            self.samples += self.pending[1]
        self.pending = (), []


def slope_of(samples: Sequence[Sample], whose: str, quantity: str, warm: int) -> Slope | None:
    """The slope of a quantity of the head or of all daemons; None where too little of any life is warm."""
    blocks: dict[tuple[str, int], dict[int, list[Sample]]] = {}
    for sample in samples:
        if (sample.life == "head") == (whose == "head") and sample.answers >= warm and sample.holds:
            blocks.setdefault((sample.life, sample.holds), {}).setdefault(
                sample.answers // SESSION_ANSWERS, []
            ).append(sample)
    long = [list(each.values()) for each in blocks.values() if len(each) >= 2]
    if sum(map(len, long)) < BLOCKS_MIN:
        return None
    along = [
        np.array([np.mean([sample.answers / 1000 for sample in block]) for block in life]) for life in long
    ]
    values = [
        np.array([np.mean([sample.values[quantity] for sample in block]) for block in life]) for life in long
    ]
    x, y = (
        np.concatenate([line - line.mean() for line in lines]) for lines in (along, values)
    )  # each life has a level of its own
    slope = float(x @ y / (x @ x))
    rest = [line - line.mean() - slope * (at - at.mean()) for at, line in zip(along, values, strict=True)]
    noise = 0.0
    if (squares := float(sum(each @ each for each in rest))) > 0:
        alike = min(0.98, max(0.0, float(sum(each[1:] @ each[:-1] for each in rest)) / squares))
        free = max(1, len(x) - len(long) - 1)
        noise = 2 * float(np.sqrt(squares / free / (x @ x) * (1 + alike) / (1 - alike)))
    allowed = ALLOWED[quantity]
    return Slope(
        whose=whose,
        quantity=quantity,
        means=len(x),
        first=float(np.mean([line[0] for line in values])),
        last=float(np.mean([line[-1] for line in values])),
        per_thousand=slope,
        noise=noise,
        verdict="flat" if slope + noise <= allowed else "grows" if slope - noise > allowed else "unclear",
    )


def slopes(samples: Sequence[Sample], warm: int) -> list[Slope]:
    found = (
        slope_of(samples, whose, quantity, warm) for whose in ("head", "daemons") for quantity in ALLOWED
    )
    return [each for each in found if each is not None]


class Soak:
    """Daemons, what is asked of them as the flags say, and what comes."""

    def __init__(
        self,
        files: ModelFiles,
        folder: Path,
        faults: Sequence[str],
        args: argparse.Namespace,
    ) -> None:
        self.found = Found()
        self._rng = random.Random(args.seed)
        self._faults = faults
        self._rate: float = args.rate
        self._due = EVERY
        self._limits = Limits(
            new_tokens_max=args.tokens, stop_ids=recommended(files, files.config()).stop_ids
        )
        self._plain = StepByStep.load(files, args.dtype)
        self._dtype: str = args.dtype
        self._methods: Iterator[str] = itertools.cycle(args.methods)
        self._session_answers: int = args.session
        tokenizer = Tokenizer(files)
        self._cases = [
            Case(
                prompt_id=text,
                prompt=tuple(tokenizer.encode_chat([{"role": "user", "content": text}])),
                sampling=sampling,
            )
            for text in QUESTIONS
            for sampling in (Sampling(**each) for each in SAMPLINGS)
        ]
        for case in self._cases:
            self._expected(case)
        self._stopped: list[Daemon] = []
        self._lives: dict[str, int] = {}
        self._born: dict[str, int] = {}
        self.daemons = [Daemon(number, folder) for number in range(1, args.daemons + 1)]
        self._files = files

    def run(self, answers: int, until_s: float, step: Step) -> None:
        """So many answers, or as many as there is time for."""
        began_s = time.monotonic()
        try:
            for daemon in self.daemons:
                self._start(daemon)
            while self.found.answers < answers and time.monotonic() < until_s:
                for daemon in self.daemons:
                    daemon.wait()
                with self._session() as session:
                    for _ in range(min(self._session_answers, answers - self.found.answers)):
                        if time.monotonic() >= until_s:
                            break
                        self._one(session)
                        step(f"{self.found.answers} answers, {self.found.faults.total()} faults")
        except FlowSpecError as error:
            self.found.ended = str(error)
        except KeyboardInterrupt:
            self.found.ended = "interrupted"  # what was seen is told all the same
        finally:
            for daemon in self.daemons:
                daemon.kill()
            self.found.spent_s = time.monotonic() - began_s

    def _session(self) -> contextlib.AbstractContextManager[Session]:
        devices = [Device(name=daemon.name, address=f"127.0.0.1:{daemon.port}") for daemon in self.daemons]
        cluster: OpenCluster = cluster_of(self._files, self._dtype, devices)
        recovery_options = RecoveryOptions(on_note=lambda text: None, wait_s=timeouts.WAIT_FOR_DEVICES_S)
        method = next(self._methods)
        decoding = Decoding(method=method, chain=AUTO if find_method(method).takes_chain else None)
        return cluster.session(decoding, lambda text, share: None, recovery_options=recovery_options)

    def _start(self, daemon: Daemon) -> None:
        daemon.start()
        self._lives[daemon.name] = self._lives.get(daemon.name, 0) + 1
        self._born[daemon.name] = self.found.answers

    def _one(self, session: Session) -> None:
        """An answer, with or without a fault, and now and then a sample."""
        case = self._rng.choice(self._cases)
        fault = self._rng.choice(self._faults) if self._faults and self._rng.random() < self._rate else ""
        daemon, moment = self._rng.choice(self.daemons), self._rng.randrange(self._limits.new_tokens_max // 2)
        is_calm = not fault
        request = session.head.new_request()
        running = session.submit(case.prompt, case.sampling, self._limits, request=request)
        tokens: list[int] = []
        for batch in running:
            if fault and len(tokens) >= moment:
                self._strike(fault, daemon)
                fault = ""
            tokens += batch.tokens
        assert running.end is not None
        session.head.forget(request)
        recoveries = running.end.statistics["recoveries"]
        self.found.recoveries += recoveries
        self.found.keep(session.head.stages)
        if self._stopped:
            os.kill(self._stopped.pop().pid, signal.SIGCONT)
        said = (*tokens, *((STOPPED,) if running.end.reason == "stop" else ()))
        self.found.verdicts[agreement(self._expected(case), said, self._limits.stop_ids)] += 1
        if self.found.answers >= self._due and not recoveries and is_calm:
            self._due = self.found.answers + EVERY
            time.sleep(SETTLE_S)
            self._sample(session)

    def _expected(self, case: Case) -> tuple[int, ...]:
        """What plain decoding says; computed once."""
        return self._plain.generate(
            case.prompt, case.sampling, self._limits.new_tokens_max, self._limits.stop_ids
        )

    def _strike(self, fault: str, daemon: Daemon) -> None:
        self.found.faults[fault] += 1
        if fault == "stop":
            os.kill(daemon.pid, signal.SIGSTOP)
            self._stopped.append(daemon)
        else:
            daemon.kill()
            self._start(daemon)

    def _sample(self, session: Session) -> None:
        """Takes samples, to be kept once it is sure who held what: a pipeline may be about to be formed anew,
        as for a device that is back."""
        stages = session.head.stages
        layers = {stage.plan.name: stage.plan.end - stage.plan.first for stage in stages}
        found = [_sample("head", os.getpid(), self.found.answers, len(layers))]
        for daemon in self.daemons:
            with contextlib.suppress(psutil.NoSuchProcess):
                life = f"{daemon.name}.{self._lives[daemon.name]}"
                found.append(
                    _sample(
                        life,
                        daemon.pid,
                        self.found.answers - self._born[daemon.name],
                        layers.get(daemon.name, 0),
                    )
                )
        self.found.pending = stages, found


def _sample(life: str, pid: int, answers: int, holds: int) -> Sample:
    process = psutil.Process(pid)
    values = {
        "rss_mib": process.memory_info().rss / 2**20,
        "fds": process.num_fds(),
        "threads": process.num_threads(),
        "sockets": len(process.net_connections()),
    }
    return Sample(life=life, answers=answers, holds=holds, values=values)


def command(args: argparse.Namespace) -> int:
    faults = tuple(name for name in args.faults.split(",") if name)
    if not set(faults) <= set(FAULTS) or not 0 <= args.rate <= 1:
        raise InputError(
            f"expected --faults of {', '.join(FAULTS)} and --rate from 0 to 1, got {args.faults!r} and "
            f"{args.rate:g}"
        )
    until_s = float("inf") if args.minutes is None else time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory(prefix="flowspec-") as folder:
        soak = Soak(ModelFiles(BUNDLED), Path(folder), faults, args)
        with progress("starting", args.answers) as step:
            soak.run(args.answers, until_s, step)
    found = soak.found
    lines = slopes(found.samples, args.warm_up)
    if args.json:
        print(json.dumps(report(found, lines)))
    else:
        tell(found, lines)
    return 1 if found.ended or found.verdicts[WRONG] or any(line.verdict == "grows" for line in lines) else 0


def report(found: Found, lines: Sequence[Slope]) -> dict[str, Any]:
    return {
        "answers": found.answers,
        "verdicts": dict(found.verdicts),
        "faults": dict(found.faults),
        "recoveries": found.recoveries,
        "spent_s": round(found.spent_s, 1),
        "ended": found.ended,
        "slopes": [asdict(line) for line in lines],
        "samples": [
            [each.life, each.answers, each.holds, *each.values.values()] for each in found.samples
        ],  # rss_mib, fds, threads, sockets
    }


def tell(found: Found, lines: Sequence[Slope]) -> None:
    columns = ["process", "quantity", "means", "first", "last", "in 1000 answers", "noise", "verdict"]
    rows = [list(asdict(line).values()) for line in lines]
    show(f"{found.answers} answers in {found.spent_s:.0f} s", columns, rows)
    print(f"\nanswers: {dict(found.verdicts)}; faults: {dict(found.faults)}; {found.recoveries} recoveries")
    if not lines:
        print("too few answers to tell whether anything grows")
    if found.ended:
        print(f"ended early: {found.ended}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("lab.checks.soak", __doc__)
    parser.whole("--answers", 5000)
    parser.add_argument(
        "--faults",
        default="kill,stop",
        help="of kill and stop, with commas; '' for none (default: %(default)s)",
    )
    parser.add_argument(
        "--rate", type=float, default=0.01, help="share of answers with a fault (default: %(default)s)"
    )
    add_dtype(parser)
    parser.add_argument(
        "--methods",
        type=chosen(METHODS),
        default=METHODS[:1],
        metavar="NAME[,NAME...]",
        help=f"one after another, with commas, or all (default: {METHODS[0]})",
    )
    parser.whole("--session", SESSION_ANSWERS, "answers until the head connects anew, with the next method")
    parser.whole("--daemons", 3)
    parser.whole("--tokens", 24, "longest answer")
    parser.add_argument(
        "--seed", type=int, default=0, help="of questions, faults and moments (default: %(default)s)"
    )
    parser.whole("--warm-up", 200, "answers of a life that do not count")
    parser.whole("--minutes", None, "end after so long, if that comes first")
    return run_command(parser, command, argv)


if __name__ == "__main__":
    sys.exit(main())
