"""The folder of a user's journals: a file for each dialogue, the oldest going when there are too many."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from pathlib import Path

from flowspec.errors import InputError
from flowspec.runtime.journal.file import is_locked

FILES_MAX = 20
FOLDER_BYTES_MAX = 64 << 20
SUFFIX = ".jsonl"


def new_path(folder: Path) -> Path:
    """A name for a new journal, room being made for it; raises `OSError` where the folder cannot be used."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    prune(folder)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    names = (folder / f"{stamp}-{os.getpid()}-{number}{SUFFIX}" for number in itertools.count())
    return next(path for path in names if not path.exists())


def newest(folder: Path) -> Path:
    """The journal that was written last; raises `InputError` where there is none."""
    found = _by_age(folder)
    if not found:
        raise InputError(f"{folder} holds no dialogue that could go on; flowspec chat begins one")
    return found[-1]


def prune(folder: Path) -> None:
    """Removes the oldest journals, so that a new one makes no more than `FILES_MAX`, nor those before it
    `FOLDER_BYTES_MAX`."""
    kept_bytes = 0
    for count, path in enumerate(reversed(_by_age(folder)), 1):
        with contextlib.suppress(OSError):  # another chat may prune, too
            kept_bytes += path.stat().st_size
            if (count >= FILES_MAX or kept_bytes > FOLDER_BYTES_MAX) and not is_locked(path):
                path.unlink()


def _by_age(folder: Path) -> list[Path]:
    """Oldest first."""
    ages = []
    with contextlib.suppress(OSError):
        for path in folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError):
                ages.append((path.stat().st_mtime_ns, path.name, path))
    return [path for _, _, path in sorted(ages)]
