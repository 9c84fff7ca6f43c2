"""How long work tells how far it is."""

from __future__ import annotations

import pytest

from flowspec.bench import console
from flowspec.bench.console import progress


def test_without_a_terminal_progress_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter((0.0, 59.0, 60.0, 61.0, 130.0))
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    with progress("starting", 4) as step:
        for name in ("first", "second", "third", "fourth"):
            step(name)
    assert capsys.readouterr().err.splitlines() == [
        "second (2 of 4, about 60 s left)",
        "fourth (4 of 4, about 0 s left)",
    ]


def test_several_at_once_and_what_is_done_already_count_and_a_name_stays(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "LINE_EVERY_S", 0.0)
    clock = iter((0.0, 1.0, 180.0, 0.0, 1.0))
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    with progress("starting", 9, 4) as step:
        step("first", 0)
        step("", 3)
    assert capsys.readouterr().err.splitlines() == [
        "first (4 of 9)",
        "first (7 of 9, about 2 min left)",
    ], "the rate is of this run, not of what was done before"
    with progress("starting", 9, quiet=True) as step:
        step("first")
    assert capsys.readouterr().err == ""
