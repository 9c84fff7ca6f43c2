"""`launch/needs` on machines that are folders: with all that tests need, without some of it, and where nobody
may install any."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.launch.scripts import ROOT, program, ran

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
    """All programs that there are."""
    for name in ("bash", "env", "id", "dirname", "chmod", "true"):
        found = shutil.which(name)
        assert found is not None
        (tmp_path / name).symlink_to(found)
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
