"""The user's folders, and how files get there whole.

Where caches, journals and keys are; hashing, locks, writing in one step.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

HASH_BLOCK_BYTES = 4 << 20
LOCK_EVERY_S = 0.1


class Hash(Protocol):
    def update(self, data: bytes | memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/flowspec`, else `flowspec` where the platform has caches; it need not exist yet."""
    own = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return Path(os.environ.get("XDG_CACHE_HOME") or own) / "flowspec"


def state_folder() -> Path:
    """`$XDG_STATE_HOME/flowspec`, else under `~/.local/state`; it need not exist yet."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "flowspec"


def keys_folder() -> Path:
    """Where a device's daemon looks for keys, and `launch/boards` puts them."""
    return Path.home() / ".config" / "flowspec" / "keys"


def hash_range(
    descriptor: int,
    offset: int,
    size: int,
    step: Callable[[int], None] = lambda size: None,
) -> Hash:
    """The SHA-256 of `size` bytes of a file from `offset` on, or of what there is of them.

    `step` is told how many bytes each block had; what it raises ends the work.
    """
    found = hashlib.sha256()
    end = offset + size
    while offset < end and (block := os.pread(descriptor, min(HASH_BLOCK_BYTES, end - offset), offset)):
        found.update(block)
        offset += len(block)
        step(len(block))
    return found


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file so that a reader finds the old one or the new one; raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


@contextlib.contextmanager
def locked(path: Path, meanwhile: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Waits for other processes that are at the same, and calls `meanwhile` now and then.

    Where there can be no lock, as in a folder that cannot be written, nobody is waited for.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        yield
        return
    try:
        while not _can_go_on(descriptor):
            meanwhile()
            time.sleep(LOCK_EVERY_S)
        yield
    finally:
        os.close(descriptor)


def _can_go_on(descriptor: int) -> bool:
    """The lock is ours now, or the file system has none."""
    try:
        return try_lock(descriptor)
    except OSError:
        return True


def try_lock(descriptor: int) -> bool:
    """Locks a file unless somebody else has it locked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
