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
from typing import TextIO

from flowspec.interruption import INTERRUPTED

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What writing fails with where a disk, a quota, a file or a device takes no more."""
NO_FILE = (errno.EMFILE, errno.ENFILE)
"""What opening fails with where a process, or the machine, has as many files open as it may."""
FILES_MIN = 256
"""A head with five local daemons has 70 files open while it loads; connections of clients come on top."""
FILES_MAX = 4096
"""How many files it asks for, where the limit may be raised."""


def main(argv: list[str] | None = None) -> int:
    """Runs a command (that of the command line by default, with which the process is to end); returns its
    exit status."""
    if argv is not None:
        return _run(argv)
    ending: list[int] = []
    atexit.register(_end, ending)  # before all others, so it is called behind them
    ending.append(_run(None))
    return ending[0]


def _run(argv: list[str] | None) -> int:
    is_heard = (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )  # else whoever started us has it ignored
    if is_heard:
        signal.signal(signal.SIGINT, _quit)
    if refusal := _raise_files_limit():
        print(f"flowspec: {refusal}", file=sys.stderr)
        return 1
    words = sys.argv[1:] if argv is None else argv
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
            return 1
        return _unwritten(error)
    except KeyboardInterrupt:  # where the command does not hear it: before its own work or behind it
        return INTERRUPTED
    finally:
        if is_heard and argv is None:
            signal.signal(signal.SIGINT, _quit)  # nothing is left but Python's own end


def _raise_files_limit() -> str:
    """Lets this process and its children open enough files; returns why it cannot."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = FILES_MAX if hard == resource.RLIM_INFINITY else min(FILES_MAX, hard)
    if soft == resource.RLIM_INFINITY or soft >= most:
        most = soft
    else:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most == resource.RLIM_INFINITY or most >= FILES_MIN:
        return ""
    return (
        f"it needs {FILES_MIN} open files and may have {most} (ulimit -Hn); raise the limit where it was set:"
        " another shell, LimitNOFILE= of a systemd service, --ulimit nofile=1024 of a container"
    )


def _end(ending: list[int]) -> None:
    """Ends the process where its command returned a status. Python would first look at each
    object of the libraries and free it, which takes seconds on a board; the system frees all of them at
    once."""
    for status in ending:
        for stream in (sys.stdout, sys.stderr):  # what was called at the end may have said something
            with contextlib.suppress(OSError, ValueError):  # nobody reads it, or it is closed
                stream.flush()
        os._exit(status)


def _quit(number: int, frame: FrameType | None) -> None:
    """Ctrl-C while nothing is started: what libraries make of an interruption in their imports is many
    things."""
    os.write(2, b"flowspec: interrupted\n")
    os._exit(INTERRUPTED)


def _unwritten(error: OSError) -> int:
    """Ends a command whose output, or what it says beside it, cannot be written; raises any other error."""
    if error.errno not in NO_ROOM and not isinstance(error, BrokenPipeError):
        raise error
    with contextlib.suppress(OSError):
        if error.errno in NO_ROOM:  # else its reader has enough
            print(f"flowspec: the output cannot be written: {error.strerror}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            _silence(stream)
    return 1


def _silence(stream: TextIO) -> None:
    """Has what is left of a stream go nowhere: Python tries again when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


if __name__ == "__main__":
    sys.exit(main())
