"""Real daemons of a cluster file whose layers the planner shares out: when one is lost it plans again, with
the cluster's keys."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from flowspec.core.protocol.messages import Sampling
from flowspec.model.files import ModelFiles
from flowspec.model.reference import Reference
from flowspec.runtime import timeouts
from flowspec.runtime.decoding import Decoding
from flowspec.runtime.local import LocalCluster, LocalDaemon
from flowspec.runtime.security.cluster_keys import keys_folder
from flowspec.runtime.security.keyfiles import make_keys
from flowspec.runtime.session import ClusterOptions, RecoveryOptions, open_session
from tests.runtime.clusters import PROMPT, submit, tokens_of, wait_until

COUNT = 60
BOARD = """
[memory]
gb = 8
gb_per_s = {rate}
efficiency = 1.0
[compute]
float32 = {rate}
efficiency = 1.0
"""
DECODING = Decoding(method="ar")


def cluster_file(folder: Path, daemons: list[LocalDaemon], rates: dict[str, float]) -> Path:
    """A cluster file with a declared board for each device, and one link for all."""
    text = 'links = ["10000/0.05"]\n'
    for daemon in daemons:
        (folder / f"{daemon.name}.toml").write_text(BOARD.format(rate=rates[daemon.name]))
        text += f'[[device]]\nname = "{daemon.name}"\naddress = "{daemon.address}"\n'
        text += f'profile = "{daemon.name}.toml"\n'
    path = folder / "cluster.toml"
    path.write_text(text)
    return path


def test_a_device_that_stood_by_takes_the_place_of_a_lost_one_and_gives_it_back(
    tmp_path: Path, folder: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keys are the cluster file's: those of the survey, of both pipelines, and of the question whether
    the lost one is back."""
    for name, seconds in (("SILENT_S", 2.0), ("PROBE_EVERY_S", 0.5), ("BACK_S", 0.5)):
        monkeypatch.setattr(timeouts, name, seconds)
    keys = keys_folder(tmp_path / "cluster.toml")
    make_keys(keys, ["head"], [f"local-{index}" for index in range(3)], force=False)
    expected = reference.generate(PROMPT, Sampling(), COUNT, frozenset())
    notes: list[str] = []
    recovery_options = RecoveryOptions(on_note=notes.append, wait_s=60.0)
    with LocalCluster(3, family="llama", log_level="CRITICAL", keys=keys) as started:
        daemons = started.wait()
        path = cluster_file(tmp_path, daemons, {"local-0": 0.001, "local-1": 1.0, "local-2": 0.1})
        options = ClusterOptions(model=str(folder), dtype="float32", cluster=path, context=300)
        with open_session(
            options, DECODING, lambda text, share: None, recovery_options=recovery_options
        ) as session:
            head = session.head
            assert [stage.plan.name for stage in head.stages] == ["local-1"]
            answer = submit(head, count=COUNT)
            found = list(next(iter(answer)).tokens)
            os.kill(daemons[1].pid, signal.SIGSTOP)
            try:
                assert found + tokens_of(answer) == expected
                assert [stage.plan.name for stage in head.stages] == ["local-2"]
            finally:
                os.kill(daemons[1].pid, signal.SIGCONT)
            wait_until(lambda: "device local-1 is back" in notes, "the device is taken in again")
            assert tokens_of(submit(head, count=COUNT)) == expected
            assert [stage.plan.name for stage in head.stages] == ["local-1"]
            assert head.plan.layer_count == ModelFiles(str(folder)).config().num_hidden_layers
