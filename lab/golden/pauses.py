"""Seconds of pause by part and kind of loss.

Daemons of the tree, each a process of its own, run the bundled model; the head is in this process. In the
middle of an answer one is killed, stopped or halted, or comes back, or the head itself is killed and another
one goes on. Which parts a pause has: `lab.checks.pauses`.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from flowspec import LLM, Cluster, Device

# What a pause is made of, and how a head is killed and gone on with. The head's events are seen through
# `PauseWatch` alone.
from lab.checks.pauses import DRAFTER, FORMED, PauseWatch, parts_of
from lab.checks.resumes import killed, written
from lab.golden.limits import limited
from lab.golden.place import Place
from lab.golden.recording import Absent, Observation

PROMPT = "Tell me a story about a lighthouse, and then explain how a lighthouse works."
LAYERS = (3, 3, 2)
CONTEXT = 512
MOMENT, TOKENS, SHORT = 30, 90, 30
"""A fault strikes after so many tokens of an answer of so many; `SHORT` is an answer in between."""
JOURNAL_LINES = 10
ROUND_S, START_S, WAIT_S = 1200, 120.0, 180.0
"""Bounds, for a machine that is busy with other things: a round takes a minute on one that is not."""
PARTS: dict[str, tuple[str, ...]] = {
    "noticed": ("noticed",),
    "reached": ("reached",),
    "formed": ("loaded", "ready"),  # one begins with the last line of a log, which comes early or late
    "token": ("token",),
    "pause": ("pause",),
}
"""What is seen, and the parts of `lab.checks.pauses` that it is the sum of."""
FLOOR_S = 0.1
"""What is shorter counts as this long: nobody notices it, and on a busy machine it is chance."""
LISTENS = b" listens on "


class Daemon:
    """One daemon of the tree; it has the same port whenever it is started."""

    def __init__(self, place: Place, number: int, folder: Path) -> None:
        self.name, self.log = f"device-{number}", folder / f"log-{number}"
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        # With a board of its own it does not probe how fast this machine is.
        words = ["--port", self.address.partition(":")[2], "--name", self.name, "--threads", "1"]
        self._command = place.flowspec("daemon", *words, "--device", "cpu", "--profile", "raspberry-pi-4")
        self._place = place
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("wb") as log:
            self._process = self._place.start(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def wait(self) -> None:
        until_s = time.monotonic() + START_S
        while LISTENS not in self.log.read_bytes():
            if self._running.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(f"{self.name} does not listen: {self.log.read_text('utf-8')[-500:]}")
            time.sleep(0.02)

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "it was started"
        return self._process

    def strike(self, number: int) -> None:
        self._running.send_signal(number)

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class Opened:
    """The model on some daemons, with what is known of its pauses."""

    def __init__(self, llm: LLM, watch: PauseWatch) -> None:
        self.llm, self.watch = llm, watch

    def answer(self, tokens: int, strike: Callable[[], None] = lambda: None) -> float:
        """An answer in whose middle a fault strikes; returns when."""
        found, hit_s = 0, 0.0
        for piece in self.llm.stream(PROMPT, temperature=0, max_new_tokens=tokens, ignore_eos=True):
            if piece.token_ids:
                self.watch.token(time.monotonic())
            found += len(piece.token_ids)
            if found >= MOMENT and not hit_s:
                hit_s = time.monotonic()
                strike()
        return hit_s

    def lose(self, kind: str, strike: Callable[[], None]) -> Iterator[Observation]:
        yield from self.parts(kind, self.answer(TOKENS, strike))

    def parts(self, kind: str, since_s: float) -> Iterator[Observation]:
        found = parts_of(self.watch.marks, since_s)
        if not found.pauses:
            raise RuntimeError(f"{kind}: the answer ended without a pause")
        for name, parts in PARTS.items():
            yield _seconds(f"{kind}/{name}", sum(getattr(found, f"{part}_s") for part in parts))


def _seconds(key: str, value: float) -> Observation:
    return Observation(key=f"{key} s", value=max(FLOOR_S, value))


@contextlib.contextmanager
def opened(
    daemons: Sequence[Daemon], layers: Sequence[int], drafter: Daemon | None = None
) -> Iterator[Opened]:
    """All daemons have answered once before."""
    devices = [
        Device(name=each.name, address=each.address) for each in (*daemons, *([drafter] if drafter else []))
    ]
    cluster = Cluster(devices, drafters={"draft": drafter.name} if drafter else {})
    with (
        LLM(
            "bundled",
            cluster=cluster,
            layers=layers,
            dtype="float32",
            context=CONTEXT,
            keep_learnt=False,
            wait_s=WAIT_S,
            on_note=lambda text: None,
        ) as llm,
        PauseWatch(lambda: [each.log for each in daemons]) as watch,
    ):
        llm.session.head.observe(watch.observe)
        found = Opened(llm, watch)
        found.answer(SHORT)
        yield found


def observe(place: Place, name: str) -> Iterator[Observation | Absent]:
    """One round: each kind of loss once or twice, in an order in which few daemons have to start anew."""
    with limited(ROUND_S), contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=place.home)))
        daemons = [Daemon(place, number, folder) for number in range(len(LAYERS))]
        for each in daemons:
            stack.callback(each.end)
            each.start()
        for each in daemons:
            each.wait()
        first, second, third = daemons
        with opened(daemons, LAYERS) as run:
            yield from run.lose("killed stage", lambda: second.strike(signal.SIGKILL))
            yield from _returned(run, second)
            yield from run.lose("stopped stage", lambda: third.strike(signal.SIGTERM))
        _again(third)
        with opened(daemons, LAYERS) as run:
            yield from run.lose("hung stage", lambda: second.strike(signal.SIGSTOP))
            second.strike(signal.SIGCONT)
        with opened(daemons, LAYERS) as run:
            yield from run.lose("killed stage", lambda: first.strike(signal.SIGKILL))
        _again(first)
        with opened(daemons, LAYERS) as run:
            yield from run.lose("stopped stage", lambda: second.strike(signal.SIGTERM))
        _again(second)
        with opened((first, second), (4, 4), drafter=third) as run:
            yield from _lost_drafter(run, third)
        yield from _killed_head(place, (first, second), folder)


def _again(daemon: Daemon) -> None:
    daemon.end()
    daemon.start()
    daemon.wait()


def _returned(run: Opened, daemon: Daemon) -> Iterator[Observation]:
    """From its start until it has layers again, and the pause when it is taken in, between two answers."""
    count, started_s = len(run.llm.stages), time.monotonic()
    _again(daemon)
    while len(run.llm.stages) == count:
        run.answer(SHORT)
    run.answer(SHORT)
    formed_s = run.watch.first(FORMED, started_s)
    assert formed_s is not None, "it is among the stages"
    yield _seconds("returned stage/away", formed_s - started_s)
    yield from run.parts("returned stage", started_s)


def _lost_drafter(run: Opened, daemon: Daemon) -> Iterator[Observation]:
    """Answers go on without it: there is no pause, but a moment in which nothing is guessed."""
    hit_s = run.answer(TOKENS, lambda: daemon.strike(signal.SIGKILL))
    gone_s = run.watch.first(DRAFTER, hit_s)
    if gone_s is None:
        raise RuntimeError("the answer ended before the drafter's loss was noticed")
    yield _seconds("lost drafter/noticed", gone_s - hit_s)
    yield _seconds("lost drafter/longest without a token", parts_of(run.watch.marks, hit_s).longest_s)


def _killed_head(place: Place, daemons: Sequence[Daemon], folder: Path) -> Iterator[Observation]:
    """From the start of the head that goes on until its first token, in the journal that it goes on with."""
    file, journal = folder / "cluster.toml", folder / "journal"
    file.write_text(
        Cluster([Device(name=each.name, address=each.address) for each in daemons]).text(), "utf-8"
    )
    where = ["--cluster", str(file), "--layers", "4,4", "--no-keep-learnt"]
    how = ["--dtype", "float32", "--context", str(CONTEXT), "--temperature", "0", "--max-new-tokens", "400"]
    command = place.flowspec("generate", *where, *how, "--journal", str(journal), PROMPT)
    if not killed(command, journal, JOURNAL_LINES):
        raise RuntimeError("the answer ended before its head was killed")
    lines, started_s = written(journal), time.monotonic()
    command = place.flowspec("generate", *where, "--resume", str(journal))
    with place.start(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            while written(journal) <= lines:
                if process.poll() is not None or time.monotonic() > started_s + WAIT_S:
                    process.kill()
                    said = process.stderr.read() if process.stderr is not None else b""
                    raise RuntimeError(f"--resume adds no token: {said.decode('utf-8', 'replace')[-500:]}")
                time.sleep(0.005)
            yield _seconds("killed head/until a token", time.monotonic() - started_s)
        finally:
            process.kill()
