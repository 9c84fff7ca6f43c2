"""Time to the first answer, by part: of a command, a daemon, a server, a chat, and where nothing is cached.

Parts are told from what a process writes, by when it arrives. Time on the wall is what users wait, and moves
with whatever else runs; that of the processor, of a process and its own, hardly does: so both are seen.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import pty
import re
import resource
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from lab.golden.limits import limited
from lab.golden.place import Place
from lab.golden.recording import Absent, Observation

LISTENS, TOLD, READY = " listens on ", " assigns layers ", " ready: "
ASK = ("generate", "What is 17 + 25?", "--local", "2", "--temperature", "0", "--json", "-v")
ROUND_S, LIMIT_S = 1200, 400.0
"""How long a round and a process may take, on a machine that is busy with other things."""
STOP_S = 20.0
TURNS = (0, 1, 2, 3, 4)
"""In each a command that takes long runs behind all that take a second, so that these see a whole round."""
FLOOR_S = 0.1
"""What is shorter counts as this long: nobody waits for it, and it is mostly chance."""


@dataclass(slots=True)
class Ran:
    """What a process wrote, a line at a time and when; `cpu_s` is also its children's."""

    lines: list[tuple[float, str]] = field(default_factory=list)
    wall_s: float = 0.0
    cpu_s: float = 0.0
    status: int = 0

    def first(self, pattern: str) -> float:
        return self._times(pattern)[0]

    def last(self, pattern: str) -> float:
        return self._times(pattern)[-1]

    def _times(self, pattern: str) -> list[float]:
        found = [at_s for at_s, line in self.lines if re.search(pattern, line)]
        if not found:
            raise RuntimeError(f"expected a line with {pattern!r}, got {self.said!r}")
        return found

    @property
    def said(self) -> str:
        return "\n".join(line for _, line in self.lines)[-500:]


def observe(place: Place, name: str) -> Iterator[Observation | Absent]:
    """One round: each thing is started some times, and of each number the least is seen."""
    with limited(ROUND_S):
        run(place, place.flowspec(*ASK))  # writes Python's bytecode and reads what is on the disk
        least: dict[str, float] = {}
        for turn, (kind, (turns, see)) in itertools.product(TURNS, KINDS.items()):
            for what, value in see(place).items() if turn in turns else ():
                key = f"{kind}/{what}"
                least[key] = min(max(FLOOR_S, value), least.get(key, math.inf))
        for key, value in least.items():
            yield Observation(key=key, value=value)


def _generate(place: Place) -> dict[str, float]:
    ran = run(place, place.flowspec(*ASK))
    listen_s, told_s, ready_s = (ran.last(words) for words in (LISTENS, TOLD, READY))
    (answer,) = (json.loads(line) for _, line in ran.lines if line.startswith("{") and line.endswith("}"))
    return {
        "devices listen s": listen_s,
        "devices are told s": told_s - listen_s,
        "pipeline ready s": ready_s - told_s,
        "first token s": answer["time_to_first_token_s"],
        "whole s": ran.wall_s,
        "cpu s": ran.cpu_s,
    }


def _empty_cache(place: Place) -> dict[str, float]:
    """Kernels are compiled and tried, and nothing of that stays."""
    with tempfile.TemporaryDirectory(dir=place.home) as folder:
        ran = run(place, place.flowspec(*ASK), XDG_CACHE_HOME=folder)
    return {"whole s": ran.wall_s, "cpu s": ran.cpu_s}


def _serve(place: Place) -> dict[str, float]:
    ran = run(place, place.flowspec("serve", "--port", "0", "--local", "2", "--json"), until=r"^\{.*\}$")
    return {"ready s": ran.last(r"^\{.*\}$"), "cpu s": ran.cpu_s}


def _chat(place: Place) -> dict[str, float]:
    ran = run(place, place.flowspec("chat", "--local", "2", "--no-journal"), until="you>", is_chat=True)
    return {"prompt ready s": ran.first("you>"), "cpu s": ran.cpu_s}


def _daemon(place: Place) -> dict[str, float]:
    ran = run(place, place.flowspec("daemon", "--port", "0", "--threads", "1"), until=LISTENS)
    return {"listens s": ran.first(LISTENS), "cpu s": ran.cpu_s}


def _command(*words: str) -> Callable[[Place], dict[str, float]]:
    def see(place: Place) -> dict[str, float]:
        ran = run(place, [sys.executable, *words])
        return {"whole s": ran.wall_s, "cpu s": ran.cpu_s}

    return see


KINDS: dict[str, tuple[Sequence[int], Callable[[Place], dict[str, float]]]] = {
    "help": (TURNS, _command("-m", "flowspec", "--help")),
    "help of generate": (TURNS, _command("-m", "flowspec", "generate", "--help")),
    "import of LLM": (TURNS, _command("-c", "from flowspec import LLM")),
    "daemon": (TURNS, _daemon),
    "generate": ((0, 3), _generate),
    "serve": ((1,), _serve),
    "chat": ((2,), _chat),
    "generate, empty cache": ((4,), _empty_cache),
}
"""In which turns, and how, each is seen."""


def run(
    place: Place, command: Sequence[str], *, until: str = "", is_chat: bool = False, **environment: str
) -> Ran:
    """Runs a process to its end, or until it wrote what `until` says and then has it end."""
    ran, started_s = Ran(), time.monotonic()
    reading, writing = pty.openpty() if is_chat else os.pipe()
    try:
        pipes = {"stdin": writing if is_chat else subprocess.DEVNULL, "stdout": writing, "stderr": writing}
        own = place.environment(**environment)
        process = place.start(command, env=own, start_new_session=True, **pipes)
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    try:
        for at_s, line in _lines(reading, started_s + LIMIT_S):
            ran.lines.append((at_s - started_s, line))
            if until and re.search(until, line):
                until = ""
                if is_chat:
                    os.write(reading, b"/quit\r")
                else:
                    process.send_signal(signal.SIGTERM)
        _, status, usage = _wait(process.pid, time.monotonic() + STOP_S)
        process.returncode = ran.status = os.waitstatus_to_exitcode(status)
        ran.wall_s, ran.cpu_s = time.monotonic() - started_s, usage.ru_utime + usage.ru_stime
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        os.close(reading)
    if ran.status:
        raise RuntimeError(f"status {ran.status} of {' '.join(command[1:])}: {ran.said}")
    return ran


def _lines(reading: int, until_s: float) -> Iterator[tuple[float, str]]:
    """What comes, and when, to the end; a line that has not ended yet is given as it stands, too."""
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(reading, selectors.EVENT_READ)
        while selector.select(max(0.0, until_s - time.monotonic())):
            try:
                chunk = os.read(reading, 65536)
            except OSError:  # a terminal whose other end is closed
                return
            if not chunk:
                return
            now_s = time.monotonic()
            *lines, rest = (rest + chunk).split(b"\n")
            for line in (*lines, *((rest,) if rest else ())):
                yield now_s, line.decode("utf-8", "replace")
    raise TimeoutError(f"nothing came to its end within {LIMIT_S:.0f} s")


def _wait(pid: int, until_s: float) -> tuple[int, int, resource.struct_rusage]:
    """The end of a process whose output has ended, with what it and its children used."""
    while time.monotonic() < until_s:
        found = os.wait4(pid, os.WNOHANG)
        if found[0]:
            return found
        time.sleep(0.002)
    raise TimeoutError(f"process {pid} closed its output and did not end")
