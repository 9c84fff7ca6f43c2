"""The `flowspec` command's beginning and end: Ctrl-C before anything is started, an output that takes no
more, and a process that ends when its work does.

Imports next to nothing itself: until `main` runs, Ctrl-C is a traceback.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import resource
import signal
import sys
from types import FrameType

from flowspec.interruption import INTERRUPTED

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of writing where a disk, a quota, a file or a device takes no more."""
NO_FILE = (errno.EMFILE, errno.ENFILE)
"""Errors of opening where a process, or the machine, has as many files open as it may."""
FILES_MIN, FILES_MAX = 256, 4096
"""Open files that are needed (a head with five local daemons has 70 while it loads, and clients' connections
come on top), and that are asked for."""


def main(argv: list[str] | None = None) -> int:
    """Runs a command (that of the command line by default, with which the process is to end); returns its
    exit status."""
    if argv is not None:
        return _run(argv, ends=False)
    statuses: list[int] = []
    atexit.register(_end, statuses)  # before all others, so it is called behind them
    statuses.append(_run(sys.argv[1:], ends=True))
    return statuses[0]


def _run(words: list[str], *, ends: bool) -> int:
    # Whoever started us may have Ctrl-C ignored.
    is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_heard:
        signal.signal(signal.SIGINT, _quit)
    if refusal := _raise_files_limit():
        print(f"flowspec: {refusal}", file=sys.stderr)
        return 1
    from flowspec.cli import commands

    commands.load(words)  # imports for a second and more

    if sys.stdout is None:  # it was closed by whoever started us
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - to the end
    try:
        if is_heard:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return commands.run(words)
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno in NO_FILE:
            print(f"flowspec: {error.strerror}; let it open more of them: ulimit -n 1024", file=sys.stderr)
        elif error.errno in NO_ROOM or isinstance(error, BrokenPipeError):
            _end_output(error)
        else:
            raise
        return 1
    except KeyboardInterrupt:  # where the command does not hear it: before its own work or behind it
        return INTERRUPTED
    finally:
        if is_heard and ends:
            signal.signal(signal.SIGINT, _quit)  # nothing is left but Python's own end


def _raise_files_limit() -> str:
    """Lets this process and its children open enough files; returns why it cannot."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (sys.maxsize if limit == resource.RLIM_INFINITY else limit for limit in limits)
    most = max(soft, min(FILES_MAX, hard))
    if most > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    if most >= FILES_MIN:
        return ""
    return (
        f"it needs {FILES_MIN} open files and may have {most} (ulimit -Hn); raise the limit where it was set:"
        " another shell, LimitNOFILE= of a systemd service, --ulimit nofile=1024 of a container"
    )


def _end(statuses: list[int]) -> None:
    """Ends the process where its command returned a status. Python would first look at each object of the
    libraries and free it, which takes seconds on a board; the system frees all of them at once."""
    for status in statuses:
        for stream in (sys.stdout, sys.stderr):  # what was called at the end may have said something
            with contextlib.suppress(OSError, ValueError):  # nobody reads it, or it is closed
                stream.flush()
        os._exit(status)


def _quit(number: int, frame: FrameType | None) -> None:
    """Ctrl-C while nothing is started: what libraries make of an interruption in their imports is many
    things."""
    os.write(2, b"flowspec: interrupted\n")
    os._exit(INTERRUPTED)


def _end_output(error: OSError) -> None:
    """Ends a command whose output, or what it says beside it, cannot be written."""
    with contextlib.suppress(OSError):
        if error.errno in NO_ROOM:  # else its reader has enough
            print(f"flowspec: the output cannot be written: {error.strerror}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # the rest goes nowhere: Python tries again when it ends
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


if __name__ == "__main__":
    sys.exit(main())
