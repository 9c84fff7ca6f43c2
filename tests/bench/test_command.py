"""What the testbed's commands share: how they tell their progress, and how they end."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Iterator

import pytest

from flowspec.bench import command
from flowspec.bench.console import progress
from flowspec.interruption import INTERRUPTED
from tests.command import Parser, run_command


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_without_a_terminal_progress_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter((0.0, 59.0, 60.0, 60.0, 61.0, 130.0, 130.0))
    monkeypatch.setattr(command.time, "monotonic", lambda: next(clock))
    with progress("starting", 4) as step:
        for name in ("first", "second", "third", "fourth"):
            step(name)
    assert capsys.readouterr().err.splitlines() == ["second (2 of 4)", "fourth (4 of 4)"]


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
    assert capsys.readouterr().err == "python -m flowspec.testbed.name: interrupted\n"
