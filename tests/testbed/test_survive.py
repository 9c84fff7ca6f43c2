"""The command that disturbs real daemons: what it refuses and what it sums up; `tests/runtime/test_survival.py` disturbs some."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from flowspec.model.files import bundled_folder
from flowspec.testbed.survive import Run, main, summary

BUNDLED_FOLDER = str(bundled_folder("target"))
RUN = Run(fault="kill", moment=0, victim="local-0", verdict="exact", recoveries=1, noticed_s=0.1, load_s=0.5, prefill_s=0.25, pause_s=0.85)


def test_a_fault_that_nobody_knows_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--faults", "kill,burn"]) == 2
    assert "expected some of kill, stop, drafter, sever, got kill,burn" in capsys.readouterr().err


def test_drafters_are_those_of_the_bundled_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--faults", "drafter", "--model", BUNDLED_FOLDER, "--tokens", "1", "--moments", "1"]) == 2
    assert "--faults drafter: expected the bundled model" in capsys.readouterr().err


def test_links_are_severed_by_root_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["--faults", "sever", "--tokens", "1"]) == 2
    assert "expected root" in capsys.readouterr().err


def test_a_summary_takes_means_over_the_answers_that_lost_a_device() -> None:
    runs = [RUN, replace(RUN, noticed_s=0.3), replace(RUN, recoveries=0, noticed_s=0.0), replace(RUN, fault="stop")]
    assert summary(runs, "kill") == (
        "kill: {'exact': 3}; noticed after 0.20 s (most 0.30), loading 0.50 s (most 0.50), "
        "prefill 0.25 s (most 0.25), pause 0.85 s (most 0.85)"
    )
    struck = replace(RUN, fault="drafter", recoveries=0, load_s=0.0, prefill_s=0.0)
    assert summary([struck], "drafter").startswith("drafter: {'exact': 1}; noticed after 0.10 s"), "a lost drafter recovers nothing"
    assert summary([replace(RUN, recoveries=0)], "kill") == "kill: {'exact': 1}, none of the answers lost a device"
