"""A cluster of daemons on this machine, as child processes that end with us, whatever happens."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from flowspec.child_process import python_module
from flowspec.errors import ClusterError
from flowspec.runtime import timeouts
from flowspec.runtime.emulation import DeviceEmulation, devices_to_json
from flowspec.validation import decode_json

SEE_LOGS = "run again with -v to see their logs"
NO_MEMORY = 128 + signal.SIGKILL
"""The exit status of a process of theirs for want of memory, as a shell tells of what the system kills."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalDaemon:
    name: str
    port: int
    pid: int

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


def start_pool(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    """Starts `flowspec.runtime.fork_server` between two pipes.

    In a session of its own: Ctrl-C at the terminal is the head's to handle, and the pool ends through its
    lifeline.
    """
    command = python_module("flowspec.runtime.fork_server", *arguments)
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)


class LocalCluster:
    """Starts `count` daemons; a context manager. Starting and waiting are apart, so that callers work
    meanwhile.

    With `devices`, one for each, the daemons take the time of these. `cache_dir` holds a folder for each
    one's received weights, `keys` a key for each (`local-0`, ...): otherwise they take anybody on this
    machine.
    """

    def __init__(
        self,
        count: int,
        *,
        log_level: str = "WARNING",
        log_file: str | None = None,
        devices: Sequence[DeviceEmulation] = (),
        cache_dir: Path | None = None,
        keys: Path | None = None,
    ) -> None:
        assert len(devices) in (0, count), f"{len(devices)} devices declared for {count} daemons"
        self.count = count
        arguments = [f"--count={count}", f"--log-level={log_level}"]
        if log_file:
            arguments.append(f"--log-file={log_file}")
        if cache_dir is not None:
            arguments.append(f"--cache-dir={cache_dir}")
        if keys is not None:
            arguments.append(f"--keys={keys}")
        if devices:
            arguments.append(f"--emulate={devices_to_json(devices)}")
        self._pool = start_pool(arguments)
        self._daemons: list[LocalDaemon] = []

    def wait(self) -> list[LocalDaemon]:
        """The daemons, once all of them listen. Raises `ClusterError` when they do not come up."""
        if self._daemons:
            return self._daemons
        assert self._pool.stdout is not None
        descriptor = self._pool.stdout.fileno()
        text = b""
        deadline_s = time.monotonic() + timeouts.LOCAL_START_S
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while text.count(b"\n") < self.count:
                ready = selector.select(max(0.0, deadline_s - time.monotonic()))
                chunk = os.read(descriptor, 65536) if ready else b""
                if not chunk:
                    late = f"nothing came within {timeouts.LOCAL_START_S:.0f} s; {SEE_LOGS}"
                    why = self._why_ended() if ready else late
                    raise ClusterError(f"expected {self.count} local daemons, but {why}")
                text += chunk
        found = [decode_json(line, LocalDaemon) for line in text.splitlines()]
        self._daemons = sorted(found, key=lambda daemon: daemon.name)
        return self._daemons

    def _why_ended(self) -> str:
        """Why one of them, or the process that starts them, is gone, and what to do."""
        assert self._pool.stdin is not None
        self._pool.stdin.close()  # those that are left end
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._pool.wait(timeouts.STOP_S) in (-signal.SIGKILL, NO_MEMORY):
                return (
                    "there is not enough memory for them: the system ended one, or gave it no more; free "
                    "some, or use fewer, as --local 1"
                )
        return f"they ended; {SEE_LOGS}"

    def close(self) -> None:
        """Ends all daemons and waits for them."""
        if self._pool.stdin is not None and not self._pool.stdin.closed:
            self._pool.stdin.close()
        if not self._daemons:  # still importing, they have nothing to lose and would not hear us
            with contextlib.suppress(ProcessLookupError):  # all are gone
                os.killpg(self._pool.pid, signal.SIGKILL)
        try:
            self._pool.wait(timeouts.STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._pool.pid, signal.SIGKILL)
            self._pool.wait()
        if self._pool.stdout is not None:
            self._pool.stdout.close()

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
