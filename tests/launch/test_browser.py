"""`launch/browser` on machines that are folders: with the browsers, without one, and where nobody may install
any."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "launch" / "browser"

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


def put(place: Path, name: str, text: str) -> None:
    (place / name).write_text(text)
    (place / name).chmod(0o755)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """All programs that there are."""
    for name in ("bash", "env", "id", "dirname", "chmod", "true"):
        found = shutil.which(name)
        assert found is not None
        (tmp_path / name).symlink_to(found)
    return tmp_path


def browser(place: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT], env={**os.environ, "PATH": str(place)}, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("name", ["chromium", "chromium-browser", "google-chrome"])
def test_browsers_that_are_there_are_named_and_nothing_is_installed(place: Path, name: str) -> None:
    put(place, "apt-get", APT)
    for each in (name, "firefox-esr"):
        put(place, each, "#!/bin/bash\n")
    done = browser(place)
    assert (done.returncode, done.stdout) == (0, f"{place / name}\n{place / 'firefox-esr'}\n")
    assert not (place / "asked").exists()


@pytest.mark.parametrize("there", [(), ("chromium",), ("firefox-esr",)])
def test_what_is_missing_is_installed(place: Path, there: tuple[str, ...]) -> None:
    put(place, "apt-get", APT)
    put(place, "sudo", SUDO)
    for name in there:
        put(place, name, "#!/bin/bash\n")
    done = browser(place)
    assert (done.returncode, done.stdout) == (0, f"{place / 'chromium'}\n{place / 'firefox-esr'}\n")
    missing = [name for name in ("chromium", "firefox-esr") if name not in there]
    assert (place / "asked").read_text().splitlines() == [
        "update -qq",
        f"install -y -qq --no-install-recommends {' '.join(missing)}",
    ]


def test_where_none_can_be_installed_one_line_says_so(place: Path) -> None:
    done = browser(place)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(
        "launch/browser: expected one of chromium chromium-browser google-chrome, and firefox-esr; install"
    )
    assert done.stderr.count("\n") == 1
