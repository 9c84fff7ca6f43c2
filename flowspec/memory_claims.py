"""What the daemons of one user on one machine were promised of its memory, so that none counts what another
will take.

A daemon that was given layers has hardly touched what it may take: caches grow with answers, and look free to
all others until then. So each has a small file, in a folder of its user, that says how much it may take in
all. Whoever wants to know what is free subtracts what others were promised and have not touched. Files of
processes that have ended count for nothing and go.

It is an agreement, and no lock on memory: daemons of other users and of other containers, whose processes
have other ids, are not seen; their limits are (`host_memory.py`).
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil

from flowspec.folders import locked, read_own, temporary_folder, write_own


def claims_folder() -> Path:
    """Below `$XDG_RUNTIME_DIR`, else below the folder for temporary files; it need not exist yet."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    own = Path(runtime) / "flowspec" if runtime else temporary_folder()
    try:
        table = os.stat("/proc/self/ns/pid").st_ino  # of processes; a container has its own
    except OSError:
        return own / "memory"
    return own / f"memory-{table}"


class Claim(msgspec.Struct):
    """When a process began, and the bytes that it may have in all."""

    began: float
    sure: int
    most: int


class MemoryClaims:
    """This process among those that share a machine's memory; it takes part from `join` to `leave`.

    Where the folder cannot be had, it is alone. What it was promised, `sure` and `most`, is in bytes beyond
    what it has now.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or claims_folder()
        self._own = self._folder / f"{os.getpid()}.json"
        self._has_joined = False

    def join(self) -> None:
        """Takes part, with nothing promised."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            found = self._folder.parent.lstat()
        except OSError:
            return
        self._has_joined = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
        self.promise(sure=0, most=0)

    def leave(self) -> None:
        if self._has_joined:
            self._has_joined = False
            with contextlib.suppress(OSError):
                self._own.unlink()

    def promise(self, *, sure: int, most: int) -> None:
        """From now on this process may take `sure` more for its layers and one conversation, `most` with all
        caches."""
        if not self._has_joined:
            return
        own = psutil.Process()
        resident = int(own.memory_info().rss)
        claim = Claim(began=own.create_time(), sure=resident + sure, most=resident + most)
        with contextlib.suppress(OSError):
            write_own(self._own, claim)

    @contextlib.contextmanager
    def deciding(self) -> Iterator[None]:
        """One process at a time looks what is free and promises itself some of it."""
        if not self._has_joined:
            yield
            return
        with locked(self._folder / "deciding"):
            yield

    def untouched(self, kind: str) -> dict[int, int]:
        """Bytes that each other process was promised and has not touched, by its id; `kind` is `sure` or
        `most`."""
        if not self._has_joined:
            return {}
        found = {}
        for path in self._folder.glob("*.json"):
            if path == self._own:
                continue
            claim = read_own(path, Claim)
            if claim is None:
                continue  # another version's, or not a claim
            try:
                process = psutil.Process(int(path.stem))
                has_ended = process.status() == psutil.STATUS_ZOMBIE  # and its parent has not asked how
                is_same = not has_ended and abs(process.create_time() - claim.began) < 1.0
                untouched = max(0, getattr(claim, kind) - int(process.memory_info().rss))
            except psutil.NoSuchProcess:
                is_same, untouched = False, 0
            except (ValueError, psutil.AccessDenied):
                continue
            if is_same:
                found[int(path.stem)] = untouched
            else:
                with contextlib.suppress(OSError):
                    path.unlink()
        return found
