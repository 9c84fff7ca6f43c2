"""Tokens/s of one daemon with one thread and with two: of the toy, of SmolLM2-135M-Instruct, and of a Llama
of 1.24 G parameters with made weights in the forms that people download.

Answers are short and asked several times; the best counts. Whatever else runs takes from a rate, and less
from the time that processors spend on a token: so both are seen.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flowspec import LLM, Cluster
from lab.golden.daemons import Daemon, daemons
from lab.golden.limits import limited
from lab.golden.llama import BFLOAT16, VOCABULARY, llama
from lab.golden.place import Place, UnavailableError, smollm2
from lab.golden.recording import Absent, Observation

THREADS = {1: "1 thread", 2: "2 threads"}
LIMIT_S = 1800
"""What a round takes at most, on a machine that is busy with other things."""
WAIT_S = 30.0
"""For a daemon that is lost."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
USER_TICKS, SYSTEM_TICKS = 11, 12
"""Where they stand in /proc/PID/stat, behind the name."""
DEFAULT, PLAIN = "default", "ar"
MADE_PART = "speed-llama"
CONTEXT = 512
FIRST_ID = 3
"""The first that ends no answer."""
WARM_IDS = list(range(10, 18))


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is asked of a model: by which methods, and for so many new tokens, all prompts so many `times`.

    `texts` are prompts. Without them a prompt is `prompt_tokens` random ids, each time others, and how fast
    it is read is measured, too.
    """

    methods: tuple[str, ...] = (DEFAULT, PLAIN)
    texts: tuple[str, ...] = ()
    prompt_tokens: int = 0
    new_tokens: int
    times: int


TEXTS = ("What is 17 + 25?", "Write a function that adds two numbers.", "Tell me a story.")
TOY = Asked(texts=TEXTS, new_tokens=32, times=3)
SMOLLM2 = Asked(texts=TEXTS, new_tokens=16, times=2)
MADE = Asked(methods=(PLAIN,), prompt_tokens=32, new_tokens=5, times=4)
MADE_PLAIN = Asked(methods=(PLAIN,), prompt_tokens=16, new_tokens=4, times=4)
"""In bfloat16, which takes two to three times as long."""


@dataclass(slots=True)
class Spent:
    """On so many tokens: seconds of the clock and of processors, the daemon's and this process's."""

    tokens: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0

    def add(self, tokens: int, begin: Moment, end: Moment) -> None:
        self.tokens += tokens
        self.wall_s += end.wall_s - begin.wall_s
        self.cpu_s += end.cpu_s - begin.cpu_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    wall_s: float
    cpu_s: float

    @staticmethod
    def now(daemon: Daemon) -> Moment:
        stat = Path(f"/proc/{daemon.process.pid}/stat").read_text("utf-8").rpartition(")")[2].split()
        ticks = int(stat[USER_TICKS]) + int(stat[SYSTEM_TICKS])
        return Moment(wall_s=time.monotonic(), cpu_s=time.process_time() + ticks / TICKS_PER_S)


def observe(place: Place, name: str) -> Iterator[Observation | Absent]:
    """One round."""
    with limited(LIMIT_S), contextlib.ExitStack() as stack:
        flags = ("--cache-limit=0",)
        running = {
            threads: stack.enter_context(daemons(place, 1, *flags, threads=threads))[0] for threads in THREADS
        }
        with _opened("bundled", PLAIN, {1: running[1]}):
            pass  # has imported all: two threads that import transformers at once fail
        for model, path, asked in _made(place) if name == MADE_PART else _small(place):
            if isinstance(path, Absent):
                yield path
            elif place.wants(model):
                yield from _measure(model, path, asked, running)


def _small(place: Place) -> Iterator[tuple[str, Path | str | Absent, Asked]]:
    """What to measure, by the beginning of its keys."""
    yield "toy", "bundled", TOY
    if place.wants("smollm2"):
        try:
            yield "smollm2", smollm2(place), SMOLLM2
        except UnavailableError as error:
            yield "smollm2", Absent(key="smollm2", why=str(error)), SMOLLM2


def _made(place: Place) -> Iterator[tuple[str, Path | str | Absent, Asked]]:
    try:
        for form, path in llama(place).items():
            yield f"llama-1.24b/{form}", path, MADE_PLAIN if form == BFLOAT16 else MADE
    except UnavailableError as error:
        yield "llama-1.24b", Absent(key="llama-1.24b", why=str(error)), MADE


def _measure(
    model: str, path: Path | str, asked: Asked, running: Mapping[int, Daemon]
) -> Iterator[Observation]:
    for method in asked.methods:
        with _opened(path, method, running) as opened:
            for threads, llm in opened.items():
                answers = [_ask(llm, asked, number, running[threads]) for number in range(asked.times)]
                for part, at in (("prompt", 0), (method, 1)):
                    spent = [each[at] for each in answers]
                    if spent[0].tokens:
                        yield from _rates(f"{model}/{part}, {THREADS[threads]}", spent, threads)


def _rates(key: str, spent: Sequence[Spent], threads: int) -> Iterator[Observation]:
    for each in spent:
        yield Observation(key=f"{key}, tokens/s", value=each.tokens / each.wall_s)
        if threads == 1:  # several also wait for each other
            yield Observation(key=f"{key}, cpu ms a token", value=1e3 * each.cpu_s / each.tokens)


@contextlib.contextmanager
def _opened(path: Path | str, method: str, running: Mapping[int, Daemon]) -> Iterator[dict[int, LLM]]:
    """The model on each daemon, warm. They load side by side, which takes longer than what is measured."""

    def load(daemon: Daemon) -> LLM:
        llm = LLM(
            path,
            cluster=Cluster([daemon.address]),
            context=CONTEXT,
            method=None if method == DEFAULT else method,
            enable_prefix_caching=False,  # nothing is taken over from earlier answers or runs
            keep_learnt=False,
            wait_s=WAIT_S,
        )
        llm.generate(WARM_IDS, temperature=0.0, max_new_tokens=2, ignore_eos=True)
        return llm

    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(running)) as pool:
        loading = {threads: pool.submit(load, daemon) for threads, daemon in running.items()}
        try:
            found = {threads: stack.enter_context(each.result()) for threads, each in loading.items()}
        except BaseException:
            for daemon in running.values():
                daemon.process.kill()  # so that whoever waits for it ends
            raise
        yield found


def _ask(llm: LLM, asked: Asked, number: int, daemon: Daemon) -> tuple[Spent, Spent]:
    """What all prompts took until the first token, and from that to the last."""
    prompts: Sequence[str | list[int]] = asked.texts
    if not prompts:
        rng = np.random.default_rng(number)
        prompts = [rng.integers(FIRST_ID, VOCABULARY, asked.prompt_tokens).tolist()]
    reading, answering = Spent(), Spent()
    for prompt in prompts:
        came, moments = [], [Moment.now(daemon)]
        for piece in llm.stream(prompt, temperature=0.0, max_new_tokens=asked.new_tokens, ignore_eos=True):
            if piece.token_ids:  # without any it is text that was held back
                came.append(len(piece.token_ids))
                moments.append(Moment.now(daemon))
        reading.add(asked.prompt_tokens, *moments[:2])
        answering.add(sum(came[1:]), moments[1], moments[-1])
    return reading, answering
