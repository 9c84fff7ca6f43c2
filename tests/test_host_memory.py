"""Memory where a process runs: the limits of control groups, versions 1 and 2, from files as Linux has
them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from flowspec.host_memory import HostMemory, host_memory

MIB = 1 << 20
NO_LIMIT_1 = (1 << 63) - 4096
MACHINE = HostMemory(total=8192 * MIB, available=6000 * MIB)
INSIDE = "4:memory:/a/b\n3:cpu,cpuacct:/a/b\n0::/\n"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: MACHINE)


def root(folder: Path, own: str, files: Mapping[str, object]) -> Path:
    """A machine's files: /proc/self/cgroup, and those below /sys/fs/cgroup."""
    for name, content in {
        "proc/self/cgroup": own,
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return folder


def group(path: str, limit: object, used: int, files: int = 0, *, version: int) -> dict[str, object]:
    if version == 2:
        return {
            f"{path}/memory.max": limit,
            f"{path}/memory.current": used,
            f"{path}/memory.stat": f"anon 5\ninactive_file {files}",
        }
    names = (
        f"memory/{path}/memory.limit_in_bytes",
        f"memory/{path}/memory.usage_in_bytes",
        f"memory/{path}/memory.stat",
    )
    return dict(zip(names, (limit, used, f"inactive_file 1\ntotal_inactive_file {files}"), strict=True))


def test_without_groups_it_is_the_machines(tmp_path: Path) -> None:
    assert host_memory(tmp_path) == MACHINE
    assert host_memory(root(tmp_path, "0::/\n", {})) == MACHINE


@pytest.mark.parametrize("version", [1, 2])
def test_a_limit_is_what_there_is(tmp_path: Path, version: int) -> None:
    own = INSIDE if version == 1 else "0::/a/b\n"
    place = root(tmp_path, own, group("a/b", 420 * MIB, 120 * MIB, 20 * MIB, version=version))
    assert host_memory(place) == HostMemory(total=420 * MIB, available=320 * MIB), (
        "files that nobody uses are free"
    )


@pytest.mark.parametrize("version", [1, 2])
def test_the_limits_of_groups_above_hold_too(tmp_path: Path, version: int) -> None:
    own = INSIDE if version == 1 else "0::/a/b\n"
    none = NO_LIMIT_1 if version == 1 else "max"
    files = {
        **group("a/b", none, MIB, version=version),
        **group("a", 1024 * MIB, 1000 * MIB, version=version),
    }
    assert host_memory(root(tmp_path, own, files)) == HostMemory(total=1024 * MIB, available=24 * MIB)


def test_in_a_container_the_own_group_is_the_top(tmp_path: Path) -> None:
    place = root(tmp_path, "4:memory:/docker/0123\n", group("", 512 * MIB, 600 * MIB, version=1))
    assert host_memory(place) == HostMemory(total=512 * MIB, available=0)
    place = root(tmp_path / "v2", "0::/../..\n", group("", 512 * MIB, 12 * MIB, version=2))
    assert host_memory(place) == HostMemory(total=512 * MIB, available=500 * MIB)


def test_version_2_beside_version_1(tmp_path: Path) -> None:
    files = group("unified/x", 300 * MIB, 0, version=2)
    assert host_memory(root(tmp_path, "4:memory:/\n0::/x\n", files)).total == 300 * MIB


@pytest.mark.parametrize("content", ["", "max", "-5", "x" * 100, "²"])
def test_what_is_no_number_is_no_limit(tmp_path: Path, content: str) -> None:
    assert host_memory(root(tmp_path, "0::/a\nnonsense\n", group("a", content, 5, version=2))) == MACHINE


@pytest.mark.parametrize("version", [1, 2])
def test_what_others_were_promised_counts_in_their_groups_and_in_all(tmp_path: Path, version: int) -> None:
    own, theirs = ("4:memory:/a/b\n", "4:memory:/a/c\n") if version == 1 else ("0::/a/b\n", "0::/a/c\n")
    files = {**group("a/b", 400 * MIB, 0, version=version), **group("a", 1000 * MIB, 0, version=version)}
    place = root(tmp_path, own, files)
    for process, groups in ((17, own), (18, theirs)):
        (place / f"proc/{process}").mkdir()
        (place / f"proc/{process}/cgroup").write_text(groups)
    assert host_memory(place, {17: 100 * MIB}).available == 300 * MIB, "it shares our own limit"
    assert host_memory(place, {18: 500 * MIB}).available == 400 * MIB, "only the one above"
    assert host_memory(place, {18: 700 * MIB}).available == 300 * MIB
    assert host_memory(place, {19: 5900 * MIB}).available == 100 * MIB, "the machine's"
    assert host_memory(place, {19: 9000 * MIB}).available == 0
