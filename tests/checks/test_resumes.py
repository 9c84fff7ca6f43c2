"""Killing a head in the middle of an answer and going on: one real answer, and what is called wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from flowspec.errors import FlowSpecError
from flowspec.model.step_by_step import StepByStep
from tests.checks import resumes


def test_an_answer_that_is_not_step_by_step_decodings_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["--json", "--answers", "1", "--dtypes", "float32"]
    assert resumes.main(asked) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["answers"], found["resumed"], found["wrong"]) == ({"exact": 1}, 1, [])

    monkeypatch.setattr(StepByStep, "generate", lambda *given: (5, 6, 7))
    assert resumes.main(asked) == 1
    assert len(json.loads(capsys.readouterr().out)["wrong"]) == 1


def test_a_command_that_fails_is_told(tmp_path: Path) -> None:
    with pytest.raises(FlowSpecError, match="failed: no model"):
        resumes.killed([sys.executable, "-c", "exit('no model')"], tmp_path / "none", 1)


def test_a_command_that_ends_before_is_not_killed(tmp_path: Path) -> None:
    assert not resumes.killed([sys.executable, "-c", ""], tmp_path / "none", 1)


def test_a_command_is_killed_once_its_journal_has_so_many_lines(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    code = "import sys, time; open(sys.argv[1], 'w').write('{\"tokens\"\\n' * 2); time.sleep(600)"
    assert resumes.killed([sys.executable, "-c", code, str(journal)], journal, 2)
