"""How the product looks from outside: what a person sees in a terminal of 80 columns and 24 lines, what a
program reads, and both without what differs from run to run.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import psutil
import pyte

from flowspec.model.files import DEMO_FOLDER
from lab.golden.place import KEPT, Place

T = TypeVar("T")

COLUMNS, LINES = 80, 24
KEPT_LINES = 100_000
WAIT_S = 300.0
"""What nothing takes that goes well, also on a busy machine."""
END_S = 30.0
IN_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
"""Makes standard input the terminal of its session, so that a command hears Ctrl-C; then is the command."""


@dataclass(frozen=True, slots=True)
class Mask:
    """What differs from run to run in a text, what stands in its place, and why it differs."""

    pattern: re.Pattern[str]
    replacement: str
    why: str


LINKS = "how fast links are is measured, and so is whether doctor warns of them"
MASKS: tuple[Mask, ...] = (
    Mask(re.compile(r"127\.0\.0\.1:\d{4,5}\b"), "127.0.0.1:#port", "free ports are the system's choice"),
    Mask(re.compile(r"(?<=--host 127\.0\.0\.1 --port )\d+"), "#port", "free ports are the system's choice"),
    Mask(
        re.compile(r"(?m)(?<=no address of this machine, which has )[^;]+(?=;)"),
        "#addresses",
        "machines differ",
    ),
    Mask(
        re.compile(r"(?m)^(golden-\d +\d+-\d+ +\S+ +\S+ +)[\d.]+ [MG]iB"),
        r"\1# MiB",
        "doctor tells the free memory",
    ),
    Mask(re.compile(r"[\d.]+ ms, [\d.]+ Mbit/s"), "# ms, # Mbit/s", LINKS),
    Mask(re.compile(r"(?m)^warning [^\n]+ -> [^\n]+\n {8}-> [^\n]+\n"), "", LINKS),
    Mask(re.compile(r"\n+(no problems), (?:no|\d+) warnings?$"), r"\n\1, # warnings", LINKS),
    Mask(
        re.compile(r"(?m)^[^\n]+ \(\d+ of \d+(?:, [^()\n]+)?\)(?:\n|\Z)"),
        "",
        "what takes long tells every so often how far it is",
    ),
    Mask(
        re.compile(r"(?m)^\((?:still [^\n]+ after \d+ s: [^\n]+|starting; [^\n]+ a while)\)(?:\n|\Z)"),
        "",
        "how often it is told is up to how long loading takes",
    ),
    Mask(re.compile(r"\bpid \d+"), "pid #pid", "process ids are the system's choice"),
    Mask(
        re.compile(r"[\d.]+ tokens/s, first after [\d.]+ m?s"),
        "# tokens/s, first after # s",
        "how fast an answer came is measured",
    ),
    Mask(
        re.compile(r"(?<= tokens \()\d+(?= taken over\))"),
        "#",
        "how much of an answer is there when its chat is killed is up to time",
    ),
    Mask(re.compile(r"(, seed )\d{3,}"), r"\1#drawn", "a seed that is not given is drawn"),
    Mask(
        re.compile(r"(?:\^C\n|\n\^C)(?=\d\d:\d\d:\d\d )"),
        "\n",
        "a terminal shows ^C before or behind the end of the line that is being written",
    ),
    Mask(
        re.compile(r"(?m)^\d\d:\d\d:\d\d (?=INFO|WARNING|ERROR)"),
        "#time ",
        "log lines begin with the time of day",
    ),
    Mask(
        re.compile(r"(?<=^The last answer came at )[\d.]+ tokens/s; (?:\d+%|none)", re.M),
        "# tokens/s; #%",
        "how fast an answer came, and what was guessed in time",
    ),
    Mask(
        re.compile(r"(?m)^ *(local-\d+) +(\d+-\d+) +(\d+ MiB) +\d+ MiB +[\d.]+ ms +[\d.]+ ms +[\d.]+ ms *$"),
        r"\1 \2 \3 # MiB # ms # ms # ms",
        "memory of a process and how long its parts took are measured",
    ),
    Mask(re.compile(r"(?<=means over )\d+(?= segments)"), "#", "how many it takes is up to guesses in time"),
    Mask(re.compile(r"(?m)^[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}$"), "#key", "keys are drawn"),
    Mask(
        re.compile(r"(?m)^(\w+): [\d.]+ GB/s, [\d.]+ GFLOP/s$"),
        r"\1: # GB/s, # GFLOP/s",
        "profile measures them",
    ),
    Mask(
        re.compile(r"(?m)^[\d.]+ us a layer, [\d.]+ us an expert$"),
        "# us a layer, # us an expert",
        "profile measures them",
    ),
    Mask(
        re.compile(r"(fitted to: \w+ )\d+%"), r"\1#%", "how well a formula fits what profile measures varies"
    ),
)
BROKEN = re.compile(r"(?m)^(?=.*127\.0\.0\.1)(.{80})\n")
"""A terminal breaks a line with an address elsewhere when its port has fewer digits."""
FOLDED = (
    re.compile(r"(?m)^ *(?:answer {5})?\d+ tokens, [^\n]+(?:\n  +(?!local-|arithmetic |golden-)\S[^\n]*)*"),
    re.compile(r"(?m)^memory: of the whole process;(?:[^\n]*\n){1,4}?computing$"),
    re.compile(r"(?m)^ *stage +layers +weights +memory[^\n]*$"),
    re.compile(r"(?m)^\S+ INFO +\S+ listens on [^\n]+(?:\n +[^\n]+)*"),
)
"""Messages that hold what is measured, and so are folded or spaced otherwise from run to run: each becomes
one line."""
FIGURES = re.compile(
    r"(?m)^(?:segments|tokens|nodes|rows|stages|drafter|seconds) {2,}\S[^\n]*(?:\n {11}[^\n]+)*"
)
"""Statistics of an answer: which guesses were there in time, and how long each part took."""
DIGITS = re.compile(r"\d+(\.\d+)?")


def mask_text(lines: Sequence[str], place: Place) -> list[str]:
    """Gives the lines without what differs from run to run."""
    text = mask_place(BROKEN.sub(r"\1", "\n".join(lines)), place)
    text = FIGURES.sub(lambda found: DIGITS.sub("#", " ".join(found[0].split())), text)
    for folded in FOLDED:
        text = folded.sub(lambda found: " ".join(found[0].split()), text)
    for mask in MASKS:
        text = mask.pattern.sub(mask.replacement, text)
    return text.splitlines()


def mask_place(text: str, place: Place) -> str:
    """Gives the text with names in the place of temporary folders."""
    for folder, name in ((place.home, "#home"), (place.models, "#models"), (place.tree, "#tree")):
        for written in (str(folder), str(folder).replace("/", "\\/")):  # a script for zsh escapes slashes
            text = text.replace(written, name)
    return text


PYTHONS = (("software", "python"), ("versions", "python"))
"""The machine's, which reports tell."""


def mask_json(value: Any, volatile_keys: Iterable[str], place: Place | None = None) -> Any:
    """Gives a JSON value whose numbers below these keys are `#number`.

    A key is a name, or several with dots between them: the last names of a path.
    """
    return _masked(value, tuple(tuple(key.split(".")) for key in volatile_keys), (), place)


def _masked(value: Any, keys: Collection[tuple[str, ...]], path: tuple[str, ...], place: Place | None) -> Any:
    if isinstance(value, dict):
        return {name: _masked(each, keys, (*path, name), place) for name, each in value.items()}
    if isinstance(value, list):
        return [_masked(each, keys, path, place) for each in value]
    if path[-2:] in PYTHONS:
        return "#version"
    if isinstance(value, str):
        return value if place is None else "\n".join(mask_text(value.split("\n"), place))
    if isinstance(value, bool) or value is None or not _is_volatile(path, keys):
        return value
    return "#number"


def _is_volatile(path: tuple[str, ...], keys: Collection[tuple[str, ...]]) -> bool:
    return any(
        path[at : at + len(key)] == key for key in keys for at in range(max(0, len(path) - len(key) + 1))
    )


def own_place(place: Place, name: str) -> Place:
    """Makes a home of its own in the place's home, which shares compiled kernels with it."""
    home = place.home / name
    for folder in ("state", "run", "cache/flowspec"):
        (home / folder).mkdir(parents=True, mode=0o700)
    for kept in KEPT:
        (home / "cache" / "flowspec" / kept).symlink_to(place.home / "cache" / "flowspec" / kept)
    return replace(place, home=home)


def environment_at_home(place: Place) -> dict[str, str]:
    """Gives the environment of commands that are run from the home: files there need no long names."""
    return place.environment(PYTHONPATH=str(place.tree))


def piped(
    place: Place, *arguments: str, stdin: bytes = b"", timeout_s: float = WAIT_S
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, with pipes in place of a terminal; gives what it wrote."""
    done = subprocess.run(
        place.flowspec(*arguments),
        input=stdin,
        capture_output=True,
        timeout=timeout_s,
        cwd=place.home,
        env=environment_at_home(place),
        check=False,
    )
    out, err = (text.decode("utf-8", "backslashreplace") for text in (done.stdout, done.stderr))
    return subprocess.CompletedProcess(done.args, done.returncode, out, err)


def shipped_models() -> list[Path]:
    """Gives the folders of the package's models that chat, smallest first; the bundled one is the last."""
    folders = [path.parent for path in DEMO_FOLDER.glob("*/chat_template.jinja")]
    return sorted(folders, key=lambda folder: (folder / "model.safetensors").stat().st_size)


def side_by_side(jobs: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Runs jobs two at a time and gives what they give, in their order.

    If this process is told to end, or an error ends it, all processes that jobs have started are ended.
    """
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(job) for job in jobs]
        try:
            for each in running:
                yield each.result()
        except BaseException:
            for each in running:
                each.cancel()
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            raise


class Terminal:
    """A command in a pseudo terminal, and a person before it."""

    def __init__(self, place: Place, *arguments: str) -> None:
        self.screen = pyte.HistoryScreen(COLUMNS, LINES, history=KEPT_LINES)
        self._stream = pyte.ByteStream(self.screen)
        self._changed = threading.Condition()
        self._has_ended = False
        self._ours, theirs = os.openpty()
        try:
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
            command = [sys.executable, "-ISc", IN_TERMINAL, *place.flowspec(*arguments)[1:]]
            at_home = {"cwd": place.home, "env": environment_at_home(place), "start_new_session": True}
            self.process = place.start(command, stdin=theirs, stdout=theirs, stderr=theirs, **at_home)
        finally:
            os.close(theirs)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_process(self.process)
        self._reader.join(END_S)
        os.close(self._ours)

    @property
    def lines(self) -> list[str]:
        """All lines that stay, also those that scrolled out, without empty ones at the end."""
        past = ["".join(row[at].data for at in range(COLUMNS)) for row in self.screen.history.top]
        found = [line.rstrip() for line in (*past, *self.screen.display)]
        while found and not found[-1]:
            found.pop()
        return found

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def until(self, is_there: Callable[[list[str]], object]) -> None:
        """Waits until the lines are as wanted."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended or is_there(self.lines), WAIT_S)
            if not is_there(self.lines):
                raise RuntimeError(f"expected other lines in time; the terminal shows {self.lines[-LINES:]}")

    def end(self) -> int:
        """Waits until the command has ended; gives its exit status."""
        status = self.process.wait(WAIT_S)
        self._reader.join(END_S)
        return status

    def _read(self) -> None:
        while True:
            try:
                found = os.read(self._ours, 65536)
            except OSError:  # nobody has the other end any more
                found = b""
            with self._changed:
                self._stream.feed(found)
                self._has_ended = not found
                self._changed.notify_all()
                if not found:
                    return


def end_process(process: subprocess.Popen[Any]) -> None:
    """Ends a process and its children by force, where it still runs."""
    if process.poll() is None:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(family[1:], timeout=END_S)
    process.wait(END_S)
