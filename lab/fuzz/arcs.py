"""Which steps from line to line a piece of code takes, by Python's own tracing: what guides the fuzzer, and
nothing to install."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

Trace = Callable[[FrameType, str, Any], Any]


class Arcs:
    """The steps taken in some `folders` and files, `(file, from line, to line)`; `new` says whether any was
    not known before."""

    def __init__(self, *places: Path) -> None:
        self._places = tuple(str(place) for place in places)
        self._known: set[tuple[str, int, int]] = set()
        self._is_ours: dict[str, bool] = {}

    def __len__(self) -> int:
        return len(self._known)

    def watch(self, call: Callable[[], None]) -> bool:
        """Runs `call`; whether it took a step that none did before. A debugger's or a coverage tool's own
        tracing stands still meanwhile."""
        before, old = len(self._known), sys.gettrace()
        sys.settrace(self._on_call)
        try:
            call()
        finally:
            sys.settrace(old)
        return len(self._known) > before

    def _on_call(self, frame: FrameType, event: str, value: Any) -> Trace | None:
        file = frame.f_code.co_filename
        is_ours = self._is_ours.get(file)
        if is_ours is None:
            is_ours = self._is_ours[file] = file.startswith(self._places)
        if not is_ours:
            return None
        last, known = 0, self._known

        def on_line(frame: FrameType, event: str, value: Any) -> Trace:
            nonlocal last
            if event == "line":
                known.add((file, last, frame.f_lineno))
                last = frame.f_lineno
            return on_line

        return on_line
