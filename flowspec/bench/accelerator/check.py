"""Runs the steps of an accelerator's check in processes of their own, within a time that is given.

A process that dies is a finding about what it was at, and the next one goes on behind that. One that does not
end in its time says nothing of what is right: it may hang, or the board is slow. Steps come in the order of
what they are worth; those for which no time is left are left out, and that is told.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowspec.child_process import ending, python_module, words
from flowspec.core.protocol.precision import OF_ANY_MODEL

SECONDS = 300.0
"""How long all steps may take together, unless another time is asked for: on a server with an H200 two
minutes were over before answers were compared, for processes began slowly there."""
SHARES = {"torch": 0.5, "plain": 0.5, "kernels": 0.4, "slice": 0.5, "verify": 0.5}
"""Of that time, how much one part of a step may take."""
START_FACTOR = 1.5
"""A step is not begun with less time than so many times what the first one took to start."""
DTYPES = tuple(sorted(OF_ANY_MODEL, key=lambda name: name == "float16"))
"""The one that is used least is the last."""
COMMAND = tuple(python_module("flowspec.bench.accelerator.steps"))
RIGHT, WRONG, UNFINISHED, LEFT_OUT = "right", "wrong", "not finished in time", "left out"
Tell = Callable[["Outcome"], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one part of a step.

    `found` is what it found; `fault` says what is wrong, why it is left out, or how long it had.
    """

    step: str
    dtype: str
    state: str
    s: float
    fault: str = ""
    found: Mapping[str, Any] = field(default_factory=dict)


class Stopwatch:
    """Seconds since it was made, or started again."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._started_s = time.monotonic()

    @property
    def s(self) -> float:
        return time.monotonic() - self._started_s


class Check:
    """One run of all steps. `tell` hears of each outcome as it comes; `outcomes` holds them all."""

    def __init__(
        self,
        device: str,
        dtypes: Sequence[str],
        seconds: float,
        tell: Tell,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self.outcomes: list[Outcome] = []
        self._device = device
        self._dtypes = tuple(dtype for dtype in DTYPES if dtype in dtypes)
        self._seconds = seconds
        self._tell = tell
        self._command = command
        self.watch = Stopwatch()
        self._start_s = 0.0

    @property
    def left_s(self) -> float:
        return self._seconds - self.watch.s

    def run(self) -> list[Outcome]:
        """All steps, those of the first precision before the others, for a slow board may come no further.

        What they keep is thrown away at the end. Nothing of the user's caches is read or written.
        """
        prefix = "flowspec-accelerator-"
        with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
            (found,) = self._step("torch", Path(folder))
            if found.state != RIGHT:
                return self.outcomes  # all else stands on it
            self._device = str(found.found["device"])
            self._start_s = float(found.found.get("start_s", found.s))
            has_plain: bool | None = None
            for dtypes in (self._dtypes[:1], self._dtypes[1:2], self._dtypes[2:]):
                usable = []
                for dtype in dtypes:
                    (tried,) = self._step("kernels", Path(folder), [dtype])
                    usable += [dtype] if tried.found.get("kernel") else []
                if usable and has_plain is None:
                    self._step("verify", Path(folder), usable[:1])
                    (plain,) = self._step("plain", Path(folder))
                    has_plain = plain.state == RIGHT
                if has_plain:
                    self._step("slice", Path(folder), usable)
        return self.outcomes

    def _step(self, name: str, folder: Path, dtypes: Sequence[str] = ("",)) -> list[Outcome]:
        """Runs a step for each precision, in as few processes as die of it."""
        begun = len(self.outcomes)
        while len(self.outcomes) - begun < len(dtypes):
            left = dtypes[len(self.outcomes) - begun :]
            if self.left_s < START_FACTOR * self._start_s + 1:
                why = "no time was left"
                for dtype in left:
                    self._note(Outcome(step=name, dtype=dtype, state=LEFT_OUT, s=0.0, fault=why))
                break
            self._child(name, folder, left)
        return self.outcomes[begun:]

    def _child(self, name: str, folder: Path, dtypes: Sequence[str]) -> None:
        """One process, which ends after all of these precisions, or at the first that it does not outlive."""
        arguments = [name, f"--device={self._device}", f"--folder={folder}"]
        arguments += [f"--dtype={dtype}" for dtype in dtypes if dtype]
        environment = {**os.environ, "XDG_CACHE_HOME": str(folder), "HF_HUB_OFFLINE": "1"}
        if self._device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""  # the drafter, too, is to run on the CPU
        limit_s = SHARES[name] * self._seconds
        command = [*self._command, *arguments]
        with tempfile.TemporaryFile() as errors, started(command, environment, errors) as child:
            at, watch = 0, Stopwatch()
            for word in words(child, lambda: min(self.left_s, limit_s - watch.s)):
                if "found" not in word and "fault" not in word:
                    continue
                spent_s = watch.s
                state = WRONG if "fault" in word else RIGHT
                said = {"fault": word.get("fault", ""), "found": word.get("found", {})}
                self._note(Outcome(step=name, dtype=dtypes[at], state=state, s=spent_s, **said))
                at += 1
                watch.restart()
            if at == len(dtypes):
                return
            spent_s = watch.s
            if child.poll() is not None:
                state, why = WRONG, ending(child.returncode, errors)
            else:
                state, why = UNFINISHED, f"it had {spent_s:.0f} s"
            self._note(Outcome(step=name, dtype=dtypes[at], state=state, s=spent_s, fault=why))

    def _note(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self._tell(outcome)


def start(command: Sequence[str], environment: Mapping[str, str], errors: Any) -> subprocess.Popen[bytes]:
    """A step's process, in a session of its own, so that all that it starts ends with it."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        start_new_session=True,
        env=dict(environment),
    )


@contextlib.contextmanager
def started(
    command: Sequence[str],
    environment: Mapping[str, str],
    errors: Any,
) -> Iterator[subprocess.Popen[bytes]]:
    """A step's process, which is ended with all its children."""
    child = start(command, environment, errors)
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        assert child.stdout is not None
        child.stdout.close()
