"""The `flowspec` command's beginning and end: Ctrl-C before anything is started, and an output that takes
no more.

Imports next to nothing itself: until `main` runs, Ctrl-C is a traceback.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from types import FrameType
from typing import TextIO

from flowspec.interruption import INTERRUPTED

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What writing fails with where a disk, a quota, a file or a device takes no more."""


def main(argv: list[str] | None = None) -> int:
    """Runs a command (that of the command line by default); returns its exit status."""
    is_heard = (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )  # else whoever started us has it ignored
    if is_heard:
        signal.signal(signal.SIGINT, _quit)
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
        return _unwritten(error)
    except KeyboardInterrupt:  # where the command does not hear it: before its own work or behind it
        return INTERRUPTED
    finally:
        if is_heard and argv is None:
            signal.signal(signal.SIGINT, _quit)  # nothing is left but Python's own end


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
