"""The long checks of hostile heads, devices and requests, in short: nothing of them harms anybody."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.checks import hostile
from lab.checks.hostile_requests import ATTEMPTS, outcome_of, tools, try_everything

SOME = ("a schema of 1 MB: 28,000 schemas in schemas", "schemas that contradict themselves")


def test_nobody_is_harmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # and back at the end
    attempts = list(hostile.try_everything(tmp_path, minutes=0.02, seed=1))
    assert len(attempts) == 7
    assert [each for each in attempts if not each.as_promised] == []


def test_each_gets_a_line_or_an_answer_and_nobody_waits(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    attempts = {name: ATTEMPTS[name] for name in SOME} | {"a name": [tools(["-"]), tools(["\u2028"])]}
    alone, *found, end = try_everything(tmp_path, attempts, lambda name: None)
    assert [each.name for each in found] == list(attempts)
    assert [each for each in (alone, *found, end) if not each.as_promised] == []
    assert "1 x tool_calls" in found[-1].outcome


@pytest.mark.parametrize(
    ("status", "line", "may_be"),
    [(400, "a line", True), (400, "two\nlines", False), (500, "a line", False), (400, "x" * 1000, False)],
)
def test_what_is_broken_is_said(status: int, line: str, may_be: bool) -> None:
    assert outcome_of(status, {"error": {"message": line}})[1] is may_be
