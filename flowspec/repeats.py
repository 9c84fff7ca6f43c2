"""A log in which a line that comes again and again is said once, and later how often it came: what somebody
else can cause a thousand times a second must not fill a disk."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

EVERY_S = 60.0
"""A line that still comes is told of this often."""
NEW_LINE = "\n"
ABOUT = "about"
LINES_MAX = 256
"""So many lines are remembered."""


@dataclass(slots=True)
class _Said:
    """Its first line, when it was said or told of last, and how often it came since then."""

    text: str
    said_s: float
    count: int = 0


class Repeats:
    """Which lines are said, and which are counted; whoever calls knows the time."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, _Said] = OrderedDict()

    def take(self, text: str, now_s: float, about: str = "") -> list[str] | None:
        """None for a line of which one `about` the same was said a moment ago (else: one that begins with the
        same line): it is counted. Else what is to be told before it, of those that were."""
        first = text.partition(NEW_LINE)[0]
        known = self._known.get(about or first)
        if known is not None and now_s - known.said_s < EVERY_S:
            known.count += 1
            return None
        found = self.rest(now_s)
        self._known[about or first] = _Said(first, now_s)
        self._known.move_to_end(about or first)
        if len(self._known) > LINES_MAX:
            self._known.popitem(last=False)
        return found

    def rest(self, now_s: float, *, is_due: bool = False) -> list[str]:
        """Tells of all lines that were counted, or of those that are due."""
        found = []
        for known in self._known.values():
            if known.count and (not is_due or now_s - known.said_s >= EVERY_S):
                times = "once more" if known.count == 1 else f"{known.count} times more"
                found.append(f"{known.text} ({times})")
                known.said_s, known.count = now_s, 0
        return found

    @property
    def due_s(self) -> float:
        """When `rest` has something that is due; infinity where nothing was counted."""
        return min(
            (known.said_s + EVERY_S for known in self._known.values() if known.count), default=float("inf")
        )


LOG_FORM, LOG_TIME = "%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S"
"""Of a line of the log; the time of day in a terminal, in a file the whole date."""


class RepeatHandler(logging.Handler):
    """Hands lines on to another handler: each of them, but warnings and errors as `Repeats` has it.

    What such a line is about its `extra` may say (`ABOUT`), where texts differ by what others choose.
    """

    def __init__(self, handler: logging.Handler, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.formatter = handler.formatter  # a handler without one would be given another
        self._handler = handler
        self._clock = clock
        self._repeats = Repeats()
        self._timer: threading.Timer | None = None

    def setFormatter(self, fmt: logging.Formatter | None) -> None:
        super().setFormatter(fmt)
        self._handler.setFormatter(fmt)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if record.levelno >= logging.WARNING:
                about = getattr(record, ABOUT, "")
                told = self._repeats.take(record.getMessage(), self._clock(), about)
                if told is None:
                    self._await_due()
                    return
                self._tell(told)
            self._handler.handle(record)
        except Exception:  # noqa: BLE001 - as logging's own handlers do: a log line never ends its caller
            self.handleError(record)

    def _tell(self, texts: list[str]) -> None:
        for text in texts:
            self._handler.handle(logging.LogRecord("flowspec", logging.WARNING, "", 0, text, None, None))

    def _await_due(self) -> None:
        """Has what was counted told when it is due, though nothing else is said by then."""
        if self._timer is None and (left_s := self._repeats.due_s - self._clock()) < float("inf"):
            self._timer = threading.Timer(max(0.0, left_s), self.tell_due)
            self._timer.daemon = True
            self._timer.start()

    def tell_due(self) -> None:
        """Tells of lines that have been counted for long enough."""
        self.acquire()
        try:
            self._timer = None
            self._tell(self._repeats.rest(self._clock(), is_due=True))
            self._await_due()
        finally:
            self.release()

    def close(self) -> None:
        """Tells of all that was counted."""
        self.acquire()
        try:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._tell(self._repeats.rest(self._clock()))
        finally:
            self.release()
        super().close()
