"""Tokens/s of one daemon with one thread and with two: of the toy, of SmolLM2-135M-Instruct, and of a Llama
of 1.24 G parameters with made weights in the forms that people download.

Answers are short and asked several times; the median counts. Whatever else runs takes from a rate, and less
from the time that processors spend on a token: so both are seen.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flowspec import LLM, Cluster
from lab.golden.daemons import Daemon, daemons
from lab.golden.limits import limited
from lab.golden.llama import VOCABULARY, llama
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
CONTEXT = 512
FIRST_ID = 3
"""The first that ends no answer."""


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
TOY = Asked(texts=TEXTS, new_tokens=48, times=4)
SMOLLM2 = Asked(texts=TEXTS, new_tokens=24, times=2)
MADE = Asked(methods=(PLAIN,), prompt_tokens=64, new_tokens=9, times=3)


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
        yield from _measure("toy", "bundled", TOY, running)
        try:
            yield from _measure("smollm2", smollm2(place), SMOLLM2, running)
        except UnavailableError as error:
            yield Absent(key="smollm2", why=str(error))
        try:
            for form, packed in llama(place).items():
                yield from _measure(f"llama-1.24b/{form}", packed, MADE, running)
        except UnavailableError as error:
            yield Absent(key="llama-1.24b", why=str(error))


def _measure(
    model: str, path: Path | str, asked: Asked, running: Mapping[int, Daemon]
) -> Iterator[Observation]:
    for method in asked.methods:
        for threads, label in THREADS.items():
            with _opened(path, method, running[threads]) as llm:
                answers = [_ask(llm, asked, number, running[threads]) for number in range(asked.times)]
            for part, at in (("prompt", 0), (method, 1)):
                if part == "prompt" and asked.texts:
                    continue
                key = f"{model}/{part}, {label}"
                spent = [each[at] for each in answers]
                for each in spent:
                    yield Observation(key=f"{key}, tokens/s", value=each.tokens / each.wall_s)
                if threads == 1:
                    cpu_s = sum(each.cpu_s for each in spent) / sum(each.tokens for each in spent)
                    yield Observation(key=f"{key}, cpu ms a token", value=1e3 * cpu_s)


@contextlib.contextmanager
def _opened(path: Path | str, method: str, daemon: Daemon) -> Iterator[LLM]:
    """The model on one daemon, warm; nothing is taken over from earlier answers or runs."""
    with LLM(
        path,
        cluster=Cluster([daemon.address]),
        context=CONTEXT,
        method=None if method == DEFAULT else method,
        enable_prefix_caching=False,
        keep_learnt=False,
        wait_s=WAIT_S,
    ) as llm:
        llm.generate(list(range(10, 18)), temperature=0.0, max_new_tokens=2, ignore_eos=True)
        yield llm


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
