"""`launch/platform` on machines that are folders, with a `uname` of their own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.launch.scripts import ROOT, program, ran

JETSON = "# R{} (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64, DATE: Wed Jan  8\n"


def platform(
    folder: Path, machine: str, release: str | None = None, driver: bool = False, system: str = "Linux"
) -> subprocess.CompletedProcess[str]:
    tools = folder / "tools"
    program(tools / "uname", f"#!/bin/sh\n[ $1 = -s ] && echo {system} || echo {machine}\n")
    if release is not None:
        (folder / "etc").mkdir()
        (folder / "etc/nv_tegra_release").write_text(release)
    if driver:
        (folder / "proc/driver/nvidia").mkdir(parents=True)
        (folder / "proc/driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module\n")
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    return ran([ROOT / "launch/platform", folder], environment)


@pytest.mark.parametrize(
    ("machine", "release", "driver", "expected"),
    [
        ("x86_64", None, False, "x86_64 cpu"),
        ("x86_64", None, True, "x86_64 cuda"),
        ("aarch64", None, False, "aarch64 cpu"),
        ("aarch64", JETSON.format(36), False, "jetpack6 cuda"),
        ("aarch64", JETSON.format(39), False, "jetpack7 cuda"),
        ("aarch64", JETSON.format(35), False, "aarch64 cpu"),  # JetPack 5
        ("aarch64", "something else\n", False, "aarch64 cpu"),
    ],
)
def test_each_machine_has_its_file(
    machine: str, release: str | None, driver: bool, expected: str, tmp_path: Path
) -> None:
    done = platform(tmp_path, machine, release, driver)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{expected}\n", "")
    assert (ROOT / "constraints" / f"{expected.split()[0]}.txt").is_file()


@pytest.mark.parametrize(("machine", "system"), [("armv7l", "Linux"), ("x86_64", "Darwin")])
def test_other_processors_and_systems_are_refused(machine: str, system: str, tmp_path: Path) -> None:
    done = platform(tmp_path, machine, system=system)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert (system if system != "Linux" else machine) in line
    assert "FLOWSPEC_CONSTRAINTS=FILE" in line
