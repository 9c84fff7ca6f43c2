"""The command that disturbs real daemons: what it refuses and what it sums up.
`tests/runtime/test_survival.py` disturbs some."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from flowspec.model.files import bundled_folder
from tests.checks import rigs
from tests.checks.memory_group import MemoryGroup
from tests.checks.pauses import FORMED, LOADED, LOST, TOKEN, TOLD, Mark, Parts, PauseWatch, parts_of
from tests.checks.survive import Run, main, table

BUNDLED_FOLDER = str(bundled_folder("target"))
RUN = Run(
    fault="kill",
    moment=0,
    victim="local-0",
    verdict="exact",
    answers=1,
    recoveries=1,
    noticed_s=0.1,
    reached_s=0.1,
    loaded_s=0.5,
    ready_s=0.1,
    token_s=0.2,
    pause_s=1.0,
    longest_s=1.0,
    after_s=0.1,
    notes=(),
)


def test_a_fault_that_nobody_knows_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--faults", "kill,burn"]) == 2
    assert "expected some of kill, stop, drafter, suspend, sever, loss" in capsys.readouterr().err


def test_drafters_are_those_of_the_bundled_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--faults", "drafter", "--model", BUNDLED_FOLDER, "--tokens", "1", "--moments", "1"]) == 2
    assert "--faults drafter: expected the bundled model" in capsys.readouterr().err


def test_links_are_severed_by_root_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["--faults", "sever", "--tokens", "1"]) == 2
    assert "expected root" in capsys.readouterr().err


def test_memory_is_taken_where_there_are_control_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rigs, "MemoryGroup", partial(MemoryGroup, root=tmp_path))
    assert main(["--faults", "memory", "--tokens", "1"]) == 2
    assert "expected control groups for memory below" in capsys.readouterr().err


def test_a_table_takes_means_over_the_answers_that_lost_something() -> None:
    gone = replace(RUN, fault="drafter", recoveries=0, noticed_s=0.3, pause_s=0.0, longest_s=0.2)
    wrong = replace(RUN, fault="frames", wrong="no note names the link")
    runs = [
        RUN,
        replace(RUN, noticed_s=0.3, pause_s=1.2),
        replace(RUN, recoveries=0, noticed_s=0.0),
        gone,
        wrong,
    ]
    columns, rows = table(runs)
    kill, drafter, frames = (dict(zip(columns, row, strict=True)) for row in rows)
    assert (kill["fault"], kill["right"], kill["losses"]) == ("kill", "3 of 3", 2)
    assert (kill["noticed"], kill["loaded"], kill["pause"], kill["most pause"]) == (
        "0.20",
        "0.50",
        "1.10",
        "1.20",
    )
    assert (drafter["losses"], drafter["noticed"], drafter["pause"], drafter["longest"]) == (
        0,
        "0.30",
        "0.00",
        "0.20",
    )
    assert frames["right"] == "0 of 1"


def test_seconds_by_part_follow_each_other() -> None:
    marks = [Mark(1.0, TOKEN), Mark(2.0, TOKEN), Mark(5.0, LOST), Mark(5.5, TOLD), Mark(6.0, TOLD)]
    marks += [Mark(6.2, LOADED), Mark(7.0, LOADED), Mark(7.25, FORMED), Mark(8.0, TOKEN), Mark(8.5, TOKEN)]
    parts = parts_of(reversed(marks), since_s=1.5)
    assert (parts.noticed_s, parts.reached_s, parts.loaded_s, parts.ready_s, parts.token_s) == (
        3.0,
        1.0,
        1.0,
        0.25,
        0.75,
    )
    assert (parts.pauses, parts.pause_s, parts.longest_s) == (1, 6.0, 6.0)
    assert parts_of(marks, since_s=3.0).noticed_s == 2.0, "from the fault, if no token came after it"


def test_of_two_losses_in_a_row_the_second_is_noticed_from_when_all_was_there() -> None:
    marks = [Mark(1.0, LOST), Mark(2.0, FORMED), Mark(7.0, LOST), Mark(8.0, FORMED), Mark(9.0, TOKEN)]
    parts = parts_of(marks, since_s=0.0)
    assert (parts.pauses, parts.noticed_s, parts.ready_s, parts.token_s) == (2, 6.0, 2.0, 1.0), "without logs"
    assert parts.pause_s == parts.longest_s == 9.0
    slow = [Mark(1.0, TOKEN), Mark(4.0, TOKEN)]
    assert parts_of(slow, since_s=0.0) == Parts(longest_s=3.0), "a slow answer is no loss"


def test_what_daemons_log_is_marked_as_it_comes(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("12:00:00 INFO    head x assigns layers 0 to 1\n")
    with PauseWatch(lambda: (log, tmp_path / "none")) as watch, log.open("a") as file:
        file.write("12:00:01 INFO    head x assigns layers 2 to 3\n12:00:02 INFO    ready: kept wei")
        file.flush()
        while not watch.marks:
            time.sleep(0.001)
        assert [mark.what for mark in watch.marks] == [TOLD], "the other line is not whole"
        file.write("ghts 1 MiB\n")
        file.flush()
    assert [mark.what for mark in watch.marks] == [TOLD, LOADED]
    assert watch.is_over(LOADED, 0.0) is False
    watch.token(time.monotonic())
    assert watch.is_over(LOADED, 0.0)
    assert not watch.is_over(LOADED, None)


@pytest.mark.parametrize("version", [1, 2])
def test_a_group_takes_memory_away_until_the_kernel_has_ended_a_process(tmp_path: Path, version: int) -> None:
    """On files as Linux has them; on the kernel's own `survive --faults memory` tries it."""
    limit, usage, events = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control")
        if version == 1
        else ("memory.max", "memory.current", "memory.events")
    )
    if version == 1:
        (tmp_path / "memory").mkdir()
        (tmp_path / "memory" / limit).touch()
    else:
        (tmp_path / "cgroup.controllers").write_text("cpu memory\n")
    group = MemoryGroup("x", tmp_path)
    (group.folder / usage).write_text(f"{100 << 20}\n")
    (group.folder / events).write_text("under_oom 0\noom_kill 0\n")
    group.add(17)
    assert (group.folder / "cgroup.procs").read_text() == "17"
    group.squeeze()
    while not (group.folder / limit).exists():
        time.sleep(0.001)
    (group.folder / events).write_text("under_oom 0\noom_kill 1\n")
    group.ease()
    assert group.killed == 1
    assert (group.folder / limit).read_text() == ("-1" if version == 1 else "max")
