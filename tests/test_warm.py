"""Processes that start warm are as `subprocess` makes them: children with streams, a folder, an environment,
signals and a status."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import warm

PYTHON = [sys.executable, "-c"]
SHOWN = """
import json, logging, os, sys
print(json.dumps([os.getppid(), os.getcwd(), dict(os.environ), sys.argv, sys.stdin.read(),
    os.getsid(0) == os.getpid(), sorted(map(int, os.listdir("/proc/self/fd"))),
    logging.getLogger().handlers]))
"""
SLEEPS = """
import time
try:
    print("here", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("heard")
"""
LOCAL = """
import os, psutil, threading
from flowspec.runtime.local import LocalCluster
threading.Thread(target=threading.Event().wait, daemon=True).start()
with LocalCluster(2) as cluster:
    cluster.wait()
    (pool,) = psutil.Process().children()
    print(os.getpid(), len(pool.children()), *pool.cmdline())
"""
"""With a thread beside, which no fork copies."""


def test_a_process_has_what_it_is_given_and_nothing_else(tmp_path: Path) -> None:
    environment = {"FOR": "a test", **warm.read_when_imported(os.environ)}
    for new_session in (True, False):
        command = [*PYTHON, SHOWN, "ü", b"\xff"]
        place: dict[str, Any] = {"cwd": tmp_path, "env": environment, "start_new_session": new_session}
        done = warm.run(command, input="said\n", capture_output=True, text=True, check=True, **place)
        parent, folder, found, arguments, said, leads, descriptors, handlers = json.loads(done.stdout)
        assert (parent, folder, found) == (os.getpid(), str(tmp_path), environment)
        assert (arguments, said, leads) == (["-c", "ü", "\udcff"], "said\n", new_session)
        assert (len(descriptors), descriptors[:3]) == (4, [0, 1, 2]), "the folder that is listed, too"
        assert handlers == []


def test_a_process_ends_with_its_own_status() -> None:
    for code, status in (
        ("pass", 0),
        ("import sys; sys.exit(3)", 3),
        ("raise ValueError('that')", 1),
        ("import os; os._exit(4)", 4),
    ):
        done = warm.run([*PYTHON, code], capture_output=True, text=True)
        assert done.returncode == status
        assert ("ValueError: that" in done.stderr) == ("that" in code)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_process_takes_signals_as_a_fresh_one(number: signal.Signals) -> None:
    with warm.Popen([*PYTHON, SLEEPS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.send_signal(number)
        rest = process.stdout.read()
    assert (process.returncode, rest) == ((0, "heard\n") if number == signal.SIGINT else (-number, ""))


def test_the_local_daemons_of_a_warm_command_are_its_own() -> None:
    done = warm.run([*PYTHON, LOCAL], capture_output=True, text=True, check=True)
    pid, daemons, *command = done.stdout.split()
    assert not psutil.pid_exists(int(pid))
    assert (daemons, "tests.warm_server" in command) == ("2", True)


def test_the_server_ends_with_who_asks_it() -> None:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = "from tests import warm_server\nwarm_server._preload = lambda: None\nwarm_server.main()"
    with near:
        with far:
            process = subprocess.Popen([*PYTHON, code, str(far.fileno())], pass_fds=[far.fileno()])
        assert near.recv(32) == warm.READY
    assert process.wait(60) == 0
