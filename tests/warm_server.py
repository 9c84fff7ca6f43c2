"""The server behind `tests.warm`: imports what the command line does, then forks a process whenever it is
asked.

It has one thread, holds one end of a socket (its first argument is the descriptor) and ends when the other
end closes.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import logging
import os
import pkgutil
import signal
import socket
import sys
import threading
import time
import traceback
import types
from collections.abc import Sequence
from dataclasses import asdict
from typing import NoReturn

import flowspec
from flowspec.cli import commands
from flowspec.runtime import local
from tests import warm


def main() -> None:
    control, threads = socket.socket(fileno=int(sys.argv[1])), len(os.listdir("/proc/self/task"))
    _preload()
    assert len(os.listdir("/proc/self/task")) == threads, "a fork copies none"  # an emulator has its own
    # At a terminal it is for the suite; a process that is forked takes it again.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    warm.fork, local.start_pool = _fork_self, warm.start_pool
    control.send(warm.READY)
    while (asked := _receive(control)) is not None:
        start, streams = asked
        pid = _fork_twice()
        if not pid:
            control.detach()
            _become(start, streams)
            if _may_start_a_pool(start.arguments):
                _keep_spare()
            _finish(start.arguments)
        for descriptor in streams:
            os.close(descriptor)
        control.send(str(pid).encode())


def _preload() -> None:
    for module in pkgutil.walk_packages(flowspec.__path__, "flowspec."):
        if not module.name.startswith("flowspec.demo."):
            importlib.import_module(module.name)
    commands._summary = functools.cache(commands._summary)
    commands.build_parser()
    gc.collect()
    gc.freeze()


def _receive(control: socket.socket) -> tuple[warm.Start, Sequence[int]] | None:
    message, streams, _, _ = socket.recv_fds(control, warm.LARGEST, 3)
    return (warm.Start(**json.loads(message)), streams) if message else None


def _fork_twice() -> int:
    """The pid of a grandchild that is an orphan, and so has been adopted by who asked; 0 in the grandchild.

    It returns once `_become` has closed the grandchild's end of the pipe: who asked can then signal its
    session.
    """
    read, write = os.pipe()
    if not os.fork():
        between = os.getpid()
        if pid := os.fork():
            os.write(write, str(pid).encode())
            os._exit(0)
        while os.getppid() == between:
            time.sleep(0.0005)
        return 0
    os.close(write)
    pid = int(os.read(read, 32))
    _wait_for_end(read)
    os.wait()
    return pid


def _may_start_a_pool(arguments: Sequence[str]) -> bool:
    text = " ".join(arguments)
    return "flowspec" in text and "fork_server" not in text and "daemon" not in arguments


def _keep_spare() -> None:
    """Forks what is to become a pool, while there is one thread; it ends with this process."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if pid := os.fork():
        far.close()
        warm.spare = pid, near
        return
    near.close()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # whoever reads them waits for their other ends
        os.dup2(nowhere, stream)
    if (asked := _receive(far)) is None:
        os._exit(0)
    _become(*asked)
    _finish(asked[0].arguments)


def _fork_self(start: warm.Start, streams: Sequence[int]) -> int:
    """`warm.fork` for the processes of this server: a pool is forked from the command that wants it."""
    if warm.spare is not None:
        (pid, control), warm.spare = warm.spare, None
        socket.send_fds(control, [json.dumps(asdict(start)).encode()], streams)
        _wait_for_end(control.detach())
        return pid
    sys.stdout.flush()  # what is in its buffer is said once
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        _become(start, [os.dup(stream) for stream in streams])
        _finish(start.arguments)
    os.close(write)
    _wait_for_end(read)
    return pid


def _wait_for_end(read: int) -> None:
    """Waits until nobody holds the other end of a pipe any more, and closes this one."""
    while os.read(read, 32):
        pass
    os.close(read)


def _become(start: warm.Start, streams: Sequence[int]) -> None:
    """Makes this process look freshly executed."""
    if start.new_session:
        os.setsid()
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    # The settings of UTF-8 mode, as the interpreter opens them.
    sys.stdin = sys.__stdin__ = os.fdopen(0, encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(
        2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False
    )
    os.chdir(start.folder)
    os.environ.clear()
    os.environ.update(start.environment)
    logging.getLogger().handlers.clear()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _finish(arguments: Sequence[str]) -> NoReturn:
    """Runs what the arguments of Python say and ends as Python does, but for taking apart all that was
    imported, which is slow."""
    status = 1
    try:
        _run(arguments)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        try:
            threading._shutdown()  # waits for threads, as the end of a process that multiprocessing forked
            atexit._run_exitfuncs()
            sys.stdout.flush()
        finally:
            os._exit(status)


def _run(arguments: Sequence[str]) -> None:
    kind, what, *rest = arguments
    if kind == "-m":
        # Where multiprocessing finds what it has to import.
        module = sys.modules["__main__"] = importlib.import_module(what)
        sys.argv = [str(module.__file__), *rest]
        sys.exit(module.main())
    assert kind == "-c", arguments
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv = ["-c", *rest]
    exec(compile(what, "<string>", "exec"), module.__dict__)


if __name__ == "__main__":
    main()
