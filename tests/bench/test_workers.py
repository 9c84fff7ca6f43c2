"""Worker processes end with what they were for."""

from __future__ import annotations

import os
import signal
import sys
import time

import psutil
import pytest

from flowspec.bench.workers import open_pool
from flowspec.errors import FlowSpecError
from tests import warm

WORK = """
import sys
from flowspec.bench.workers import interrupted_later, open_pool
from tests.bench.test_workers import nap
if __name__ == "__main__":
    with open_pool(1) as pool:
        with interrupted_later():
            naps = pool.map(nap, [0.0] + [600.0] * 9)
        print(next(naps), flush=True)
        list(naps)
"""


def nap(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def leave(status: int) -> None:
    os._exit(status)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_they_end_with_their_parent_though_much_is_left_to_do(number: signal.Signals) -> None:
    with warm.Popen([sys.executable, "-c", WORK], stdout=-1, stderr=-3, text=True) as parent:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(number)
        assert parent.wait(60) != 0
        worker.wait(60)


def test_one_that_ends_early_is_told_in_a_line() -> None:
    with pytest.raises(FlowSpecError, match="a worker process ended"), open_pool(1) as pool:
        pool.submit(leave, 3).result()
