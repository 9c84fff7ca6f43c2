"""Runs of tests that go on where they were ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.scripts import ROOT

TESTS = """
import pathlib, pytest

@pytest.mark.parametrize("number", range(6))
def test_each(number):
    assert number != 3 or pathlib.Path("mended").exists()

def test_skipped():
    pytest.skip("not here")

@pytest.fixture
def broken():
    yield
    assert pathlib.Path("mended").exists()

def test_its_end(broken):
    pass
"""


def run(folder: Path, *flags: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-p", "tests.arm64.resumed", "--resumed", "passed", *flags]
    ended = subprocess.run(
        [*command, "-c", "/dev/null", "--rootdir", ".", "test_some.py"],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return ended.returncode, ended.stdout.splitlines()[-1]


@pytest.mark.parametrize("flags", [(), ("-n", "2")], ids=["alone", "with workers"])
def test_what_passed_is_not_run_again(tmp_path: Path, flags: tuple[str, ...]) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    status, line = run(tmp_path, *flags)
    assert status == 1
    assert "1 failed, 6 passed, 1 skipped, 1 error" in line
    assert len((tmp_path / "passed").read_text().splitlines()) == 6
    (tmp_path / "mended").touch()
    status, line = run(tmp_path, *flags)
    assert status == 0
    assert "2 passed" in line
    status, line = run(tmp_path, *flags)
    assert (status, "passed" in line) == (0, False), "nothing is left"
