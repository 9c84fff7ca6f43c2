"""An interruption is heard wherever it comes."""

from __future__ import annotations

import subprocess
import sys

import pytest

DESTRUCTOR = """
import os, signal, sys, time
from flowspec.interruption import hear_signals

hear_signals()


class Destroyed:
    def __del__(self):
        os.kill(os.getpid(), signal.{signal})
        for _ in range(1000):
            pass  # where the handler runs


Destroyed()
try:
    time.sleep(1000)
except KeyboardInterrupt:
    sys.exit(7)
"""
DEFECT = """
from flowspec.interruption import hear_signals

hear_signals()


class Destroyed:
    def __del__(self):
        raise KeyError("a defect")


Destroyed()
"""


def ended(source: str) -> tuple[int, str]:
    found = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60)
    return found.returncode, found.stderr


@pytest.mark.parametrize("signal", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_one_in_the_middle_of_a_destructor_is_not_lost(signal: str) -> None:
    assert ended(DESTRUCTOR.format(signal=signal)) == (7, "")


def test_what_else_is_dropped_there_is_told_as_ever() -> None:
    status, told = ended(DEFECT)
    assert status == 0
    assert "Exception ignored in" in told
    assert "KeyError: 'a defect'" in told
