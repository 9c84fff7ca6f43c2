"""Weights by their content: digests of tensors where they lie, and a daemon's folder of files named by them.

`tensors/DIGEST` is a whole tensor, whatever model it came with; `tensors/KEY.DIGEST` was made here and is
found again by a key of what it was made of. `tensors/DIGEST.part` (`.1.part` and so on, when several daemons
share the folder and want the same tensor at once) is what has arrived so far; the next attempt goes on from
there. `uses/*` say what daemons are busy with: each is locked by its daemon, so a dead one's counts for
nothing.

Nothing is trusted because it lies there: what is stored is hashed again whenever a slice is loaded from it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Container, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import msgspec

from flowspec.core.protocol.device_messages import TensorEntry
from flowspec.core.protocol.limits import DIGEST_CHARS
from flowspec.errors import ClusterError
from flowspec.folders import cache_folder, hash_range, read_own, try_lock, write_own, write_whole
from flowspec.model.tensors import Extent
from flowspec.plan.memory import mib

DISK_SHARE = 0.5
"""Of the disk that is free or the store's own, how much it may take when no limit is given."""
DISK_SPARED_BYTES = 64 << 20
"""Left free on the disk, whatever the limit."""
Stamp = tuple[int, int, int, int, int]
"""The state of a file: device, inode, size, and when content and inode last changed, in nanoseconds."""
log = logging.getLogger("flowspec.daemon")


# -------------------------------------------------------------------------------------------- digests


class _Digests(msgspec.Struct):
    """Of a file in the state `stamp`: the SHA-256 of each range `OFFSET+SIZE` that was hashed."""

    stamp: Stamp
    tensors: dict[str, str]


class HashedFiles:
    """Files of weights, each open from its first use until `close`. Raises `OSError`.

    Digests are saved in `folder` (default: the user's cache folder). Any change of a file, were it only its
    date, makes them void: hashing again is cheaper than a wrong answer.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = (cache_folder() if folder is None else folder) / "digests"
        self._files: dict[Path, tuple[int, _Digests]] = {}
        self._unsaved: set[Path] = set()

    def digest(self, extent: Extent, step: Callable[[int], None] = lambda size: None) -> str:
        """The SHA-256 of a tensor; `step` is called with the size of every block that is hashed for it."""
        descriptor, known = self._open(extent.path)
        key = f"{extent.offset}+{extent.size_bytes}"
        if key not in known.tensors:
            known.tensors[key] = hash_range(descriptor, extent.offset, extent.size_bytes, step).hexdigest()
            self._unsaved.add(extent.path)
        return known.tensors[key]

    def entry(self, name: str, extent: Extent, step: Callable[[int], None]) -> TensorEntry:
        """What the tensor of this name is."""
        size, digest = extent.size_bytes, self.digest(extent, step)
        return TensorEntry(name=name, dtype=extent.dtype, shape=extent.shape, size_bytes=size, digest=digest)

    def read(self, extent: Extent, offset: int, size: int) -> bytes:
        return os.pread(self._open(extent.path)[0], size, extent.offset + offset)

    def are_unchanged(self) -> bool:
        """Whether the files are still those that were opened, and as they were."""
        return all(_stamp_of(path.stat()) == known.stamp for path, (_, known) in self._files.items())

    def save(self) -> None:
        """A folder that cannot be written costs time later, nothing else."""
        while self._unsaved:
            path = self._unsaved.pop()
            try:
                write_own(self._saved_in(path), self._open(path)[1])
            except OSError as error:
                text = "cannot keep the digests of the weights in %s: %s"
                log.warning(text, self._folder, error.strerror)

    def close(self) -> None:
        for descriptor, _ in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def _open(self, path: Path) -> tuple[int, _Digests]:
        if path not in self._files:
            descriptor = os.open(path, os.O_RDONLY)
            stamp, known = _stamp_of(os.fstat(descriptor)), read_own(self._saved_in(path), _Digests)
            if known is None or known.stamp != stamp:
                known = _Digests(stamp=stamp, tensors={})
            self._files[path] = descriptor, known
        return self._files[path]

    def _saved_in(self, path: Path) -> Path:
        return self._folder / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]}.json"


def _stamp_of(found: os.stat_result) -> Stamp:
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


# ---------------------------------------------------------------------------------------------- store


class Partial:
    """A tensor on its way into the store: `held` of `size` bytes are there, those of an earlier attempt
    included. Locked until `close`."""

    def __init__(self, store: WeightStore, digest: str, size: int, file: FileIO) -> None:
        self.digest, self.size = digest, size
        self._store, self._file = store, file
        self.held = os.fstat(file.fileno()).st_size
        if self.held > size:
            self._empty()
        self._hash = hash_range(file.fileno(), 0, self.held)

    def _empty(self) -> None:
        self._file.truncate(0)
        self.held, self._hash = 0, hash_range(self._file.fileno(), 0, 0)

    def write(self, data: bytes | memoryview) -> None:
        """Appends what came next; raises `ClusterError` when the disk does not take it."""
        assert self.held + len(data) <= self.size, "more than the tensor has"
        self._hash.update(data)
        with self._store.explained():
            while data:
                written = self._file.write(data)
                self.held, data = self.held + written, memoryview(data)[written:]

    def finish(self) -> bool:
        """Makes the whole tensor a stored one; False, and it is empty again, when its bytes are not those
        that the digest names.

        The disk is not asked to write it at once: that takes several times as long as all else, and what a
        power cut leaves half written is found when it is loaded.
        """
        assert self.held == self.size, "not all of it is there"
        if self._hash.hexdigest() != self.digest:
            self._empty()
            return False
        with self._store.explained():
            os.replace(self._file.name, self._store.path(self.digest))
        self.close()
        return True

    def close(self) -> None:
        """Lets go of the file and keeps what is in it."""
        self._file.close()


class _StoredFile(NamedTuple):
    """A file of the store, whole or partial; `name` is its digest or key."""

    used_ns: int
    path: Path
    name: str
    size: int


class WeightStore:
    """The store in `folder` (default: in the user's cache folder), which may grow to `limit_bytes`.

    Several processes may share it. Whatever the disk refuses raises `ClusterError`.
    """

    def __init__(self, folder: Path | None = None, limit_bytes: int | None = None) -> None:
        self.folder = cache_folder() / "weights" if folder is None else folder
        self.limit_bytes = limit_bytes
        self._tensors, self._uses = self.folder / "tensors", self.folder / "uses"

    def path(self, digest: str) -> Path:
        """Where the tensor is when it is whole."""
        return self._tensors / digest

    def made(self, keys: Container[str]) -> dict[str, tuple[Path, int]]:
        """What was made here and has one of these keys (64 characters), and its bytes."""
        whole = (each for each in self._stored() if len(each.path.suffix) == 1 + DIGEST_CHARS)
        return {each.name: (each.path, each.size) for each in whole if each.name in keys}

    def keep(self, key: str, data: bytes) -> None:
        """Stores what was made here, if there is room for it as in `reserve`."""
        with self.reserve({key: len(data)}), self.explained():
            write_whole(self._tensors / f"{key}.{hashlib.sha256(data).hexdigest()}", data)

    def check(
        self, sizes: Mapping[Path, int], progress: Callable[[float], None] = lambda share: None
    ) -> set[Path]:
        """Those of these files (and their bytes) that are there and right, read from beginning to end; one
        that is not as it should be is thrown away."""
        there = [path for path in sizes if path.is_file()]
        total, done, right = sum(sizes[path] for path in there), 0, set()

        def step(size: int) -> None:
            nonlocal done
            done += size
            progress(min(1.0, done / total))

        for path in there:
            digest = path.name.rpartition(".")[2]
            with self.explained(), contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                is_whole = os.fstat(file.fileno()).st_size == sizes[path]
                if is_whole and hash_range(file.fileno(), 0, sizes[path], step).hexdigest() == digest:
                    os.utime(path)  # the last to be thrown away
                    right.add(path)
                else:
                    path.unlink(missing_ok=True)
        if len(right) < len(there):
            text = "%d file(s) stored in %s were damaged; they are fetched or made again"
            log.warning(text, len(there) - len(right), self.folder)
        return right

    def partial(self, digest: str, size: int) -> Partial:
        """The tensor's partial file, with what an earlier attempt left in it."""
        number = 0
        with self.explained():
            while True:
                path = self._tensors / (f"{digest}.{number}.part" if number else f"{digest}.part")
                file = FileIO(path, "a+", opener=lambda name, flags: os.open(name, flags, 0o600))
                if try_lock(file.fileno()) and _is_same(path, file):
                    return Partial(self, digest, size, file)
                file.close()
                number += 1

    @contextlib.contextmanager
    def reserve(self, needed: Mapping[str, int]) -> Iterator[None]:
        """Keeps room for these tensors (digest -> bytes), and keeps everybody from throwing them away
        meanwhile.

        What has not been used for longest goes, as far as need be. Raises `ClusterError` when they cannot
        fit.
        """
        with contextlib.ExitStack() as stack:
            with self.explained():
                for folder in (self._tensors, self._uses):
                    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                with (self.folder / "lock").open("a+b", buffering=0) as lock:  # a pipe opens so, too, at once
                    fcntl.flock(lock, fcntl.LOCK_EX)  # one process at a time reserves
                    descriptor, name = tempfile.mkstemp(dir=self._uses)
                    stack.callback(os.close, descriptor)
                    stack.callback(Path(name).unlink, missing_ok=True)
                    try_lock(descriptor)
                    os.write(descriptor, "".join(f"{key} {size}\n" for key, size in needed.items()).encode())
                    self._make_room(needed)
            yield

    def _make_room(self, needed: Mapping[str, int]) -> None:
        in_use = dict(needed)
        for path in self._uses.iterdir():
            in_use |= _read_use(path)
        stored = sorted(self._stored())
        spare = [each for each in stored if each.name not in in_use]
        taken = sum(each.size for each in stored)
        growth = max(0, sum(in_use.values()) - sum(each.size for each in stored if each.name in in_use))
        free = shutil.disk_usage(self.folder).free - DISK_SPARED_BYTES
        limit = int((max(0, free) + taken) * DISK_SHARE) if self.limit_bytes is None else self.limit_bytes
        excess = max(taken + growth - limit, growth - free)
        if excess > sum(each.size for each in spare):
            wanted = sum(needed.values())
            others = sum(in_use.values()) - wanted
            sharing = f", {mib(others)} of them for other daemons that load now" if others else ""
            raise ClusterError(
                f"the weights of these layers take {mib(wanted)} on disk, but {self.folder} may hold "
                f"{mib(limit)}{sharing} ({mib(max(0, free))} are free there); give this device fewer layers, "
                "or its daemon more --cache-limit or another --cache-dir"
            )
        for each in spare:
            if excess <= 0:
                break
            each.path.unlink(missing_ok=True)
            excess -= each.size

    def _stored(self) -> Iterator[_StoredFile]:
        for path in self._tensors.glob("*"):
            with contextlib.suppress(FileNotFoundError):  # another daemon has just finished or dropped it
                found = path.stat()
                yield _StoredFile(found.st_mtime_ns, path, path.name.partition(".")[0], found.st_size)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Says in one line what the disk refused."""
        try:
            yield
        except OSError as error:
            raise ClusterError(
                f"cannot store weights in {self.folder}: {error.strerror}; free some disk there, or give the "
                "daemon another --cache-dir"
            ) from None


def _is_same(path: Path, file: FileIO) -> bool:
    """Whether the file is still there under its name: whoever had it locked may have finished it."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    return False


def _read_use(path: Path) -> dict[str, int]:
    """The tensors that a daemon is busy with; none, and the file goes, when the daemon is gone."""
    with contextlib.suppress(FileNotFoundError), FileIO(path, "r+") as file:
        if not try_lock(file.fileno()):
            pairs = (line.split() for line in file.read().decode().splitlines())
            return {digest: int(size) for digest, size in pairs}
        path.unlink(missing_ok=True)
    return {}
