"""Control groups for memory, version 1 or 2, each made for one process: what it may take, and whether the
kernel ended it for want of it."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from flowspec.errors import InputError

ROOT = Path("/sys/fs/cgroup")
EVERY_S = 0.02
"""How often a group is squeezed, ..."""
LESS_BYTES = (32 << 20, 4 << 20, 1 << 20, 256 << 10, 0)
"""... and by how much of what it has: by the first of these that the kernel can drop."""


class MemoryGroup:
    """A group of its own; for root. Raises `InputError` where the system has none."""

    def __init__(self, name: str, root: Path = ROOT) -> None:
        if (root / "memory" / "memory.limit_in_bytes").exists():
            parent, files = (
                root / "memory",
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control", "-1"),
            )
        elif "memory" in _text(root / "cgroup.controllers").split():
            parent, files = root, ("memory.max", "memory.current", "memory.events", "max")
        else:
            raise InputError(f"--faults memory: expected control groups for memory below {root}, found none")
        self._limit, self._usage, self._events, self._none = files
        self.folder = parent / f"flowspec-{os.getpid()}-{name}"
        try:
            if parent == root:
                (root / "cgroup.subtree_control").write_text("+memory")
            self.folder.mkdir()
        except OSError as error:
            raise InputError(f"--faults memory: cannot make a group in {parent} ({error.strerror})") from None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, pid: int) -> None:
        """The process, and what it takes from now on, belong to the group."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    @property
    def killed(self) -> int:
        """How many processes of the group the kernel has ended for want of memory."""
        for line in _text(self.folder / self._events).splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
        return 0

    def squeeze(self) -> None:
        """From now on it may take less and less, until the kernel ends its process, or it is `ease`d."""
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name="squeeze", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        killed = self.killed
        while self.killed == killed and not self._stop.is_set():
            used = int(_text(self.folder / self._usage))
            for less in LESS_BYTES:
                try:
                    (self.folder / self._limit).write_text(str(max(0, used - less)))
                    break
                except OSError:
                    pass  # the kernel cannot drop so much of what it has: version 1 refuses such a limit
            self._stop.wait(EVERY_S)

    def ease(self) -> None:
        """There is no limit any more."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        (self.folder / self._limit).write_text(self._none)

    def remove(self) -> None:
        """For a group whose processes have ended."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        with contextlib.suppress(OSError):
            self.folder.rmdir()


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace")
    except OSError:
        return ""
