"""The SHA-256 of a checkpoint's tensors, each computed once for as long as its file stays as it is.

They are kept in the user's cache folder, one small file for each file of weights, with the state that the
file was in. Any change of it, were it only its date, makes them void: hashing again is cheaper than a wrong
answer.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from flowspec.folders import cache_folder, hash_range, read_own, write_own
from flowspec.model.tensors import Extent

log = logging.getLogger("flowspec.head")

Stamp = tuple[int, int, int, int, int]
"""The state of a file: device, inode, size, and when content and inode last changed, in nanoseconds."""


def stamp_of(found: os.stat_result) -> Stamp:
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class _Kept(msgspec.Struct):
    stamp: Stamp
    tensors: dict[str, str]


class Digests:
    """Digests of one file of weights, open as `descriptor` and in the state `stamp`."""

    def __init__(self, path: Path, descriptor: int, stamp: Stamp, folder: Path | None = None) -> None:
        self._descriptor = descriptor
        self._stamp = stamp
        name = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]
        self._path = (cache_folder() if folder is None else folder) / "digests" / f"{name}.json"
        self._known = self._read()
        self._is_new = False

    def of(self, extent: Extent, step: Callable[[int], None] = lambda size: None) -> str:
        """The digest of a tensor in this file. `step` is told of every block that is hashed for it."""
        key = f"{extent.offset}+{extent.size_bytes}"
        if key not in self._known:
            self._known[key] = hash_range(
                self._descriptor, extent.offset, extent.size_bytes, step
            ).hexdigest()
            self._is_new = True
        return self._known[key]

    def save(self) -> None:
        """Keeps what was computed since the last time; a folder that cannot be written costs time later,
        nothing else."""
        if self._is_new:
            self._is_new = False
            try:
                write_own(self._path, _Kept(stamp=self._stamp, tensors=self._known))
            except OSError as error:
                log.warning(
                    "cannot keep the digests of the weights in %s: %s", self._path.parent, error.strerror
                )

    def _read(self) -> dict[str, str]:
        kept = read_own(self._path, _Kept)
        return {} if kept is None or kept.stamp != self._stamp else kept.tensors


@dataclass(frozen=True, slots=True)
class _Open:
    """A file of weights, and the state that it was in when it was opened."""

    descriptor: int
    stamp: Stamp
    digests: Digests


class OpenFiles:
    """Files of weights, each held open from its first use until `close`; digests are kept in `folder`. Raises
    `OSError`."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._files: dict[Path, _Open] = {}

    def digest(self, extent: Extent, step: Callable[[int], None] = lambda size: None) -> str:
        """The digest of a tensor; `step` is told of every block that is hashed for it."""
        return self._open(extent.path).digests.of(extent, step)

    def read(self, extent: Extent, offset: int, size: int) -> bytes:
        return os.pread(self._open(extent.path).descriptor, size, extent.offset + offset)

    def unchanged(self, paths: Iterable[Path] | None = None) -> bool:
        """Whether these files, by default all, are still those that were opened, and as they were."""
        return all(
            stamp_of(path.stat()) == self._open(path).stamp
            for path in (self._files if paths is None else paths)
        )

    def save(self) -> None:
        for opened in self._files.values():
            opened.digests.save()

    def close(self) -> None:
        for opened in self._files.values():
            os.close(opened.descriptor)
        self._files.clear()

    def _open(self, path: Path) -> _Open:
        if path not in self._files:
            descriptor = os.open(path, os.O_RDONLY)
            stamp = stamp_of(os.fstat(descriptor))
            self._files[path] = _Open(descriptor, stamp, Digests(path, descriptor, stamp, self._folder))
        return self._files[path]
