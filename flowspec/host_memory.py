"""How much memory there is and how much is free, where this process runs: a container has its limit, not the
machine's memory.

The limits are those of control groups, version 1 and 2, of this process's own group and of all above it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """In bytes; `available` is what programs may still take without others being thrown out."""

    total: int
    available: int


NOTHING: Mapping[int, int] = {}


def host_memory(root: Path = Path("/"), promised: Mapping[int, int] = NOTHING) -> HostMemory:
    """What there is now; `root` is where /proc and /sys are looked for.

    Bytes that are `promised` to other processes, by their ids, and that they have not touched are not
    available: on the machine, and in each group that such a process is in.
    """
    memory = psutil.virtual_memory()
    total, available = int(memory.total), int(memory.available) - sum(promised.values())
    others = [(_groups(root, str(process)), size) for process, size in promised.items()]
    for limit, used, group in _limits(root):
        theirs = sum(size for groups, size in others if any(_is_within(each, group) for each in groups))
        total, available = min(total, limit), min(available, limit - used - theirs)
    return HostMemory(total=total, available=max(0, available))


@dataclass(frozen=True, slots=True)
class _Group:
    """A place in a hierarchy: its controllers, none for version 2, and the folders down to it."""

    controllers: tuple[str, ...]
    parts: tuple[str, ...]


def _is_within(inner: _Group, outer: _Group) -> bool:
    return inner.controllers == outer.controllers and inner.parts[: len(outer.parts)] == outer.parts


def _limits(root: Path) -> Iterator[tuple[int, int, _Group]]:
    """The limit of each group that has one, and what is taken of it; pages of files that nobody uses now
    count as free."""
    groups = root / "sys/fs/cgroup"
    for own in _groups(root, "self"):
        if not own.controllers:
            names = ("memory.max", "memory.current", "inactive_file")
            mounts = [groups, groups / "unified"]
        elif "memory" in own.controllers:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            mounts = [groups / "memory", groups / ",".join(own.controllers)]
        else:
            continue
        for group in _upwards(own):
            for mount in mounts:
                folder = mount.joinpath(*group.parts)
                limit, used = _number(folder / names[0]), _number(folder / names[1])
                if limit is not None and used is not None:
                    yield limit, max(0, used - _statistic(folder / "memory.stat", names[2])), group


def _groups(root: Path, process: str) -> list[_Group]:
    """Where in each hierarchy a process is, or `self`; nowhere if it has ended."""
    found = []
    for line in _text(root / "proc" / process / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        parts = tuple(part for part in path.split("/") if part not in ("", ".."))
        found.append(_Group(tuple(filter(None, controllers.split(","))), parts))
    return found


def _upwards(own: _Group) -> Iterator[_Group]:
    """A group and those above it; in a container the own one may be the top, whatever its path says."""
    for count in range(len(own.parts), -1, -1):
        yield _Group(own.controllers, own.parts[:count])


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
