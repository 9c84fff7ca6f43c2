"""What a command loads before it has work: a board's daemon may wait for days, in the memory that it
takes."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "matplotlib", "asyncio", "rich", "prompt_toolkit")
HELP = """
import contextlib
from flowspec.cli.main import main
for words in ([], ["--help"], ["help", "keygen"], ["--version"], ["daemon", "--help"], ["keygen", "--help"]):
    with contextlib.suppress(SystemExit):
        main(words)
"""
WAITING = """
from flowspec.runtime.daemon import Daemon
from flowspec.runtime.machine import Machine
Daemon(host="127.0.0.1", port=0, name="x", machine=Machine(device="cpu"), insecure=True)
"""


@pytest.mark.parametrize(
    ("code", "has", "lacks"),
    [
        (HELP, "cli.parser", ["bench", "sim", "draft", "serve", "watch"]),
        (
            WAITING,
            "core.cluster.daemon",
            ["bench", "sim", "serve", "watch", "cli", "core.head", "core.methods", "draft.kinds"],
        ),
    ],
    ids=["help", "daemon"],
)
def test_what_does_the_work_is_not_loaded_before(code: str, has: str, lacks: list[str]) -> None:
    command = [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    names = set(done.stdout.splitlines()[-1].split())
    assert f"flowspec.{has}" in names
    for package in (*(f"flowspec.{each}" for each in lacks), *HEAVY):
        assert [name for name in names if f"{name}.".startswith(f"{package}.")] == []
