"""`flowspec profile` on this machine, offline: its file is one that planning reads. No time is asserted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from flowspec.bench.profile import QUICK
from flowspec.cli import profile
from flowspec.cli.profile import measured_machine
from flowspec.errors import InputError
from flowspec.model.accelerator import Accelerator
from flowspec.plan.profile import read_profile
from flowspec.runtime.local import LocalCluster, LocalDaemon
from tests.cli.running import Run


@pytest.fixture
def daemon() -> Iterator[LocalDaemon]:
    with LocalCluster(1) as cluster:
        yield cluster.wait()[0]


def test_a_quick_profile_reads_back_with_its_links(
    tmp_path: Path, daemon: LocalDaemon, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = replace(QUICK, widths=((512, 1), (256, 3)), rounds=3)
    monkeypatch.setattr(profile, "QUICK", small)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.toml").write_text(
        f'[[device]]\nname = "desk \\"1\\""\naddress = "{daemon.address}"\n'
    )
    flags = ("--quick", "--json", "--threads=1", "--dtype=float32", "--out=mine.toml")
    done = run("profile", *flags, "--cluster=cluster.toml")
    found = done.json
    read = read_profile(tmp_path / "mine.toml")
    assert found["file"] == "mine.toml"
    assert read.memory_gb_per_s == found["profile"]["memory"]["gb_per_s"] > 0
    assert read.tflops == {"float32": found["profile"]["compute"]["float32"]}
    assert read.packed == {}
    assert (read.memory_efficiency, read.compute_efficiency) == (1.0, 1.0)
    assert read.layer_us > 0
    assert read.expert_us == found["profile"]["overhead"]["expert_us"] >= 0
    assert set(found["measured"]["tiny_experts_pass_ms"]) == {"2", "14"}
    assert read.busy_w == 0, "nothing here measures power"
    measured = found["measured"]
    assert set(measured["lm_head_ms"]) == set(measured["drafter_ms"]) == {"1", "8", "32", "64"}
    assert {dtype: len(by_width) for dtype, by_width in measured["layer_ms"].items()} == {"float32": 2}
    assert measured["kernels"] == {}
    link = measured["links"]['desk "1"']
    assert link["latency_ms"] > 0
    assert link["mbit_per_s"] > 0
    text = (tmp_path / "mine.toml").read_text("utf-8")
    assert "measured by flowspec profile on 20" in text
    assert "fitted to: float32 " in done.err, "what the fit is off by"


def test_a_packed_precision_without_a_right_kernel_is_left_out_unless_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_trial(dtype: str, device: str) -> None:
        if dtype == "int8":
            raise InputError("int8 has none")

    monkeypatch.setattr(profile, "run_trial", run_trial)
    machine = measured_machine(Accelerator(), None)
    assert (machine.dtype, machine.packed) == ("float32", ("int4", "gguf"))
    assert "int8 is not measured: int8 has none" in capsys.readouterr().err
    asked = measured_machine(Accelerator(), ("gguf", "bfloat16"))
    assert (asked.dtype, asked.packed) == ("bfloat16", ("gguf",))
    with pytest.raises(InputError, match="int8 has none"):
        measured_machine(Accelerator(), ("int8",))
