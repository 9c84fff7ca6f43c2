"""Commands that run in this process, against clusters that stay open for all tests of the folder."""

from __future__ import annotations

import contextlib
import io
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from flowspec.cli import answer
from flowspec.cli.main import main
from flowspec.llm import LLM
from flowspec.model.files import ModelFiles
from flowspec.runtime import local
from tests.cli.running import Ended, Run

Opened = tuple[contextlib.ExitStack, dict[Any, LLM]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Runs a command, which must end with this status."""

    def run(*arguments: object, status: int = 0, stdin: str = "") -> Ended:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        try:
            found: object = main([str(each) for each in arguments])
        except SystemExit as end:  # how argparse ends
            found = end.code
        ended = Ended(*capsys.readouterr())
        assert found == status, f"{arguments}: status {found}\n{ended.out}\n{ended.err}"
        return ended

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The one line that a command says of wrong input, at status 2; fails when it starts a process."""

    def start(*args: object, **options: object) -> NoReturn:
        raise AssertionError(f"a process was started: {args}")

    def refused(*arguments: object) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", start)
            patch.setattr(local, "start_pool", start)
            ended = run(*arguments, status=2)
        assert ended.out == ""
        (line,) = ended.told
        assert line.startswith("flowspec"), line
        return line

    return refused


@pytest.fixture(scope="session")
def opened() -> Iterator[Opened]:
    with contextlib.ExitStack() as stack:
        yield stack, {}


@pytest.fixture
def shared(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command finds the cluster that another one with such flags has left open."""
    stack, llms = opened

    def open_shared(
        options: Any, decoding: Any, recovery: Any, progress: Any, check: Any, *, needs_text: bool
    ) -> Any:
        key = repr((options, decoding, needs_text))
        check(ModelFiles(options.model))
        if key not in llms:
            llms[key] = stack.enter_context(
                LLM.opened(options, decoding, recovery, progress, needs_text=needs_text)
            )
        return contextlib.nullcontext(llms[key])

    monkeypatch.setattr(answer, "LLM", SimpleNamespace(opened=open_shared))
