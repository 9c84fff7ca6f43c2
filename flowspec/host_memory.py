"""How much memory there is and how much is free, where this process runs: a container has its limit, not the
machine's memory.

The limits are those of control groups, version 1 and 2, of this process's own group and of all above it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """In bytes; `available` is what programs may still take without others being thrown out."""

    total: int
    available: int


def host_memory(root: Path = Path("/")) -> HostMemory:
    """What there is now; `root` is where /proc and /sys are looked for."""
    memory = psutil.virtual_memory()
    total, available = int(memory.total), int(memory.available)
    for limit, used in _limits(root):
        total, available = min(total, limit), min(available, max(0, limit - used))
    return HostMemory(total=total, available=available)


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """The limit of each group that has one, and what is taken of it; pages of files that nobody uses now
    count as free."""
    groups = root / "sys/fs/cgroup"
    for controllers, path in _own_groups(root):
        if not controllers:
            names = ("memory.max", "memory.current", "inactive_file")
            mounts = [groups, groups / "unified"]
        elif "memory" in controllers:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            mounts = [groups / "memory", groups / ",".join(controllers)]
        else:
            continue
        for folder in _upwards(mounts, path):
            limit, used = _number(folder / names[0]), _number(folder / names[1])
            if limit is not None and used is not None:
                yield limit, max(0, used - _statistic(folder / "memory.stat", names[2]))


def _own_groups(root: Path) -> Iterator[tuple[tuple[str, ...], str]]:
    """The controllers of each hierarchy, none for version 2, and where in it this process is."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        yield tuple(filter(None, controllers.split(","))), path


def _upwards(mounts: list[Path], path: str) -> Iterator[Path]:
    """The folder of a group and of those above it; in a container the own one may be the top, whatever its
    path says."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for mount in mounts:
        for count in range(len(parts), -1, -1):
            yield mount.joinpath(*parts[:count])


def _number(path: Path) -> int | None:
    """The number in a file; None for one that has none (`max`), or that is not there."""
    text = _text(path).strip()
    return int(text) if text.isascii() and text.isdecimal() else None


def _statistic(path: Path, name: str) -> int:
    for line in _text(path).splitlines():
        found, _, value = line.partition(" ")
        if found == name and value.strip().isdecimal():
            return int(value)
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace")
    except OSError:
        return ""
