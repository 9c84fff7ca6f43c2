"""Processes of the command line that start warm, for tests: forked from one that has imported what they need.

The imports of a cold start cost seconds of computing, which is most of what many tests would do. So each
worker of the suite has a server (`tests.warm_server`), started when first asked, of which it asks processes.
These are real ones and its own children; only their memory is not fresh: what libraries read from the
environment when imported is what the server found there, and `/proc/PID/cmdline` is the server's. A test that
is about either starts cold, by `subprocess`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, AnyStr

LARGEST = 1 << 17
"""Bytes of a message: arguments and environment."""
READY = b"ready"
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What is new in a process: all but its standard streams, which travel beside it."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    new_session: bool


class Popen(subprocess.Popen[AnyStr]):
    """As `subprocess.Popen` of Python with `-m MODULE` or `-c CODE`, with the first few of its options.

    The process hears Ctrl-C, also where the suite runs in the background and ignores it.
    """

    def _execute_child(  # where subprocess forks and executes
        self,
        args: Sequence[Any],
        executable: Any,
        preexec_fn: Any,
        close_fds: bool,
        pass_fds: Any,
        cwd: Any,
        env: Mapping[str, str] | None,
        startupinfo: Any,
        creationflags: Any,
        shell: bool,
        *rest: Any,
    ) -> None:
        pipes, new_session = rest[:6], rest[11]
        assert not any((preexec_fn, pass_fds, shell)), "these start cold"
        python, *arguments = map(os.fsdecode, args)
        assert python == sys.executable
        environment = dict(os.environ if env is None else env)
        start = Start(
            arguments=arguments,
            environment=environment,
            folder=os.fsdecode(cwd or os.getcwd()),
            new_session=new_session,
        )
        ends = [own if given == -1 else given for own, given in enumerate((pipes[0], pipes[3], pipes[5]))]
        self.pid = fork(start, ends)
        self._child_created = True
        self._close_pipe_fds(*pipes)


if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0) != 0:
    Popen = subprocess.Popen  # type: ignore[misc]  # an emulator has no adoption: these start cold


def run(
    command: Sequence[Any],
    *,
    input: Any = None,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """As `subprocess.run`."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    if capture_output:
        options["stdout"] = options["stderr"] = subprocess.PIPE
    with Popen(command, **options) as process:
        try:
            output, error = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, output, error)
    if check:
        done.check_returncode()
    return done


spare: tuple[int, socket.socket] | None = None
"""In a process of the server: one that it forked as it began, and how that is told what to become."""


def start_pool(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    """In the place of `flowspec.runtime.local.start_pool`; cold in a process of the server that has threads,
    which no fork copies, and no spare any more."""
    is_forked = fork is ask_server or spare is not None or len(os.listdir("/proc/self/task")) == 1
    popen = Popen if is_forked else subprocess.Popen
    command = [sys.executable, "-m", "flowspec.runtime.fork_server", *arguments]
    return popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)


class Server:
    """The server of this process."""

    def __init__(self) -> None:
        self._control, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._read = read_when_imported(os.environ)
        path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
        # One thread, as a process that forks should have. The levels of logging are those that the command
        # sets.
        own = {
            "PYTHONPATH": path,
            "PYTHONUTF8": "1",
            "OMP_NUM_THREADS": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "HF_HUB_VERBOSITY": "error",
        }
        with far:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm_server", str(far.fileno())],
                pass_fds=[far.fileno()],
                env={**os.environ, **own},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        assert self._control.recv(32) == READY, "the server of warm starts does not come up"

    def fork(self, start: Start, streams: Sequence[int]) -> int:
        assert read_when_imported(start.environment) == self._read, "read when imported: start cold"
        with _adopting():
            socket.send_fds(self._control, [json.dumps(asdict(start)).encode()], streams)
            answer = self._control.recv(32)
        assert answer, "the server of warm starts has ended"
        return int(answer)

    def close(self) -> None:
        self._control.close()
        self._process.wait()


_asking = threading.Lock()


@functools.cache
def _server() -> Server:
    server = Server()
    atexit.register(server.close)
    return server


def ask_server(start: Start, streams: Sequence[int]) -> int:
    """A process of the server's making, which is this one's child; returns its pid."""
    with _asking:
        server = _server()
        try:
            return server.fork(start, streams)
        except BaseException:  # a timeout, say: what it still answers would be taken for the next one's
            _server.cache_clear()
            server.close()
            raise


fork: Callable[[Start, Sequence[int]], int] = ask_server
"""How a process comes to be; the server's processes fork themselves."""


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Orphans among our descendants become our children: so does what the server forks twice."""
    prctl = ctypes.CDLL(None).prctl
    assert prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def read_when_imported(environment: Mapping[str, str]) -> dict[str, str]:
    """What huggingface_hub reads when it is imported."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(("HF_", "HUGGINGFACE_")) and name != "HF_HUB_VERBOSITY"
    }
