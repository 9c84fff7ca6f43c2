"""What a pause was spent on, in seconds: from when things happened, at the head and in the daemons' logs.

A pause is the time without a token around a pipeline that is lost and formed anew. Its parts in turn:

- `noticed`: from the fault, or the last token after it, until the head gave the pipeline up;
- `reached`: until the last device of the next one had answered and was told its layers;
- `loaded`: until the last of them had these layers, and a connection to the next device;
- `ready`: until the head had heard so from all;
- `token`: until the first token, for which all that is known is computed again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flowspec.core.head.events import (
    DrafterLost,
    HeadCommand,
    HeadEvent,
    PipelineLost,
    PipelineReformed,
)

TOKEN, LOST, TOLD, LOADED, FORMED, DRAFTER = "token", "lost", "told", "loaded", "formed", "drafter lost"
LOG_LINES = {" assigns ": TOLD, " ready: ": LOADED}
"""What daemons log when a head gives them layers, and when they have them."""
LOOK_EVERY_S = 0.01
"""How often logs are read: as exact are the parts that begin or end in a daemon."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Something happened; `at_s` is of the monotonic clock."""

    at_s: float
    what: str


@dataclass(slots=True, kw_only=True)
class Parts:
    """Seconds by part, of all pauses together; `longest_s` is the longest time without a token, for any
    reason."""

    pauses: int = 0
    noticed_s: float = 0.0
    reached_s: float = 0.0
    loaded_s: float = 0.0
    ready_s: float = 0.0
    token_s: float = 0.0
    longest_s: float = 0.0

    @property
    def pause_s(self) -> float:
        return self.noticed_s + self.reached_s + self.loaded_s + self.ready_s + self.token_s


def parts_of(marks: Iterable[Mark], since_s: float) -> Parts:
    """The pauses after `since_s`, when the fault struck; what the last one still lacks counts as nothing."""
    parts = Parts()
    good_s = token_s = since_s  # since when all has been well; when the last token came
    lost_s = formed_s = None
    during: list[Mark] = []
    for mark in sorted((each for each in marks if each.at_s >= since_s), key=lambda each: each.at_s):
        if mark.what == TOKEN:
            if formed_s is not None:
                parts.token_s += mark.at_s - formed_s
            parts.longest_s = max(parts.longest_s, mark.at_s - token_s)
            good_s = token_s = mark.at_s
            formed_s = None
        elif mark.what == LOST:
            parts.pauses += 1
            parts.noticed_s += mark.at_s - good_s
            lost_s, formed_s, during = mark.at_s, None, []
        elif lost_s is not None and mark.what == FORMED:
            told_s = max((each.at_s for each in during if each.what == TOLD), default=lost_s)
            loaded_s = max((each.at_s for each in during if each.what == LOADED), default=told_s)
            loaded_s = max(loaded_s, told_s)
            parts.reached_s += told_s - lost_s
            parts.loaded_s += loaded_s - told_s
            parts.ready_s += mark.at_s - loaded_s
            good_s = formed_s = mark.at_s
            lost_s = None
        else:
            during.append(mark)
    return parts


@dataclass(slots=True)
class PauseWatch:
    """Collects marks while it is entered: of a head that it observes, and of daemons whose logs it reads."""

    logs: Callable[[], Sequence[Path]]
    marks: list[Mark] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _read: dict[Path, int] = field(default_factory=dict)

    def observe(self, event: HeadEvent, commands: Sequence[HeadCommand], now_s: float) -> None:
        kinds: dict[type, str] = {PipelineLost: LOST, PipelineReformed: FORMED, DrafterLost: DRAFTER}
        if (what := kinds.get(type(event))) is not None:
            self.marks.append(Mark(now_s, what))

    def token(self, at_s: float) -> None:
        self.marks.append(Mark(at_s, TOKEN))

    def is_over(self, what: str, since_s: float | None) -> bool:
        """Whether that has happened since then, and a token came after it."""
        at_s = None if since_s is None else self.first(what, since_s)
        return at_s is not None and self.first(TOKEN, at_s) is not None

    def first(self, what: str, since_s: float) -> float | None:
        return min(
            (mark.at_s for mark in tuple(self.marks) if mark.what == what and mark.at_s >= since_s),
            default=None,
        )

    def _look(self) -> None:
        for path in self.logs():
            size = path.stat().st_size if path.exists() else 0
            begin = self._read.setdefault(path, 0)
            if size < begin:  # a daemon began a new one
                begin = self._read[path] = 0
            if size == begin:
                continue
            with path.open("rb") as file:
                file.seek(begin)
                lines, _, _ = file.read(size - begin).rpartition(b"\n")
            now_s = time.monotonic()
            self._read[path] = begin + len(lines) + bool(lines)
            for line in lines.decode("utf-8", "replace").splitlines():
                self.marks += [Mark(now_s, what) for words, what in LOG_LINES.items() if words in line]

    def _run(self) -> None:
        while not self._stop.wait(LOOK_EVERY_S):
            self._look()

    def __enter__(self) -> PauseWatch:
        self._read = {path: path.stat().st_size for path in self.logs() if path.exists()}
        self._thread = threading.Thread(target=self._run, name="logs", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        assert self._thread is not None
        self._thread.join()
        self._look()
