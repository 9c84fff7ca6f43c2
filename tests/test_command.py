"""How a check's command ends."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Iterator

import pytest

from flowspec.interruption import INTERRUPTED
from tests.command import Parser, run_command


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_told_to_end_cleans_up(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    has_ended = False

    def work(args: argparse.Namespace) -> int:
        nonlocal has_ended
        try:
            os.kill(os.getpid(), number)
            signal.sigtimedwait([], 10)
        finally:
            has_ended = True
        return 0

    assert run_command(Parser("name", "What it is for."), work, []) == INTERRUPTED
    assert has_ended
    assert capsys.readouterr().err == "python -m name: interrupted\n"
