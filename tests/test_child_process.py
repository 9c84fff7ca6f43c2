"""Children of FlowSpec find its modules wherever they are started."""

from __future__ import annotations

import subprocess
from pathlib import Path

from flowspec.child_process import python_module


def test_nothing_of_the_working_folder_is_imported(tmp_path: Path) -> None:
    """Not even what starts the module (Python 3.10 looks there first), and no folder with the package's
    name."""
    (tmp_path / "flowspec").mkdir()
    for name in ("runpy", "importlib", "contextlib", "site", "os", "flowspec/__init__"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} of the working folder')")
    command = python_module("flowspec.cli.terminal", "argument")
    done = subprocess.run(
        command, cwd=tmp_path, input="a\n", capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.returncode) == ("a\n", 0), done.stderr
