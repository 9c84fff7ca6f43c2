"""`flowspec profile` on this machine, offline: its file is one that planning reads. No time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flowspec.cli.profile import measured_machine
from flowspec.errors import InputError
from flowspec.model import kernels
from flowspec.model.accelerator import CpuAccelerator
from flowspec.plan.profile import read_profile
from flowspec.runtime.local import LocalCluster, LocalDaemon
from tests import warm

COMMAND = [sys.executable, "-m", "flowspec.cli.main", "profile"]


def profile(*args: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return warm.run([*COMMAND, *args], cwd=folder, capture_output=True, text=True, timeout=170)


@pytest.fixture
def daemon() -> Iterator[LocalDaemon]:
    with LocalCluster(1) as cluster:
        yield cluster.wait()[0]


def test_a_quick_profile_reads_back_with_its_links(tmp_path: Path, daemon: LocalDaemon) -> None:
    (tmp_path / "cluster.toml").write_text(
        f'[[device]]\nname = "desk \\"1\\""\naddress = "{daemon.address}"\n'
    )
    done = profile(
        "--quick",
        "--json",
        "--threads=1",
        "--dtype=float32",
        "--out=mine.toml",
        "--cluster=cluster.toml",
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    read = read_profile(tmp_path / "mine.toml")
    assert found["file"] == "mine.toml"
    assert read.memory_gb_per_s == found["profile"]["memory"]["gb_per_s"] > 0
    assert read.tflops == {"float32": found["profile"]["compute"]["float32"]}
    assert read.packed == {}
    assert (read.memory_efficiency, read.compute_efficiency) == (1.0, 1.0)
    assert read.layer_us > 0
    assert read.expert_us == found["profile"]["overhead"]["expert_us"] > 0
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
    assert all(
        "#" in line
        for line in text.split("[measured]")[0].splitlines()
        if " = " in line and "description" not in line
    )
    assert "float32 " in done.stderr.splitlines()[-1], "what the fit is off by"


def test_a_packed_precision_without_a_right_kernel_is_left_out_unless_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def kernel_of(dtype: str, device: torch.device) -> None:
        if dtype == "int8":
            raise InputError("int8 has none")

    monkeypatch.setattr(kernels, "kernel_of", kernel_of)
    machine = measured_machine(CpuAccelerator(), None)
    assert (machine.dtype, machine.packed) == ("float32", ("int4", "gguf"))
    assert "int8 is not measured: int8 has none" in capsys.readouterr().err
    asked = measured_machine(CpuAccelerator(), ("gguf", "bfloat16"))
    assert (asked.dtype, asked.packed) == ("bfloat16", ("gguf",))
    with pytest.raises(InputError, match="int8 has none"):
        measured_machine(CpuAccelerator(), ("int8",))


@pytest.mark.parametrize(
    ("args", "expected", "status"),
    [
        (["--out=there.toml"], "there.toml exists; give --force to overwrite it", 2),
        (["--out=nowhere/x.toml"], "--out: expected a file in a folder that exists, got nowhere/x.toml", 2),
        (["--out=x.json"], "--out: expected a file that ends with .toml, got x.json", 2),
        (["--cluster=none.toml"], "none.toml: expected a cluster file, but it cannot be read", 2),
        (
            ["--cluster=bad.toml"],
            "bad.toml: device: expected at least one table, in device = [...] or as [[device]]",
            2,
        ),
        (["--threads=0"], "argument --threads: expected a whole number from 1, got '0'", 2),
        (
            ["--dtype=float32,float16"],
            "argument --dtype: expected names among float32, bfloat16, float16, int8, int4, gguf, and one of",
            2,
        ),
        (["--dtype=int5"], "got 'int5'", 2),
        (["--device=tpu"], "argument --device: expected one of auto, cpu, cuda, got 'tpu'", 2),
    ],
)
def test_wrong_input_is_one_line(tmp_path: Path, args: list[str], expected: str, status: int) -> None:
    (tmp_path / "there.toml").write_text("")
    (tmp_path / "bad.toml").write_text("")
    done = profile(*args, folder=tmp_path)
    assert done.returncode == status
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("flowspec profile: ")
    assert expected in line


def test_a_daemon_that_is_not_there_is_named_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text('[[device]]\nname = "gone"\naddress = "127.0.0.1:9"\n')
    done = profile("--cluster=cluster.toml", "--out=x.toml", folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "flowspec profile: gone at 127.0.0.1:9 does not answer; is its daemon running?\n"
    assert not (tmp_path / "x.toml").exists()
