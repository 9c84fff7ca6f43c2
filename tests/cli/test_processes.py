"""A command as a process: what it loads before it has work, for a board's daemon may wait for days, and how
it ends where its output takes no more, or Ctrl-C comes while it is still being imported: in one line.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from flowspec.cli.main import main
from tests import warm
from tests.cli.running import FLOWSPEC

PLAN = ["plan", "--shape", "llama-2-7b", "--devices", "4x jetson-orin-nano"]
FULL = Path("/dev/full")
"""As a file on a disk that has no room."""
INTERRUPTED_AT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from flowspec.cli.main import main
sys.exit(main(sys.argv[2:]))
"""
"""The command, to which Ctrl-C comes as a module is looked for."""


@pytest.mark.parametrize("command", [PLAN, ["generate", "--local", "1", "Hi"]], ids=lambda each: each[0])
def test_an_output_that_is_full_is_told_in_one_line(command: list[str]) -> None:
    with FULL.open("w") as full:
        done = warm.run([*FLOWSPEC, *command], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    told = [line for line in done.stderr.splitlines() if line]
    assert told[-1] == "flowspec: the output cannot be written: No space left on device"
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr
    assert done.returncode == 1


@pytest.mark.parametrize(("hard", "asked"), [(64, 64), (256, 256), (9999, 4096), (-1, 4096)])
def test_enough_files_may_be_open_or_it_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], hard: int, asked: int
) -> None:
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (60, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: made.append(limits))
    assert (main(["plan", "--devices", "none"]), made) == (1 if hard == 64 else 2, [(asked, hard)])
    assert ("needs 256 open files and may have 64" in capsys.readouterr().err) == (hard == 64)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_an_output_that_nobody_reads_any_more_is_no_error_of_ours(stream: str) -> None:
    command = [*FLOWSPEC, *PLAN] if stream == "stdout" else [*FLOWSPEC, "plan", "--devices", "none"]
    with warm.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        getattr(process, stream).close()
        left = process.stdout if stream == "stderr" else process.stderr
        assert left is not None
        assert left.read() == b""
    assert process.returncode == 1


@pytest.mark.parametrize("module", ["argparse", "zmq"])
def test_ctrl_c_during_imports_is_told_in_one_line(module: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED_AT, module, *PLAN]  # cold: all is imported elsewhere
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "flowspec: interrupted\n")


ENDS = """
import atexit, sys, threading, time, weakref
from flowspec.cli.main import main

class Cycle:
    def __init__(self):
        self.self = self
    def __del__(self):
        print("freed one by one", flush=True)

class Closed:
    pass

sys.argv = ["flowspec", *sys.argv[1:]]
status = main()
cycle, closed = Cycle(), Closed()
weakref.finalize(closed, print, "closed")
atexit.register(print, "called at the end")
threading.Thread(target=lambda: (time.sleep(0.2), print("a thread has ended"))).start()
sys.exit(status)
"""
"""The command, with all that a program may leave to do at its end."""


def test_a_process_does_what_was_left_for_the_end_and_frees_nothing_one_by_one() -> None:
    command = [sys.executable, "-c", ENDS, "keygen"]  # cold: warm ones end otherwise
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stdout.splitlines()[-3:] == ["a thread has ended", "called at the end", "closed"]


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
            ["bench", "sim", "serve", "watch", "cli", "core.head", "core.methods", "draft.registry"],
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
