"""What a command loads before it has work: a board's daemon may wait for days, in the memory that it
takes."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "matplotlib", "asyncio", "rich", "prompt_toolkit")


def loaded(code: str) -> set[str]:
    """The modules of a new process after some code, the last line of its output."""
    code = f"import contextlib, sys\nwith contextlib.suppress(SystemExit):\n    {code}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def under(names: set[str], package: str) -> set[str]:
    return {name for name in names if name == package or name.startswith(f"{package}.")}


@pytest.mark.parametrize(
    "flags",
    [[], ["--help"], ["help", "keygen"], ["--version"], ["daemon", "--help"], ["keygen", "--help"]],
    ids=" ".join,
)
def test_help_loads_the_flags_and_nothing_that_does_the_work(flags: list[str]) -> None:
    names = loaded(f"from flowspec.cli.main import main; main({flags!r})")
    for package in ("bench", "sim", "draft", "serve", "watch"):
        assert under(names, f"flowspec.{package}") == set()
    for heavy in HEAVY:
        assert under(names, heavy) == set()


def test_a_daemon_that_waits_has_loaded_no_harness_no_simulator_and_no_torch() -> None:
    names = loaded(
        "from flowspec.runtime.daemon import Daemon; from flowspec.runtime.machine import Machine; "
        "Daemon(host='127.0.0.1', port=0, name='x', machine=Machine(device='cpu'), insecure=True)"
    )
    assert "flowspec.core.cluster.daemon" in names
    for package in ("bench", "sim", "serve", "watch", "cli", "core.head", "core.methods", "draft.kinds"):
        assert under(names, f"flowspec.{package}") == set()
    for heavy in HEAVY:
        assert under(names, heavy) == set()
