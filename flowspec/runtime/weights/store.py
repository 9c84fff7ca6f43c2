"""The daemon's folder of tensors: one file for each, named by the SHA-256 of its bytes, whatever model it
came with.

`tensors/DIGEST` is whole. `tensors/DIGEST.part` (`.1.part` and so on, when several daemons share the folder
and want the same tensor at once) is what has arrived so far; it is kept, so that the next attempt goes on
from there. `uses/*` say what daemons are busy with: each is locked by its daemon, so a dead one's counts for
nothing.

Nothing is trusted because it lies there: what is stored is hashed again whenever a slice is loaded from it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowspec.core.protocol.limits import DIGEST_CHARS
from flowspec.errors import ClusterError
from flowspec.folders import cache_folder, hash_range, try_lock, write_whole
from flowspec.plan.memory import mib

DISK_SHARE = 0.5
"""Of the disk that is free or the store's own, how much it may take when no limit is given."""
DISK_SPARED_BYTES = 64 << 20
"""Left free on the disk, whatever the limit."""


class Partial:
    """A tensor on its way; `held` bytes of `size` are there, those of an earlier attempt included. Locked
    until `close`."""

    def __init__(self, store: WeightStore, digest: str, size: int, path: Path, descriptor: int) -> None:
        self.digest = digest
        self.size = size
        self._store = store
        self._path = path
        self._descriptor = descriptor
        self.held = os.fstat(descriptor).st_size
        if self.held > size:
            self.restart()
        self._hash = hash_range(descriptor, 0, self.held)

    def restart(self) -> None:
        os.ftruncate(self._descriptor, 0)
        self.held = 0
        self._hash = hash_range(self._descriptor, 0, 0)

    def write(self, data: bytes | memoryview) -> None:
        """Appends what came next; raises `ClusterError` when the disk does not take it."""
        assert self.held + len(data) <= self.size, "more than the tensor has"
        with self._store.explained():
            written = 0
            while written < len(data):
                written += os.pwrite(self._descriptor, memoryview(data)[written:], self.held + written)
        self._hash.update(data)
        self.held += len(data)

    def finish(self) -> bool:
        """Makes the whole tensor a stored one; False, and it is empty again, when its bytes are not those
        that the digest names.

        The disk is not asked to write it at once: that takes several times as long as all else, and what a
        power cut leaves half written is found when it is loaded.
        """
        assert self.held == self.size, "not all of it is there"
        if self._hash.hexdigest() != self.digest:
            self.restart()
            return False
        with self._store.explained():
            os.replace(self._path, self._store.path(self.digest))
        self.close()
        return True

    def close(self) -> None:
        """Lets go of the file and keeps what is in it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


@dataclass(frozen=True, slots=True)
class _Stored:
    """A file of the store, whole or partial."""

    path: Path
    digest: str
    size: int
    used_ns: int


class WeightStore:
    """The store in `folder` (default: in the user's cache folder), which may grow to `limit_bytes`.

    Several processes may share it. Whatever the disk refuses raises `ClusterError`.
    """

    def __init__(self, folder: Path | None = None, limit_bytes: int | None = None) -> None:
        self.folder = cache_folder() / "weights" if folder is None else folder
        self.limit_bytes = limit_bytes
        self._tensors = self.folder / "tensors"
        self._uses = self.folder / "uses"

    def path(self, digest: str) -> Path:
        """Where the tensor is when it is whole."""
        return self._tensors / digest

    def check(self, digest: str, size: int, step: Callable[[int], None] = lambda size: None) -> bool:
        """Whether the tensor is stored, read from beginning to end; one that is not as it should be is thrown
        away."""
        return self._check(self.path(digest), digest, size, step)

    def made(self, keys: Container[str]) -> dict[str, tuple[Path, int]]:
        """What was made here and has one of these keys (64 characters), with its bytes; `check_made` tells
        whether it is right."""
        whole = (each for each in self._stored() if len(each.path.suffix) == 1 + DIGEST_CHARS)
        return {each.digest: (each.path, each.size) for each in whole if each.digest in keys}

    def check_made(self, path: Path, size: int, step: Callable[[int], None] = lambda size: None) -> bool:
        """As `check`, for a file that was made here."""
        return self._check(path, path.suffix[1:], size, step)

    def keep_made(self, key: str, data: bytes) -> None:
        """Stores what was made here; there must be room for it, see `reserve`."""
        with self.explained():
            write_whole(self._tensors / f"{key}.{hashlib.sha256(data).hexdigest()}", data)

    def _check(self, path: Path, digest: str, size: int, step: Callable[[int], None]) -> bool:
        with self.explained():
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe is thrown away, too
            except FileNotFoundError:
                return False
            try:
                is_right = (
                    os.fstat(descriptor).st_size == size
                    and hash_range(descriptor, 0, size, step).hexdigest() == digest
                )
            finally:
                os.close(descriptor)
            if is_right:
                os.utime(path)  # the last to be thrown away
            else:
                path.unlink(missing_ok=True)
            return is_right

    def holds(self, digest: str) -> bool:
        """Whether a file of that name is there; `check` tells whether it is right."""
        return self.path(digest).is_file()

    def partial(self, digest: str, size: int) -> Partial:
        """The tensor's partial file, with what an earlier attempt left in it."""
        number = 0
        with self.explained():
            while True:
                path = self._tensors / (f"{digest}.{number}.part" if number else f"{digest}.part")
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
                if try_lock(descriptor) and _is_same(path, descriptor):
                    return Partial(self, digest, size, path, descriptor)
                os.close(descriptor)
                number += 1

    @contextlib.contextmanager
    def reserve(self, needed: Mapping[str, int]) -> Iterator[None]:
        """Keeps room for these tensors (digest -> bytes), and keeps everybody from throwing them away
        meanwhile.

        What has not been used for longest goes, as far as need be. Raises `ClusterError` when they cannot
        fit.
        """
        with contextlib.ExitStack() as stack:
            with self.explained(), self._locked():
                descriptor, name = tempfile.mkstemp(dir=self._uses)
                stack.callback(os.close, descriptor)
                stack.callback(Path(name).unlink, missing_ok=True)
                try_lock(descriptor)
                os.write(
                    descriptor, "".join(f"{digest} {size}\n" for digest, size in needed.items()).encode()
                )
                self._make_room(needed)
            yield

    def _make_room(self, needed: Mapping[str, int]) -> None:
        in_use = dict(needed)
        for path in self._uses.iterdir():
            in_use.update(_read_use(path))
        stored = sorted(self._stored(), key=lambda each: each.used_ns)
        spare = [each for each in stored if each.digest not in in_use]
        taken = sum(each.size for each in stored)
        growth = max(0, sum(in_use.values()) - sum(each.size for each in stored if each.digest in in_use))
        free = shutil.disk_usage(self.folder).free - DISK_SPARED_BYTES
        limit = int((max(0, free) + taken) * DISK_SHARE) if self.limit_bytes is None else self.limit_bytes
        excess = max(taken + growth - limit, growth - free)
        if excess > sum(each.size for each in spare):
            wanted = sum(needed.values())
            others = sum(in_use.values()) - wanted
            sharing = f", {mib(others)} of them for other daemons that load now" if others else ""
            raise ClusterError(
                f"the weights of these layers take {mib(wanted)} on disk, but {self.folder} may hold "
                f"{mib(limit)}{sharing} "
                f"({mib(max(0, free))} are free there); give this device fewer layers, or its daemon more "
                "--cache-limit or another --cache-dir"
            )
        for each in spare:
            if excess <= 0:
                break
            each.path.unlink(missing_ok=True)
            excess -= each.size

    def _stored(self) -> Iterator[_Stored]:
        for path in self._tensors.glob("*"):
            with contextlib.suppress(FileNotFoundError):  # another daemon has just finished or dropped it
                found = path.stat()
                yield _Stored(path, path.name.partition(".")[0], found.st_size, found.st_mtime_ns)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time reserves."""
        for folder in (self._tensors, self._uses):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self.folder / "lock").open("a+b", buffering=0) as file:  # a pipe opens so, too, at once
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Says in one line what the disk refused."""
        try:
            yield
        except OSError as error:
            text = (
                f"cannot store weights in {self.folder}: {error.strerror}; free some disk there, or give "
                "the daemon another --cache-dir"
            )
            raise ClusterError(text) from None


def _is_same(path: Path, descriptor: int) -> bool:
    """Whether the file is still there under its name: whoever had it locked may have finished it."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _read_use(path: Path) -> dict[str, int]:
    """The tensors that a daemon is busy with; none, and the file goes, when the daemon is gone."""
    try:
        with path.open("r+b", buffering=0) as file:
            if try_lock(file.fileno()):
                path.unlink(missing_ok=True)
                return {}
            pairs: list[Any] = [line.split() for line in file.read().decode().splitlines()]
            return {digest: int(size) for digest, size in pairs}
    except FileNotFoundError:
        return {}
