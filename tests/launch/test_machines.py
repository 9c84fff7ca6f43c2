"""Scripts of launch/ on machines that are folders: `launch/arm64` as far as nothing is emulated,
`launch/needs` with all that tests need, without some of it, and where nobody may install any, and
`launch/platform`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.launch.scripts import ROOT, program, ran


def arm64(words: Sequence[str], folder: Path, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "FLOWSPEC_ARM64": str(folder), **({} if path is None else {"PATH": path})}
    return ran([ROOT / "launch/arm64", *words], environment)


def link(place: Path, *names: str) -> None:
    """Links to programs of this machine: all that there are."""
    place.mkdir(exist_ok=True)
    for name in names:
        found = shutil.which(name)
        assert found is not None
        (place / name).symlink_to(found)


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """`id` says that we are root."""
    link(tmp_path / "programs", "bash", "env", "dirname", "cat", "rm")
    program(tmp_path / "programs" / "id", "#!/bin/bash\necho 0\n")
    return tmp_path / "programs"


def test_wrong_words_get_one_line(tmp_path: Path) -> None:
    for words, named in (
        ([], "''"),
        (["--cpu", "cortex-a53", "make"], "--cpu"),
        (["--fast", "make"], "'--fast'"),
        (["run"], "run"),
        (["make", "more"], "'more'"),
        (["remove", "/"], "'/'"),
    ):
        done = arm64(words, tmp_path / "root")
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert named in done.stderr
    assert not (tmp_path / "root").exists()


def test_what_is_missing_is_named(programs: Path, tmp_path: Path) -> None:
    """A tool, root, and a folder from / on that has nothing else in it, which `remove` would delete, too."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").touch()
    for folder, named in (
        (tmp_path / "root", "qemu-user-static"),
        (tmp_path / "home", "FLOWSPEC_ARM64"),
        (Path("here"), "FLOWSPEC_ARM64"),
    ):
        done = arm64(["make"], folder, str(programs))
        assert (done.returncode, done.stderr.count("\n"), named in done.stderr) == (2, 1, True)
    (programs / "id").write_text("#!/bin/bash\necho 1000\n")
    done = arm64(["make"], tmp_path / "root", str(programs))
    assert (done.returncode, done.stderr.count("\n"), "expected root" in done.stderr) == (2, 1, True)


def test_remove_deletes_what_was_made_and_no_other_folder(programs: Path, tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    for folder in (own, other):
        (folder / "root").mkdir(parents=True)
    (own / ".flowspec-arm64").touch()
    assert arm64(["remove"], own, str(programs)).returncode == 0
    assert not own.exists()
    done = arm64(["remove"], other, str(programs))
    told = f"launch/arm64: {other} was not made by launch/arm64; not removed\n"
    assert (done.returncode, done.stderr) == (2, told)
    assert (other / "root").exists()
    assert arm64(["remove"], own, str(programs)).returncode == 0, "removed before"


APT = """#!/bin/bash
echo "$*" >> "$(dirname "$0")/asked"
if [ "$1" = install ]; then
    echo "a line of apt's own"
    for name in "${@:5}"; do
        printf '#!/bin/bash\\n' > "$(dirname "$0")/$name"
        chmod +x "$(dirname "$0")/$name"
    done
fi
"""
SUDO = '#!/bin/bash\n[ "$1" = -n ] && exec "${@:2}"\n'
VENV = '#!/bin/bash\n[ -e "$(dirname "$0")/python3-venv" ]\n'
ALL = ("gcc", "python3-venv", "git", "chromium", "firefox-esr")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    link(tmp_path, "bash", "env", "id", "dirname", "chmod", "true")
    program(tmp_path / "python3", VENV)
    return tmp_path


def needs(place: Path, *there: str) -> subprocess.CompletedProcess[str]:
    """What it does where these of the programs that tests need are there."""
    for each in there:
        program(place / each, "#!/bin/bash\n")
    environment = {**os.environ, "PATH": str(place)}
    environment.pop("CC", None)
    return ran([ROOT / "launch/needs"], environment)


def without(*missing: str) -> set[str]:
    return {*ALL} - {*missing}


@pytest.mark.parametrize("name", ["chromium", "google-chrome"])
def test_where_all_is_there_nothing_is_installed(name: str, place: Path) -> None:
    program(place / "apt-get", APT)
    done = needs(place, *without("chromium"), name)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (place / "asked").exists()


@pytest.mark.parametrize("missing", [("firefox-esr",), ALL])
def test_what_is_missing_is_installed(missing: tuple[str, ...], place: Path) -> None:
    program(place / "apt-get", APT)
    program(place / "sudo", SUDO)
    done = needs(place, *without(*missing))
    assert (done.returncode, done.stdout) == (0, "")
    packages = " ".join(missing).replace("gcc", "gcc libc6-dev")
    installed = f"install -y -qq --no-install-recommends {packages}"
    assert (place / "asked").read_text().splitlines() == ["update -qq", installed]


def test_without_a_browser_one_line_says_what_is_left_out(place: Path) -> None:
    done = needs(place, *without("chromium", "firefox-esr"))
    assert (done.returncode, done.stdout.split()) == (0, ["chromium", "firefox"])
    (line,) = done.stderr.splitlines()
    assert line.startswith("launch/needs: tests of the page in ")
    assert line.endswith("on Debian as root: apt-get install chromium firefox-esr")


@pytest.mark.parametrize("missing", ["gcc", "python3-venv", "git"])
def test_without_anything_else_it_fails(missing: str, place: Path) -> None:
    done = needs(place, *without(missing))
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert "apt-get install" in line


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
