"""A name service for tests: knows the names that end in `.board`, and hangs while a file is there."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

ENDING = ".board"
HANGS_S = 20.0
"""A look-up takes so long while the service is out, and fails."""


def install(out: Path) -> Any:
    """Has this process look up names there; what it did before is returned."""
    plain = socket.getaddrinfo

    def getaddrinfo(host: Any, *rest: Any, **more: Any) -> Any:
        if not str(host).endswith(ENDING):
            return plain(host, *rest, **more)
        if out.exists():
            until_s = time.monotonic() + HANGS_S
            while time.monotonic() < until_s and out.exists():
                time.sleep(0.1)
            raise socket.gaierror(socket.EAI_AGAIN, os.strerror(11))
        return plain("127.0.0.1", *rest, **more)

    socket.getaddrinfo = getaddrinfo  # type: ignore[assignment]
    return plain
