"""The user's folders, and how files get there whole.

Where caches, journals and keys are; hashing, locks, writing in one step. What FlowSpec keeps there for itself
(`write_own`, `read_own`) carries a digest: a file that was damaged, or is none, is made anew.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import psutil

HASH_BLOCK_BYTES = 4 << 20
LOCK_EVERY_S = 0.1
LOCK_MAX_S = 900.0
"""Nothing that is done once takes longer."""
OWN_BYTES_MAX = 64 << 20
Read = TypeVar("Read")
log = logging.getLogger("flowspec.files")


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


def read_text(path: Path) -> str:
    """A text that people wrote, in UTF-8; some editors begin one with a byte order mark, which is no part of
    it. Raises `OSError` and `UnicodeDecodeError`."""
    return path.read_text("utf-8-sig")


def why_unread(error: Exception) -> str:
    """Why `read_text`, or reading what the text says, raised, in words for people."""
    if isinstance(error, UnicodeError):
        return "it is no text in UTF-8"
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return "".join(letter if letter.isprintable() else "?" for letter in text[:200])  # it may quote the file


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file so that a reader finds the old one or the new one; raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:  # also Ctrl-C: no part of a file stays
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def read_regular(path: Path, bytes_max: int) -> bytes:
    """The content of a file that nobody chose, in bounded time. Raises `OSError` for one that is too large,
    and for a pipe, a device or a folder in its place."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        data = file.read(bytes_max + 1)
    if len(data) > bytes_max:
        raise OSError(errno.EFBIG, f"it has more than {bytes_max} bytes")
    return data


class _Own(msgspec.Struct):
    digest: str
    content: msgspec.Raw


def files_by_age(folder: Path, suffix: str) -> list[Path]:
    """The oldest first; others may remove some meanwhile."""
    ages = []
    with contextlib.suppress(OSError):
        for path in folder.glob(f"*{suffix}"):
            with contextlib.suppress(OSError):
                ages.append((path.stat().st_mtime_ns, path.name, path))
    return [path for _, _, path in sorted(ages)]


def write_own(path: Path, content: Any) -> None:
    """Keeps something as JSON for `read_own`; raises `OSError`."""
    raw = msgspec.json.encode(content)
    own = _Own(digest=hashlib.sha256(raw).hexdigest(), content=msgspec.Raw(raw))
    write_whole(path, msgspec.json.encode(own))


def read_own(path: Path, kind: type[Read]) -> Read | None:
    """What `write_own` kept, which is of this type; None where there is nothing, or, with a line in the log,
    where it is damaged: then it is made anew."""
    try:
        own = msgspec.json.decode(read_regular(path, OWN_BYTES_MAX), type=_Own)
        if own.digest != hashlib.sha256(own.content).hexdigest():
            raise ValueError("its digest is another one")
        return msgspec.json.decode(own.content, type=kind)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, msgspec.DecodeError, RecursionError) as error:
        if path.is_dir():
            log.warning("%s is a folder; it is not used, and cannot be replaced: remove it", path)
            return None
        tell_of_damage(path, getattr(error, "strerror", None) or "it is damaged")
        return None


def tell_of_damage(path: Path, why: str) -> None:
    """A line in the log about what FlowSpec kept and cannot use."""
    log.warning("%s cannot be read (%s), and is made anew", path, why)


def private_folder(folder: Path) -> Path:
    """A folder of the user's caches, made if need be, for what others must not put there, such as code; with
    a line in the log one among temporary files where others may. Raises `OSError` where they may there, too.
    """
    for candidate in (folder, temporary_folder() / folder.name):
        candidate.mkdir(parents=True, exist_ok=True, mode=0o700)
        places = (candidate, candidate.parent, candidate.parent.parent)
        faults = [f"{each} {fault}" for each in places if (fault := _fault_of(each.stat()))]
        if not faults:
            return candidate
        log.warning("%s; it is not used. Mend it with chown and chmod go-w", faults[0])
    raise OSError(f"{faults[0]}; set XDG_CACHE_HOME to a folder of your own")


def temporary_folder() -> Path:
    """The user's own among temporary files; it need not exist yet, and may belong to another."""
    return Path(tempfile.gettempdir()) / f"flowspec-{os.getuid()}"


def is_own(path: Path) -> bool:
    """Whether nobody but this user, or root, can have written a file. Raises `OSError`."""
    return stat.S_ISREG(path.lstat().st_mode) and not _fault_of(path.lstat())


def _fault_of(found: os.stat_result) -> str:
    if found.st_uid not in (0, os.geteuid()):
        return f"belongs to the user {found.st_uid}"
    is_others = found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
    is_group = found.st_mode & stat.S_IWGRP and found.st_gid != os.getegid()
    return "may be written by others" if is_others or is_group else ""


@contextlib.contextmanager
def locked(path: Path, meanwhile: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Waits for other processes that are at the same, and calls `meanwhile` now and then.

    One that was stopped is not waited for, nor one that takes for ever: what is done twice is done as well.
    Where there can be no lock, as in a folder that cannot be written, nobody is waited for.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        flags = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path.with_suffix(".lock"), flags, 0o600)
    except OSError:
        yield
        return
    ends_s = time.monotonic() + LOCK_MAX_S
    try:
        while not _can_go_on(descriptor):
            if holder := _stopped_holder(descriptor):
                log.warning("process %s is at %s and was stopped; it is not waited for", holder, path.name)
                break
            if time.monotonic() > ends_s:
                log.warning("another process is at %s for ever; it is not waited for", path.name)
                break
            meanwhile()
            time.sleep(LOCK_EVERY_S)
        else:
            with contextlib.suppress(OSError):
                os.pwrite(descriptor, f"{os.getpid():<20}".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _stopped_holder(descriptor: int) -> str:
    """The id of the process that has the lock, if it was stopped; else empty."""
    with contextlib.suppress(OSError, ValueError, psutil.Error):
        holder = int(os.pread(descriptor, 20, 0))
        if psutil.Process(holder).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            return str(holder)
    return ""


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
