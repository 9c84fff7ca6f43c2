"""Errors that nobody foresaw in a daemon's compute thread.

The head gets one line, the daemon's log the traceback, and the next head is served.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowspec.core.methods import make_method
from flowspec.draft.language import LanguageModelDrafter
from flowspec.errors import ClusterError
from flowspec.model.reference import Reference
from flowspec.model.slice import Slice
from flowspec.runtime import loading
from flowspec.runtime.head import Head
from flowspec.runtime.local import LocalDaemon
from tests.daemons import DaemonProcess
from tests.runtime.clusters import (
    drafter_for,
    listening,
    plain,
    plan_for,
    submit,
    surviving,
    tokens_of,
    wait_until,
)

Start = Callable[..., LocalDaemon]
COUNT = 40
WHAT_TO_DO = "see the daemon's log there, and report it"


def break_once(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, after: int = 0) -> Callable[[], bool]:
    """Has a function fail with an odd error at one of its calls; what is returned tells whether it has."""
    plain, calls, lock = getattr(place, name), 0, threading.Lock()

    def broken(*args: Any, **others: Any) -> Any:
        nonlocal calls
        with lock:
            calls += 1
            number = calls
        if number == after + 1:
            raise KeyError("odd\nand on a second line")
        return plain(*args, **others)

    monkeypatch.setattr(place, name, broken)
    return lambda: calls > after


def exact(head: Head, reference: Reference) -> None:
    assert tokens_of(submit(head, count=COUNT)) == plain(reference, COUNT)


def logged(caplog: pytest.LogCaptureFixture) -> str:
    """What the daemon wrote about it, with the traceback."""
    return "".join(record.exc_text or "" for record in caplog.records)


def test_while_a_slice_is_loaded(
    alone: Start,
    folder: Path,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    daemon = alone()
    break_once(monkeypatch, loading, "check_memory")
    with pytest.raises(ClusterError) as caught:
        Head(plan_for(folder, [daemon]))
    what = "unexpected error while loading layers 0 to 7 in float32: KeyError: 'odd"
    assert str(caught.value).startswith(f"device alone at {daemon.address}: {what}")
    assert str(caught.value).endswith(WHAT_TO_DO)
    assert "\n" not in str(caught.value)
    assert "in _load" in logged(caplog)
    with Head(plan_for(folder, [daemon])) as head:
        exact(head, reference)


def test_while_layers_run_an_answer_goes_on_without_the_stage_that_met_it(
    alone: Start,
    folder: Path,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plan, notes = plan_for(folder, [alone(name=name) for name in ("one", "two")]), list[str]()
    has_failed = break_once(monkeypatch, Slice, "run", after=20)
    with Head(plan, recovery=surviving(plan, notes)) as head:
        exact(head, reference)
    assert has_failed()
    assert "in _run_layers" in logged(caplog)
    assert notes[0].partition(" (")[0] in ("device one is lost", "device two is lost")
    assert "unexpected error while running layers: KeyError" in notes[0]
    assert notes[0].endswith(f"{WHAT_TO_DO})")


@pytest.mark.usefixtures("hasty")
def test_answers_go_on_without_the_drafter_that_met_it_and_it_comes_back(
    alone: Start, folder: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, notes = plan_for(folder, [alone()]), list[str]()
    break_once(monkeypatch, LanguageModelDrafter, "draft", after=3)
    drafters, recovery = [drafter_for(folder, alone(name="beside"))], surviving(plan, notes)
    with Head(plan, method=make_method("continuous"), drafters=drafters, recovery=recovery) as head:
        exact(head, reference)
        name = f"drafter {folder.name} on beside"
        # No token waits for a drafter: the answer can end before the head has heard of the loss.
        wait_until(lambda: bool(notes), "the drafter is lost")
        assert notes[0].startswith(f"{name} is lost (unexpected error while drafting: KeyError")
        wait_until(lambda: f"{name} is back" in notes, "the drafter is back")
        exact(head, reference)


def test_a_broken_process_leaves_in_its_log_where_it_was(folder: Path) -> None:
    """What no Python code can catch: SIGILL of a kernel that this processor lacks, torch's abort."""
    daemon = DaemonProcess("broken")
    head = Head(plan_for(folder, [listening(daemon)]))
    os.kill(daemon.process.pid, signal.SIGILL)
    assert daemon.process.wait(30) == -signal.SIGILL
    with (
        head,
        pytest.raises(
            ClusterError, match=r"broken .*was lost.*: its connection closed; see the daemon's log there"
        ),
    ):
        tokens_of(submit(head))
    daemon.stop()
    text = "".join(daemon.lines)
    assert "Fatal Python error: Illegal instruction" in text
    assert "in _turn" in text
