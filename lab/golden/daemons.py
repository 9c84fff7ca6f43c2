"""Daemons of a tree's FlowSpec on loopback, each a process on a free port."""

from __future__ import annotations

import contextlib
import re
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from lab.golden.place import Place

STOP_S = 20.0
LISTENS = re.compile(r"listens on \S+:(\d+) ")
PROFILE = "raspberry-pi-4"
"""A board of their own: so none of them probes how fast this machine is."""


@dataclass(slots=True)
class Daemon:
    """One daemon; `lines` are what it has logged so far."""

    name: str
    process: subprocess.Popen[str]
    address: str = ""
    lines: list[str] = field(default_factory=list)

    def read_until_it_listens(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if found := LISTENS.search(line):
                self.address = f"127.0.0.1:{found[1]}"
                return
        raise RuntimeError(f"expected {self.name} to listen, but it says: {''.join(self.lines)}")

    def read_on(self) -> None:
        assert self.process.stderr is not None
        self.lines += self.process.stderr

    def stop(self) -> None:
        """Ends it, by force if it does not end by itself."""
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def daemons(place: Place, count: int, *flags: str, threads: int = 1) -> Iterator[list[Daemon]]:
    """So many daemons that listen; they start side by side and have ended afterwards."""
    started: list[Daemon] = []
    readers: list[threading.Thread] = []
    try:
        for index in range(count):
            words = ["daemon", "--port=0", f"--name=golden-{index}", f"--threads={threads}"]
            command = place.flowspec(*words, "--device=cpu", f"--profile={PROFILE}", *flags)
            process = place.start(command, stderr=subprocess.PIPE, text=True)
            started.append(Daemon(f"golden-{index}", process))
        for daemon in started:
            daemon.read_until_it_listens()
            readers.append(threading.Thread(target=daemon.read_on, daemon=True))
            readers[-1].start()
        yield started
    finally:
        for daemon in started:
            daemon.process.terminate()
        for daemon in started:
            daemon.stop()
        for reader in readers:
            reader.join()
        for daemon in started:
            if daemon.process.stderr is not None:
                daemon.process.stderr.close()
