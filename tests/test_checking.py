"""`--check`: what a core says of itself is asked after every event, in a head and in a daemon."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest

from flowspec import checking
from flowspec.cli.main import main
from flowspec.core.cluster.daemon import DaemonCore
from flowspec.core.head.head import HeadCore
from flowspec.runtime.daemon import Daemon
from flowspec.runtime.machine import Machine


@dataclass
class Counting:
    """A core that is right up to its second event."""

    events: int

    def validate(self) -> None:
        if self.events >= 2:
            raise AssertionError(f"{self.events} events came\nand more")


def test_a_core_that_is_right_is_let_be_and_a_broken_one_is_told_with_its_state(
    caplog: pytest.LogCaptureFixture,
) -> None:
    checking.check(Counting(events=1), "an event")
    with (
        caplog.at_level(logging.CRITICAL),
        pytest.raises(checking.BrokenCoreError, match="a check failed: Counting after str") as raised,
    ):
        checking.check(Counting(events=2), "an event")
    assert "\n" not in str(raised.value)
    assert "2 events came" in caplog.text
    head = HeadCore(context=16, stage_count=2)
    assert "_needs={}" in checking.state_of(head), "of what is in it, too"
    assert checking.state_of(head, 50).endswith("characters)")


def test_a_head_whose_state_is_wrong_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(self: HeadCore) -> None:
        raise AssertionError("two answers have one turn")

    monkeypatch.setattr(HeadCore, "validate", wrong)
    monkeypatch.delenv(checking.VARIABLE, raising=False)
    asked = ["generate", "--local", "1", "--method", "ar", "--max-new-tokens", "2", "--raw", "Once"]
    assert main(asked) == 0, "nobody asks without the flag"
    capsys.readouterr()
    monkeypatch.setenv(checking.VARIABLE, "1")  # so that it is undone
    assert main([*asked, "--check"]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("flowspec generate:")]
    assert "a check failed: HeadCore after Submit: two answers have one turn" in line


def test_a_daemon_whose_state_is_wrong_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: DaemonCore, *, is_honest: bool = True) -> None:
        raise AssertionError("held, and by nobody")

    monkeypatch.setattr(DaemonCore, "validate", wrong)
    monkeypatch.setenv(checking.VARIABLE, "1")
    daemon = Daemon(host="127.0.0.1", port=0, name="checked", machine=Machine())
    daemon._wake.set()  # so that its first turn comes now
    told = "a check failed: DaemonCore after DaemonTick: held, and by nobody"
    with pytest.raises(checking.BrokenCoreError, match=told):
        daemon.run()
