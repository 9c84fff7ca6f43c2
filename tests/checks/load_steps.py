"""A load that changes, with real processes: `python -m tests.checks.load_steps`.

The small twin of `flowspec bench --experiment load-steps`: two stages and three drafters, each a daemon of
its own on this machine, the head in this process. Users come and go (two, four, one); each asks the next
question the moment the last one is answered, and who goes waits for the answer under way. In the middle of
the second step the daemon of one drafter is killed. Every answer is compared with plain decoding's, and a
note must tell of the loss. Each method has daemons of its own. All of them share the machine's cores, so the
rates say little of other machines.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from flowspec.bench.console import show
from flowspec.bench.exactness import STOPPED
from flowspec.bench.outcome import EXACT
from flowspec.core.protocol.messages import Sampling
from flowspec.errors import FlowSpecError
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.step_by_step import StepByStep
from flowspec.model.text import Tokenizer, recommended
from flowspec.runtime.cluster import Device
from flowspec.runtime.decoding import Decoding
from flowspec.runtime.local import LocalCluster
from flowspec.runtime.session import Limits, RecoveryOptions, Session
from tests.checks.questions import QUESTIONS, SAMPLINGS, agreement
from tests.checks.rigs import cluster_of
from tests.command import Parser, add_dtype, chosen, run_command

USERS = (2, 4, 1)
STAGES = 2
DRAFTERS = ("draft", "draft-math", "draft-code")
LOST = 1
"""The number of the drafter whose daemon is killed, ..."""
LOST_STEP = 1
"""... and in the middle of which step."""
METHODS = {"cosine": DRAFTERS, "continuous": DRAFTERS[:1]}
"""What each is run with."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A question as tokens, how it is sampled, and its plain answer."""

    prompt: tuple[int, ...]
    sampling: Sampling
    expected: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class StepFound:
    """What a step gave: tokens that came while it lasted, and the verdicts on answers that were asked for in
    it."""

    method: str
    users: int
    seconds: float
    tokens: int = 0
    verdicts: list[str] = field(default_factory=list)


class Users:
    """Threads that ask, one for each user who is there."""

    def __init__(
        self, session: Session, questions: Sequence[Asked], limits: Limits, steps: Sequence[StepFound]
    ) -> None:
        self.steps = steps
        self.errors: list[BaseException] = []
        self._session, self._questions, self._limits = session, questions, limits
        self._turns = itertools.count()
        self._step = 0
        self._there = 0
        self._threads: dict[int, threading.Thread] = {}
        self._lock = threading.Lock()

    def come(self, step: int) -> None:
        """A step begins: so many users are there from now on."""
        with self._lock:
            self._step, self._there = step, self.steps[step].users
        for user in range(self.steps[step].users):
            if user not in self._threads or not self._threads[user].is_alive():
                self._threads[user] = threading.Thread(target=self._ask, args=(user,), daemon=True)
                self._threads[user].start()

    def go(self, wait_s: float) -> None:
        """All of them, when their answers are there."""
        with self._lock:
            self._there = 0
        for thread in self._threads.values():
            thread.join(wait_s)
            if thread.is_alive():
                raise FlowSpecError(f"an answer did not end within {wait_s:g} s")
        if self.errors:
            raise self.errors[0]

    def _ask(self, user: int) -> None:
        try:
            while True:
                with self._lock:
                    if user >= self._there:
                        return
                    asked_in = self.steps[self._step]
                    question = self._questions[next(self._turns) % len(self._questions)]
                verdict = self._one(question)
                with self._lock:
                    asked_in.verdicts.append(verdict)
        except BaseException as error:  # noqa: BLE001 - it is raised where the threads are waited for
            self.errors.append(error)

    def _one(self, question: Asked) -> str:
        request = self._session.head.new_request()
        answer = self._session.submit(question.prompt, question.sampling, self._limits, request=request)
        tokens: list[int] = []
        for batch in answer:
            tokens += batch.tokens
            with self._lock:
                self.steps[self._step].tokens += len(batch.tokens)
        assert answer.end is not None
        self._session.head.forget(request)
        said = (*tokens, *((STOPPED,) if answer.end.reason == "stop" else ()))
        return agreement(question.expected, said, self._limits.stop_ids)


def run_method(
    method: str, files: ModelFiles, questions: Sequence[Asked], limits: Limits, args: argparse.Namespace
) -> tuple[list[StepFound], list[str]]:
    """The steps with one method, and the head's notes."""
    drafters = METHODS[method]
    steps = [StepFound(method=method, users=users, seconds=args.seconds) for users in USERS]
    notes: list[str] = []
    family = files.raw_config()["model_type"]
    with LocalCluster(STAGES + len(drafters), family=family) as local:
        daemons = local.wait()
        devices = [Device(name=daemon.name, address=daemon.address) for daemon in daemons]
        cluster = replace(
            cluster_of(files, args.dtype, devices[:STAGES]), drafter_devices=tuple(devices[STAGES:])
        )
        options = RecoveryOptions(on_note=notes.append)
        decoding = Decoding(method=method, drafters=drafters)
        with cluster.session(decoding, lambda text, share: None, recovery_options=options) as session:
            users = Users(session, questions, limits, steps)
            for number, step in enumerate(steps):
                users.come(number)
                time.sleep(step.seconds / 2)
                if number == LOST_STEP and len(drafters) > 1:
                    os.kill(daemons[STAGES + LOST].pid, signal.SIGKILL)
                time.sleep(step.seconds / 2)
            users.go(args.wait)
    return steps, notes


def questions_of(files: ModelFiles, dtype: str, limits: Limits) -> list[Asked]:
    """All questions in all samplings, in an order by chance, with what plain decoding says."""
    tokenizer, plain = Tokenizer(files), StepByStep.load(files, dtype)
    found = []
    for text in QUESTIONS:
        prompt = tuple(tokenizer.encode_chat([{"role": "user", "content": text}]))
        for fields in SAMPLINGS:
            sampling = Sampling(**fields)
            said = plain.generate(prompt, sampling, limits.new_tokens_max, limits.stop_ids)
            found.append(Asked(prompt, sampling, tuple(said)))
    return random.Random(1).sample(found, len(found))


def command(args: argparse.Namespace) -> int:
    files = ModelFiles(BUNDLED)
    limits = Limits(new_tokens_max=args.tokens, stop_ids=recommended(files, files.config()).stop_ids)
    questions = questions_of(files, args.dtype, limits)
    found: list[StepFound] = []
    wrong = False
    for method in args.methods:
        steps, notes = run_method(method, files, questions, limits, args)
        found += steps
        lost = [
            note for note in notes if note.startswith(f"drafter {DRAFTERS[LOST]} ") and " is lost" in note
        ]
        if len(METHODS[method]) > 1 and not lost:
            wrong = True
            print(f"WRONG: {method}: no note tells that {DRAFTERS[LOST]} is lost", file=sys.stderr)
    wrong = wrong or any(verdict != EXACT for step in found for verdict in step.verdicts)
    if args.json:
        print(json.dumps({"steps": [asdict(step) for step in found], "right": not wrong}))
    else:
        rows = [
            [
                step.method,
                step.users,
                f"{step.tokens / step.seconds:.1f}",
                f"{step.verdicts.count(EXACT)} of {len(step.verdicts)}",
            ]
            for step in found
        ]
        title = f"{DRAFTERS[LOST]} is killed in the middle of step {LOST_STEP + 1}"
        show(title, ["method", "users", "tok/s", "answers exact"], rows)
    return 1 if wrong else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("tests.checks.load_steps", __doc__)
    parser.add_argument(
        "--methods",
        type=chosen(tuple(METHODS)),
        default=tuple(METHODS),
        metavar="NAME,...",
        help=f"of {', '.join(METHODS)}, with commas (default: all)",
    )
    parser.whole("--seconds", 12, "how long each step lasts")
    parser.whole("--tokens", 48, "longest answer")
    parser.whole("--wait", 120, "seconds that the last answers may take")
    add_dtype(parser)
    return run_command(parser, command, argv)


if __name__ == "__main__":
    sys.exit(main())
