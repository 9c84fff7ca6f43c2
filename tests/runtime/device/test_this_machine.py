"""What is measured of this machine, without a GPU and with one that is pretended."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from flowspec.cli.doctor import describe
from flowspec.core.protocol.device_messages import KernelFacts
from flowspec.core.protocol.precision import PRECISIONS
from flowspec.errors import InputError
from flowspec.model import accelerator
from flowspec.model.engines import Trial
from flowspec.plan.profile import find_profile, speed_of
from flowspec.runtime.device import report
from flowspec.runtime.device.report import measure, measure_apart, read_system
from flowspec.runtime.doctor import diagnose
from tests.model.fake_gpu import pretend_cuda
from tests.runtime.device.test_board import put
from tests.runtime.test_doctor import FACTS, cluster, needs


def found_wrong(measured: dict[str, Any]) -> list[tuple[str, str, str]]:
    findings = diagnose(cluster(), FACTS.software, needs(), measured)
    return [(each.severity, each.check, each.text) for each in findings]


def test_a_machine_without_a_gpu_says_so_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "GPU_FILES", ())
    measured = measure()
    assert measured["device"] == "cpu"
    assert [each["dtype"] for each in measured["kernels"] if each["kernel"]] == list(PRECISIONS)
    assert measured["speed"]["gb_per_s"] > 0
    assert describe(measured).startswith("this machine has no GPU to use (there is no driver of one); ")
    assert socket.gethostname() not in json.dumps([measured, read_system()]).split('"')
    assert found_wrong(measured) == []
    broken = KernelFacts(dtype="int8", kernel="", faults="there is no compiler")
    monkeypatch.setattr(report, "read_kernel", lambda dtype, machine: broken)
    assert describe(measure()).endswith(" CPU: speed unknown")


def test_a_gpu_is_measured_and_a_precision_that_is_wrong_there_is_a_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_cuda(monkeypatch, is_integrated=False)

    def run_trial(dtype: str, device: str) -> Trial:
        assert device == "cuda:0"
        if dtype == "int4":
            raise InputError("its product is wrong")
        return Trial(arithmetics=("plain@sm87",))

    monkeypatch.setattr(report, "_torch_cuda", lambda: "12.6")
    monkeypatch.setattr(report, "run_trial", run_trial)
    speed = speed_of(find_profile("raspberry-pi-5"), "probed")
    monkeypatch.setattr(report, "own_speed", lambda machine: speed)
    measured = measure()
    assert measured["facts"]["capability"] == "8.7"
    right = "float32, bfloat16, float16, int8, gguf"
    figures = f"1024 MiB of 8192 MiB free, reads {speed.gb_per_s:g} GB/s, right in {right}"
    assert describe(measured) == f"this machine's GPU Orin: {figures}"
    (problem, note) = found_wrong(json.loads(json.dumps(measured)))
    assert problem == ("problem", "kernels", "int4 cannot be computed there: its product is wrong")
    assert note[:2] == ("note", "cuda")


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("import os; os.kill(os.getpid(), 11)", "ended by SIGSEGV"),
        ("raise OSError('no libcudart')", "ended with status 1: OSError: no libcudart"),
        ("import time; time.sleep(60)", "it did not end in 0 s"),
    ],
)
def test_a_driver_that_kills_or_stops_the_measuring_is_a_problem(
    code: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "python_module", lambda name: ["python", "-c", code])
    if "sleep" in code:
        monkeypatch.setattr(report, "TRYING_S", 0.3)
    measured = measure_apart()
    assert measured == {"system": read_system(), "fault": fault}
    assert found_wrong(measured) == [("problem", "accelerator", f"measuring it failed: {fault}")]


def test_a_jetsons_system_is_read_without_the_host_that_built_its_driver(tmp_path: Path) -> None:
    put(
        tmp_path,
        {
            "etc/nv_tegra_release": "# R36 (release), REVISION: 4.3, BOARD: generic\n",
            "proc/driver/nvidia/version": "NVRM version: Open Module for aarch64  540.4.0  (builder@host)\n",
            "sys/class/devfreq/17000000.gpu/cur_freq": "306000000\n",
            "sys/class/devfreq/17000000.gpu/max_freq": "624750000\n",
        },
    )
    system = read_system(tmp_path)
    assert (system["l4t"], system["driver"]) == ("# R36 (release), REVISION: 4.3, BOARD: generic", "540.4.0")
    assert system["clocks"] == {"17000000.gpu": [306000000, 624750000]}
