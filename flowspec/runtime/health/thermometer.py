"""How hot this device is and what that does to its clock, read beside the daemon's other work: some boards'
sensors take milliseconds to answer."""

from __future__ import annotations

import threading
from pathlib import Path

from flowspec.runtime.health.board import FIRMWARE, Heat, read_firmware, read_heat, read_text

TOOL_EVERY = 10
"""Readings, about one a second, for each question to a Raspberry Pi's own tool where its kernel does not
tell."""


class Thermometer:
    """Each question brings what the one before had read; there is no thread before the first question, and
    none where nothing tells."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._heat = Heat()
        self._asked = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_stopping = False

    def last(self) -> Heat:
        """What is known of the device's heat, nothing where that is not known (yet)."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="thermometer", daemon=True)
            self._thread.start()
        self._asked.set()
        return self._heat

    def stop(self) -> None:
        self._is_stopping = True
        self._asked.set()

    def _run(self) -> None:
        is_pi = "raspberry pi" in read_text(self._root / "proc/device-tree/model").lower()
        needs_tool = is_pi and not read_text(self._root / FIRMWARE)
        firmware, readings = None, 0
        while not self._is_stopping:
            self._asked.clear()
            if needs_tool and readings % TOOL_EVERY == 0:
                firmware = read_firmware()
            readings += 1
            self._heat = read_heat(self._root, firmware)
            if self._heat == Heat() and firmware is None:
                return
            self._asked.wait()
