"""`launch/arm64` as far as nothing is emulated: what it says to wrong input, and what it never touches."""

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


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """All programs that there are; `id` says that we are root."""
    place = tmp_path / "programs"
    program(place / "id", "#!/bin/bash\necho 0\n")
    for name in ("bash", "env", "dirname", "cat", "rm"):
        found = shutil.which(name)
        assert found is not None
        (place / name).symlink_to(found)
    return place


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
