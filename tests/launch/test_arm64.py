"""`launch/arm64` as far as nothing is emulated: what it says to wrong input, and what it never touches."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "launch" / "arm64"


def arm64(words: Sequence[str], folder: Path, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "FLOWSPEC_ARM64": str(folder), **({} if path is None else {"PATH": path})}
    return subprocess.run([SCRIPT, *words], env=environment, capture_output=True, text=True, timeout=60)


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """All programs that there are; `id` says that we are root."""
    place = tmp_path / "programs"
    place.mkdir()
    for name in ("bash", "env", "dirname", "cat", "rm"):
        found = shutil.which(name)
        assert found is not None
        (place / name).symlink_to(found)
    (place / "id").write_text("#!/bin/bash\necho 0\n")
    (place / "id").chmod(0o755)
    return place


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "expected make, run, quick, test, demo, proof or remove, got ''"),
        (["build"], "expected make, run, quick, test, demo, proof or remove, got 'build'"),
        (["--cpu", "cortex-a53", "make"], "--cpu: expected cortex-a76 or cortex-a72, got 'cortex-a53'"),
        (["--cpu"], "--cpu: expected cortex-a76 or cortex-a72, got ''"),
        (["--fast", "make"], "unknown flag '--fast'"),
        (["run"], "expected a command after run"),
        (["make", "more"], "make takes no more words, got 'more'"),
        (["remove", "/"], "remove takes no more words, got '/'"),
    ],
)
def test_wrong_words_get_one_line(words: list[str], told: str, tmp_path: Path) -> None:
    done = arm64(words, tmp_path / "root")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"launch/arm64: {told}")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "root").exists()


def test_help_names_every_word_and_the_folder(tmp_path: Path) -> None:
    done = arm64(["--help"], tmp_path / "root")
    assert (done.returncode, done.stderr) == (0, "")
    words = ["make", "run", "quick", "test", "demo", "proof", "remove", "cortex-a76", "cortex-a72"]
    assert [word for word in [*words, str(tmp_path / "root")] if word not in done.stdout] == []


def test_somebody_who_is_not_root_is_told(programs: Path, tmp_path: Path) -> None:
    (programs / "id").write_text("#!/bin/bash\necho 1000\n")
    done = arm64(["make"], tmp_path / "root", str(programs))
    told = "launch/arm64: expected root, for namespaces and chroot; run it with sudo\n"
    assert (done.returncode, done.stderr) == (2, told)


def test_a_tool_that_is_missing_is_named_with_its_package(programs: Path, tmp_path: Path) -> None:
    done = arm64(["make"], tmp_path / "root", str(programs))
    told = "launch/arm64: qemu-aarch64-static is missing; on Debian: apt-get install qemu-user-static\n"
    assert (done.returncode, done.stderr) == (2, told)


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


def test_a_folder_with_other_things_is_not_taken(programs: Path, tmp_path: Path) -> None:
    """Else `remove` would delete them, too."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").touch()
    done = arm64(["make"], tmp_path / "home", str(programs))
    told = f"launch/arm64: FLOWSPEC_ARM64: {tmp_path}/home has other things in it; "
    assert (done.returncode, done.stderr) == (2, f"{told}expected an empty folder or a new one\n")


def test_the_folder_is_named_from_the_root_on(programs: Path) -> None:
    done = arm64(["make"], Path("here"), str(programs))
    told = "launch/arm64: FLOWSPEC_ARM64: expected a folder from / on, got 'here'\n"
    assert (done.returncode, done.stderr) == (2, told)
