"""What a command writes to a real terminal that is 80 columns wide."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import subprocess
import sys
import termios

from tests import warm
from tests.cli.running import FLOWSPEC

COLUMNS, LINES = 80, 24


def shown(
    *flags: str, status: int = 0, columns: int = COLUMNS, code: str = "", stdin: str | None = None
) -> list[str]:
    """The lines that `flowspec` with these flags puts on the screen, without control sequences of a dumb
    terminal, which has none; checks the exit status. `code`: another command; `stdin` comes by a pipe."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, columns, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    command = [*([sys.executable, "-c", code] if code else FLOWSPEC), *flags]
    typed = theirs if stdin is None else subprocess.PIPE
    environment["TERM"] = "dumb"
    try:
        with warm.Popen(command, env=environment, stdin=typed, stdout=theirs, stderr=theirs) as process:
            os.close(theirs)
            if process.stdin is not None and stdin is not None:
                process.stdin.write(stdin.encode())
                process.stdin.close()
            found = b""
            with contextlib.suppress(OSError):  # it has ended
                while chunk := os.read(ours, 65536):
                    found += chunk
    finally:
        os.close(ours)
    text = found.decode()
    assert process.returncode == status, text
    return [line.rstrip() for line in text.splitlines()]
