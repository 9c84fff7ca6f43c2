"""A daemon whose kernels are broken, as a real process: noticed before a token is drawn, and answers are
right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flowspec.core.protocol.messages import Sampling
from flowspec.errors import FlowSpecError
from flowspec.model.files import ModelFiles
from flowspec.model.step_by_step import StepByStep
from flowspec.runtime.head import Head
from flowspec.runtime.local import LocalDaemon
from tests.caches import BUILT, make_cache
from tests.daemons import DaemonProcess, daemon_process
from tests.runtime.clusters import PROMPT, plan_for, submit, tokens_of


def asked(folder: Path, daemon: DaemonProcess) -> list[int]:
    """An answer in int8."""
    listening = LocalDaemon(
        name=daemon.name, port=int(daemon.address.rpartition(":")[2]), pid=daemon.process.pid
    )
    with Head(replace(plan_for(folder, [listening]), dtype="int8")) as head:
        return tokens_of(submit(head, sampling=Sampling(temperature=1.0, seed=9)))


@pytest.mark.parametrize(
    ("how", "answers", "told"),
    [
        (
            "wrong",
            2,
            "int8 with torch .*: plain is used, for wrong computes something else than it should for 32 rows",
        ),
        (
            "sigill,hang",
            1,
            "plain is used, for sigill ran an instruction that this processor does not have; hang gave no "
            "sign of life for 10 s",
        ),
    ],
)
def test_answers_are_right_where_kernels_are_broken(
    how: str, answers: int, told: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", make_cache(tmp_path / "cache", BUILT))
    expected = StepByStep.load(ModelFiles(str(folder)), "int8").generate(
        PROMPT, Sampling(temperature=1.0, seed=9), 20, frozenset()
    )
    with daemon_process("broken", run=("-m", "tests.model.broken_kernels", how)) as daemon:
        for _ in range(answers):
            assert asked(folder, daemon) == list(expected)
        daemon.stop()
        warnings = [line for line in daemon.lines if "WARNING" in line]
        assert [line for line in warnings if told.partition(" .*")[0] in line] == warnings[:1], daemon.lines
        assert len(warnings) == 1, "not again with each assignment"


def test_where_none_is_right_the_head_says_so_and_the_daemon_serves_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", make_cache(tmp_path / "cache", BUILT))
    with daemon_process("broken", run=("-m", "tests.model.broken_kernels", "wrong,only")) as daemon:
        for _ in range(2):
            with pytest.raises(
                FlowSpecError,
                match=r"broken .*int8 does not run right on cpu .*: wrong computes .*; use another --dtype",
            ):
                asked(folder, daemon)
