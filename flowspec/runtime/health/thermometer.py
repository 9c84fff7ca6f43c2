"""How hot this device is, read beside the daemon's other work: some boards' sensors take milliseconds to answer."""

from __future__ import annotations

import threading
from pathlib import Path

from flowspec.runtime.health.board import read_celsius


class Thermometer:
    """Each question brings what the one before had read; there is no thread before the first question, and none without a sensor."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._celsius: float | None = None
        self._asked = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_stopping = False

    def last_c(self) -> float | None:
        """Degrees Celsius of the hottest part, None where that is not known (yet)."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="thermometer", daemon=True)
            self._thread.start()
        self._asked.set()
        return self._celsius

    def stop(self) -> None:
        """Ends the thread soon."""
        self._is_stopping = True
        self._asked.set()

    def _run(self) -> None:
        while not self._is_stopping:
            self._asked.clear()
            self._celsius = read_celsius(self._root)
            if self._celsius is None:
                return
            self._asked.wait()
