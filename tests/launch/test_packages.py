"""Which torch `launch/packages` keeps and which it installs, and `launch/environment` with a Python that
installs nothing."""

from __future__ import annotations

import configparser
import contextlib
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launch.scripts import ROOT, fake_program, program, ran, script

packages = script("packages")
PC = ["numpy==2.4.6", "nvidia-cublas==13.1", "sympy==1.14.0", "torch==2.13.0", "triton==3.7.1"]
JETSON = ["numpy==1.26.4", "torch>=2.6,<2.14"]


CPU, PIN, NEW = "2.13.0+cpu", "torch==2.13.0+cpu", "2.9.0a0+50eac811a6.nv25.09"
KEPT = packages.Choice(True, "", PC)


@pytest.mark.parametrize(
    ("lines", "found", "ours", "without_gpu", "choice"),
    [
        (PC, "", "", False, packages.Choice(False, "", PC)),  # the pinned torch, where there is none
        (PC, "", "", True, packages.Choice(False, PIN, PC)),  # the build for CPUs
        (PC, "2.12.1+cpu", "2.12.1+cpu", True, packages.Choice(False, PIN, PC)),  # ours, when the pin moves
        (PC, CPU, CPU, True, packages.Choice(False, "", PC)),
        (PC, CPU, CPU, False, packages.Choice(False, "", PC, is_removed=True)),  # a PC that got a GPU
        (PC, "2.13.0", "2.13.0", True, packages.Choice(False, PIN, PC)),  # and back
        (PC, "2.13.0", "", True, KEPT),  # somebody put it there
        (PC, CPU, "", False, KEPT),
        (JETSON, NEW, "", True, packages.Choice(True, "", [JETSON[0], f"torch=={NEW}"])),
        (PC, "2.12.1", "2.12.0", False, packages.Choice(True, "", [PC[0], "torch==2.12.1"])),  # not ours
    ],
)
def test_which_torch_is_kept_and_which_installed(
    lines: list[str], found: str, ours: str, without_gpu: bool, choice: Any
) -> None:
    assert packages.choose(lines, found, ours, "2.6", without_gpu) == choice


def test_a_torch_that_is_missing_or_too_old_is_refused() -> None:
    for lines, found, told in (
        (JETSON, "", "expected NVIDIA's torch on this Jetson, but there is none"),
        (["numpy==2.4.6", "torchvision==0.28.0"], "", "expected a line in the file of versions"),
        *((JETSON, old, "2.6 or newer") for old in ("2.5.1", "2.5.0a0+872d972e41.nv24.08", "2.6.0a0")),
        *((JETSON, old, "2.6 or newer") for old in ("1.13.1", "2.6.0rc1", "nightly")),
    ):
        with pytest.raises(packages.Refusal, match=re.escape(told)):
            packages.choose(lines, found, "", "2.6", False)
    for new in ("2.6.0", "2.6.0+cpu", "2.6.1rc1", "2.10.0", "2.9.0a0", "3.0.0"):
        assert packages.choose(JETSON, new, "", "2.6", False).kept


PYTHON = fake_program("python-with-pip")


class Machine:
    """A copy of the scripts, on a platform that is only said."""

    def __init__(self, folder: Path, platform: str) -> None:
        self.folder = folder
        program(folder / "launch/platform", f"#!/bin/sh\necho {platform}\n")
        for name in ("environment", "packages", "install"):
            shutil.copy(ROOT / "launch" / name, folder / "launch" / name)
        shutil.copytree(ROOT / "constraints", folder / "constraints")
        shutil.copy(ROOT / "setup.cfg", folder)
        program(folder / "bin/python3", PYTHON.replace("REAL", sys.executable))
        program(
            folder / "launch/go",
            '#!/bin/bash\nset -euo pipefail\n. "$(dirname "$0")/environment" "${EXTRAS-all}"\necho went on\n',
        )
        self.environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("FLOWSPEC_", "PYTHON"))
            },
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "WORK": str(folder),
        }

    def go(self, **environment: str) -> tuple[int, list[str]]:
        """Runs a script that sources launch/environment; the status, and its complaints but for the first
        line."""
        done = ran([self.folder / "launch/go"], {**self.environment, **environment})
        assert (done.stdout == "went on\n") == (done.returncode == 0)
        return done.returncode, [
            line for line in done.stderr.splitlines() if not line.startswith("Installing FlowSpec ")
        ]

    def asked(self) -> list[str]:
        """What Python was asked for since the last time."""
        path = self.folder / "asked"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines


def test_a_board_gets_what_its_file_pins_once(tmp_path: Path) -> None:
    board = Machine(tmp_path, "aarch64 cpu")
    program(tmp_path / ".venv/bin/python", PYTHON.replace("REAL", sys.executable))
    (tmp_path / "no-pip").touch()  # as Debian makes one without its package python3-venv
    assert board.go() == (0, [])
    made, installed = board.asked()
    assert made == f"-m venv {tmp_path}/.venv", "made again"
    versions = tmp_path / ".venv/flowspec-constraints.txt"
    asked = "-m pip install --quiet --disable-pip-version-check"
    assert installed == f"{asked} -c {versions} setuptools -e {tmp_path}[all]"
    assert versions.read_text() == (ROOT / "constraints/aarch64.txt").read_text()
    assert (tmp_path / ".venv/flowspec-torch").read_text() == "2.9.1"
    (tmp_path / "no-pip").unlink()
    assert board.go() == (0, [])
    assert board.asked() == []  # up to date


def test_a_pc_gets_torch_from_the_index_for_cpus_or_is_told_and_another_with_a_gpu(tmp_path: Path) -> None:
    pc = Machine(tmp_path, "x86_64 cpu")
    status, (line,) = pc.go()
    assert status == 2
    assert "cannot get torch==2.13.0+cpu from https://download.pytorch.org/whl/cpu (no such host)" in line
    assert f"a torch that you put into {tmp_path}/.venv is kept" in line
    assert len(pc.asked()) == 2  # nothing but the environment and torch
    (tmp_path / "online").touch()
    assert pc.go() == (0, [])
    torch, others = pc.asked()
    index = "--index-url https://download.pytorch.org/whl/cpu"
    assert torch.endswith(f" --no-deps --retries 1 --timeout 15 {index} torch==2.13.0+cpu")
    assert others.endswith(f"-e {tmp_path}[all]")
    program(tmp_path / "launch/platform", "#!/bin/sh\necho x86_64 cuda\n")
    assert pc.go() == (0, [])
    removed, installed = pc.asked()
    assert removed == "-m pip uninstall --quiet --yes torch"
    assert installed.endswith(f"-e {tmp_path}[all]")
    assert pc.go() == (0, [])
    assert pc.asked() == []


def test_a_jetson_keeps_its_torch_if_it_sees_the_gpu(tmp_path: Path) -> None:
    jetson = Machine(tmp_path, "jetpack6 cuda")

    def refused() -> str:
        status, (line,) = jetson.go()
        assert status == 2
        return line

    assert "expected NVIDIA's torch on this Jetson, but there is none" in refused()
    assert jetson.asked() == [f"-m venv --system-site-packages {tmp_path}/.venv"]
    (tmp_path / "torch").write_text("2.8.0\n")
    assert "torch 2.8.0 cannot be imported (ImportError: libcudnn.so.9); see docs" in refused()
    (tmp_path / "cuda").write_text("False\n")
    assert "torch 2.8.0 does not see this Jetson's GPU; see docs/install.md" in refused()
    assert jetson.asked() == []
    (tmp_path / "cuda").write_text("a warning\nTrue\n")
    assert jetson.go() == (0, ["Keeping torch 2.8.0, which is there already."])
    versions = (tmp_path / ".venv/flowspec-constraints.txt").read_text().splitlines()
    assert {"torch==2.8.0", "numpy==1.26.4"} <= set(versions)
    assert len(jetson.asked()) == 1


def test_torch_comes_with_the_extras_that_need_it_and_where_there_is_a_gpu(tmp_path: Path) -> None:
    for platform, extras, named in (
        ("aarch64 cpu", "", ""),
        ("x86_64 cpu", "head,serve", "[head,serve]"),
        ("x86_64 cuda", "", "[gpu]"),
        ("x86_64 cuda", "head", "[head,gpu]"),
        ("x86_64 cuda", "serve,gpu", "[serve,gpu]"),
    ):
        machine = Machine(tmp_path / f"{platform} {extras}", platform)
        assert machine.go(EXTRAS=extras) == (0, [])
        *_, installed = machine.asked()
        assert installed.endswith(f" -e {machine.folder}{named}")
        assert (machine.folder / ".venv/flowspec-torch").exists() == ("gpu" in named)


def test_a_head_is_installed_where_nothing_else_is_named(tmp_path: Path) -> None:
    for words, named in (([], "[head]"), (["stage"], ""), (["discovery", "stage"], "[discovery]")):
        machine = Machine(tmp_path / "-".join(["it", *words]), "aarch64 cpu")
        ran([machine.folder / "launch/install", *words], machine.environment)
        assert machine.asked()[1].endswith(f" -e {machine.folder}{named}")


def in_terminal(machine: Machine, until: str) -> tuple[int, str]:
    """What launch/go writes to a terminal, in which somebody presses Ctrl-C once `until` is there; the
    status, too."""
    leader, follower = pty.openpty()
    command = [machine.folder / "launch/go"]
    with subprocess.Popen(
        ["setsid", "--ctty", *command],
        env=machine.environment,
        stdin=follower,
        stdout=follower,
        stderr=follower,
    ) as process:
        os.close(follower)
        shown, is_pressed = "", False
        with contextlib.suppress(OSError):  # it has ended
            while chunk := os.read(leader, 65536):
                shown += chunk.decode()
                if until in shown and not is_pressed:
                    os.write(leader, b"\x03")
                    is_pressed = True
        status = process.wait(60)
    os.close(leader)
    return status, shown


def test_a_terminal_shows_what_is_installed_and_ctrl_c_is_one_line(tmp_path: Path) -> None:
    board = Machine(tmp_path, "aarch64 cpu")
    (tmp_path / "slow").touch()
    status, shown = in_terminal(board, "downloading numpy 1.26.4 (14.2 MB) ...")
    assert status == 130
    _, _, after = shown.partition("^C")
    assert after.replace("\r\x1b[K", "").split("\r\n") == [
        "stopped; run the same command again, it goes on",
        "",
    ]
    (tmp_path / "slow").unlink()
    assert board.go() == (0, [])
    assert (tmp_path / ".venv/flowspec-torch").read_text() == "2.9.1", "ours, though it was stopped"


def test_other_versions_may_be_named(tmp_path: Path) -> None:
    jetson = Machine(tmp_path, "jetpack6 cuda")
    program(tmp_path / "launch/platform", "#!/bin/sh\nexit 2\n")
    status, (line,) = jetson.go(FLOWSPEC_CONSTRAINTS=str(tmp_path / "none.txt"))
    assert status == 2
    assert line.endswith(f"FLOWSPEC_CONSTRAINTS: expected a file of versions, got '{tmp_path}/none.txt'")
    assert jetson.go(FLOWSPEC_CONSTRAINTS=str(tmp_path / "constraints/aarch64.txt")) == (0, [])
    assert jetson.asked()[0] == f"-m venv {tmp_path}/.venv"


def test_a_copy_is_installed_where_it_is_asked_for(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "aarch64 cpu")
    place, versions = tmp_path / "opt", ROOT / "constraints/aarch64.txt"
    program(place / "bin/python", PYTHON.replace("REAL", sys.executable))
    command = [tmp_path / "launch/packages", "--copy", place, versions, "aarch64 cpu", "all"]
    subprocess.run(command, env=machine.environment, timeout=60, check=True)
    (installed,) = machine.asked()
    assert installed.endswith(f"-c {place}/flowspec-constraints.txt setuptools {tmp_path}[all]")


def test_the_image_gets_all_that_an_installation_copies() -> None:
    lines = (ROOT / "launch/Dockerfile.dockerignore").read_text().splitlines()
    let_through = {line[1:] for line in lines if line.startswith("!")}
    assert all((ROOT / name).exists() for name in let_through)
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    copied = {pattern.split("/")[0] for pattern in config["options.data_files"].values()}
    needed = {"flowspec", "setup.cfg", "setup.py", "pyproject.toml", "constraints", "README.md", "LICENSE"}
    assert copied | needed <= let_through


def test_extras_that_there_are_none_of_are_refused(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "aarch64 cpu")
    done = ran([tmp_path / "launch/install", "serve", "server"], machine.environment)
    assert (done.returncode, done.stderr.count("\n"), "'server'" in done.stderr) == (2, 1, True)


def test_a_program_beside_the_checkout_finds_flowspec(tmp_path: Path) -> None:
    """The folder that it was cloned into has its name and is no package, but would be taken for one."""
    (tmp_path / "flowspec" / "docs").mkdir(parents=True)
    command = [sys.executable, "-c", "from flowspec.version import __version__; print(__version__)"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip()
