"""The long check of hostile heads and devices, in short: nothing of it harms anybody."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.checks.hostile import try_everything


def test_nobody_is_harmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # and back at the end
    attempts = list(try_everything(tmp_path, minutes=0.02, seed=1))
    assert len(attempts) == 7
    assert [each for each in attempts if not each.as_promised] == []
