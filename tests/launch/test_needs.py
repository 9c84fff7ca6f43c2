"""`launch/needs` on machines that are folders: with all that tests need, without some of it, and where nobody
may install any."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "launch" / "needs"
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
NOTHING = "#!/bin/bash\n"
VENV = '#!/bin/bash\n[ -e "$(dirname "$0")/python3-venv" ]\n'
ALL = ("gcc", "python3-venv", "git", "chromium", "firefox-esr")


def put(place: Path, name: str, text: str = NOTHING) -> None:
    (place / name).write_text(text)
    (place / name).chmod(0o755)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """All programs that there are."""
    for name in ("bash", "env", "id", "dirname", "chmod", "true"):
        found = shutil.which(name)
        assert found is not None
        (tmp_path / name).symlink_to(found)
    put(tmp_path, "python3", VENV)
    return tmp_path


def needs(place: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": str(place)}
    environment.pop("CC", None)
    return subprocess.run([SCRIPT], env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("name", ["chromium", "chromium-browser", "google-chrome"])
def test_where_all_is_there_nothing_is_installed(name: str, place: Path) -> None:
    for each in {*ALL, name} - ({"chromium"} - {name}):
        put(place, each)
    put(place, "apt-get", APT)
    done = needs(place)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (place / "asked").exists()


@pytest.mark.parametrize("missing", [("chromium",), ("firefox-esr",), ("python3-venv", "git"), ALL])
def test_what_is_missing_is_installed(missing: tuple[str, ...], place: Path) -> None:
    put(place, "apt-get", APT)
    put(place, "sudo", SUDO)
    for each in {*ALL} - {*missing}:
        put(place, each)
    done = needs(place)
    assert (done.returncode, done.stdout) == (0, "")
    packages = " ".join(missing).replace("gcc", "gcc libc6-dev")
    assert (place / "asked").read_text().splitlines() == [
        "update -qq",
        f"install -y -qq --no-install-recommends {packages}",
    ]


@pytest.mark.parametrize("missing", [("chromium", "firefox-esr"), ("firefox-esr",)])
def test_without_a_browser_one_line_says_what_is_left_out(missing: tuple[str, ...], place: Path) -> None:
    for each in {*ALL} - {*missing}:
        put(place, each)
    done = needs(place)
    assert (done.returncode, done.stdout.split()) == (0, [name.removesuffix("-esr") for name in missing])
    assert done.stderr.startswith("launch/needs: tests of the page in ")
    assert done.stderr.endswith(f"on Debian as root: apt-get install {' '.join(missing)}\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("missing", ["gcc", "python3-venv", "git"])
def test_without_anything_else_it_fails(missing: str, place: Path) -> None:
    for each in {*ALL} - {missing}:
        put(place, each)
    done = needs(place)
    assert (done.returncode, done.stdout) == (1, "")
    assert "apt-get install" in done.stderr
    assert done.stderr.count("\n") == 1
