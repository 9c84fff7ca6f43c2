"""Memory where a process runs: the limits of control groups, versions 1 and 2, from files as Linux has
them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from flowspec.host_memory import HostMemory, host_memory

MIB = 1 << 20
MACHINE = HostMemory(total=8192 * MIB, available=6000 * MIB)
OWN = {1: "4:memory:/a/b\n3:cpu,cpuacct:/a/b\n0::/\n", 2: "0::/a/b\n"}
NONE = {1: (1 << 63) - 4096, 2: "max"}
"""What stands there for no limit."""
each_version = pytest.mark.parametrize("version", [1, 2])


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: MACHINE)


def root(folder: Path, own: str, files: Mapping[str, object]) -> Path:
    """A machine's files: /proc/self/cgroup, and those below /sys/fs/cgroup."""
    named = {"proc/self/cgroup": own, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}}
    for name, content in named.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return folder


def group(path: str, limit: object, used: int, files: int = 0, *, version: int) -> dict[str, object]:
    if version == 2:
        place, names, stat = path, ("max", "current"), f"anon 5\ninactive_file {files}"
    else:
        place, names = f"memory/{path}", ("limit_in_bytes", "usage_in_bytes")
        stat = f"inactive_file 1\ntotal_inactive_file {files}"
    found = dict(zip((*names, "stat"), (limit, used, stat), strict=True))
    return {f"{place}/memory.{name}": content for name, content in found.items()}


def test_without_groups_it_is_the_machines(tmp_path: Path) -> None:
    assert host_memory(tmp_path) == MACHINE
    assert host_memory(root(tmp_path, "0::/\n", {})) == MACHINE


@each_version
def test_a_limit_is_what_there_is_and_those_of_groups_above_hold_too(tmp_path: Path, version: int) -> None:
    own = group("a/b", 420 * MIB, 120 * MIB, 20 * MIB, version=version)
    found = host_memory(root(tmp_path, OWN[version], own))
    assert found == HostMemory(total=420 * MIB, available=320 * MIB), "files that nobody uses are free"
    none = group("a/b", NONE[version], MIB, version=version)
    above = group("a", 1024 * MIB, 1000 * MIB, version=version)
    found = host_memory(root(tmp_path, OWN[version], none | above))
    assert found == HostMemory(total=1024 * MIB, available=24 * MIB)


def test_in_a_container_the_own_group_is_the_top(tmp_path: Path) -> None:
    place = root(tmp_path, "4:memory:/docker/0123\n", group("", 512 * MIB, 600 * MIB, version=1))
    assert host_memory(place) == HostMemory(total=512 * MIB, available=0)
    place = root(tmp_path / "v2", "0::/../..\n", group("", 512 * MIB, 12 * MIB, version=2))
    assert host_memory(place) == HostMemory(total=512 * MIB, available=500 * MIB)


def test_version_2_beside_version_1(tmp_path: Path) -> None:
    files = group("unified/x", 300 * MIB, 0, version=2)
    assert host_memory(root(tmp_path, "4:memory:/\n0::/x\n", files)).total == 300 * MIB


def test_what_is_no_number_is_no_limit(tmp_path: Path) -> None:
    for content in ("", "max", "-5", "x" * 100, "²"):
        assert host_memory(root(tmp_path, "0::/a\nnonsense\n", group("a", content, 5, version=2))) == MACHINE


@each_version
def test_what_others_were_promised_counts_in_their_groups_and_in_all(tmp_path: Path, version: int) -> None:
    files = {**group("a/b", 400 * MIB, 0, version=version), **group("a", 1000 * MIB, 0, version=version)}
    place = root(tmp_path, OWN[version], files)
    for process, groups in ((17, OWN[version]), (18, OWN[version].replace("a/b", "a/c"))):
        (place / f"proc/{process}").mkdir()
        (place / f"proc/{process}/cgroup").write_text(groups)
    for process, promised, available in (
        (17, 100, 300),  # it shares our own limit
        (18, 500, 400),  # only the one above
        (18, 700, 300),
        (19, 5900, 100),  # the machine's
        (19, 9000, 0),
    ):
        assert host_memory(place, {process: promised * MIB}).available == available * MIB
