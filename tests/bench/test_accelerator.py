"""The check of an accelerator: on this machine's CPU for real, with a made-up GPU, and on machines that are
broken."""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowspec.bench.accelerator import check, steps
from flowspec.bench.accelerator.check import LEFT_OUT, RIGHT, UNFINISHED, WRONG, Check, Outcome
from flowspec.bench.accelerator.report import (
    KIND,
    BoardState,
    check_file,
    findings_of,
    private_names,
    report_of,
    without_private,
)
from flowspec.bench.accelerator.steps import PLAIN, check_slice, plain_step
from flowspec.cli.main import main
from flowspec.core.protocol.facts import Board
from flowspec.errors import InputError
from flowspec.model.trials import COMPILED, torch_version
from flowspec.runtime.health.system import read_clocks, read_system
from tests import warm
from tests.model.fake_gpu import FakeGpu

BOARD = BoardState(board=Board(), clocks={})


@pytest.fixture(autouse=True)
def warm_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are processes of their own all the same."""

    def start(command: Sequence[str], environment: Mapping[str, str], errors: Any) -> warm.Popen[bytes]:
        null, pipe = subprocess.DEVNULL, subprocess.PIPE
        return warm.Popen(
            command, stdin=null, stdout=pipe, stderr=errors, start_new_session=True, env=environment
        )

    monkeypatch.setattr(check, "start", start)


def broken(
    how: str, dtypes: tuple[str, ...] = ("float32", "bfloat16", "int8"), seconds: float = 1000.0
) -> list[Outcome]:
    told: list[Outcome] = []
    command = (sys.executable, "-m", "tests.bench.broken_accelerator", how)
    outcomes = Check("cpu", dtypes, seconds, told.append, command).run()
    assert told == outcomes
    return outcomes


def states(outcomes: list[Outcome]) -> dict[str, str]:
    return {f"{outcome.step} {outcome.dtype}".strip(): outcome.state for outcome in outcomes}


def findings(outcomes: list[Outcome], moment: BoardState = BOARD) -> list[tuple[str, str, str]]:
    found = findings_of(outcomes, moment, moment, "auto")
    assert all(finding.advice for finding in found)
    return [(finding.severity, finding.check, finding.text) for finding in found]


def test_the_command_on_this_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    asked = ["doctor", "--accelerator", "--device", "cpu", "--dtype", "float32", "--seconds", "3000"]
    assert main([*asked, f"--report={path}"]) == 0
    shown = capsys.readouterr()
    assert [line.split()[0] for line in shown.err.splitlines()] == [
        "torch",
        "kernels",
        "verify",
        "plain",
        "slice",
    ]
    assert (
        max(len(line) for line in shown.out.splitlines() if str(path) not in line and "issue" not in line)
        <= 80
    )
    assert f"written to {path}\n" in shown.out
    report = json.loads(path.read_text("utf-8"))
    assert (report["kind"], report["format"], report["problems"], report["asked_device"]) == (
        KIND,
        2,
        0,
        "cpu",
    )
    found = {step["step"]: step["found"] for step in report["steps"]}
    assert {step["state"] for step in report["steps"]} == {RIGHT}
    assert found["torch"]["device"] == "cpu"
    kernels = found["kernels"]
    assert (kernels["dtype"], kernels["faults"]) == ("float32", "")
    assert kernels["kernel"] == next(name for name in kernels["tried"] if name != COMPILED)
    assert found["slice"]["logits_off"] <= found["slice"]["logits_allowed"] < 0.01
    assert found["slice"]["same_choices"] == found["slice"]["tokens"] == found["plain"]["tokens"]
    assert found["slice"]["pass_ms"].keys() == {"1", "4", "16"}
    assert found["slice"]["memory"]["weight_bytes"] > 40e6
    assert (found["verify"]["exact"], found["verify"]["wrong"], found["verify"]["answers"]) == (12, 0, 12)
    assert all(rate > 0 for rate in found["verify"]["tokens_per_s"].values())
    assert report["software"]["torch"].partition("+")[0] == torch_version().partition("+")[0], (
        "not all builds tell which they are"
    )
    text = path.read_text("utf-8")
    for private in (socket.gethostname(), str(Path.home()), os.getcwd(), str(tmp_path), "127.0.0.1", "::1"):
        assert private not in text
    assert not re.search(rf"\b{re.escape(getpass.getuser())}\b", text)


def test_a_slice_on_an_accelerator_is_waited_for_and_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "SPEED_S", 0.01)
    plain_step("cpu", tmp_path, "")
    gpu = FakeGpu()
    found = check_slice(gpu, tmp_path, "float32")
    assert found["logits_off"] <= found["logits_allowed"]
    assert gpu.waits >= 7
    assert gpu.given_back >= 2
    np.save(tmp_path / PLAIN, np.load(tmp_path / PLAIN)[:, ::-1])
    wrong = check_slice(gpu, tmp_path, "float32")
    ((severity, what, text),) = findings(
        [Outcome(step="slice", dtype="float32", state=RIGHT, s=1.0, found=wrong)]
    )
    assert (severity, what) == ("problem", "slice float32")
    assert re.fullmatch(r"its logits are off by [\d.]+, where 0.002 is allowed", text)
    with pytest.raises(InputError, match="there are no plain logits to compare with"):
        check_slice(gpu, tmp_path / "empty", "float32")


def test_a_broken_kernel_shows() -> None:
    outcomes = broken("kernel:wrong,only", ("int8",))
    assert states(outcomes) == {"torch": RIGHT, "kernels int8": RIGHT}, "nothing is run with it"
    ((severity, what, text),) = findings(outcomes)
    assert (severity, what) == ("problem", "kernels int8")
    assert "int8 does not run right on cpu" in text
    assert "wrong computes something else than it should for 32 rows of 64 x 48" in text


def test_an_accelerator_that_dies_is_a_finding_and_the_next_precision_goes_on() -> None:
    outcomes = broken("dies", ("float32", "bfloat16", "int8", "int4"))
    assert states(outcomes) == {
        "torch": RIGHT,
        "plain": RIGHT,
        "kernels float32": RIGHT,
        "kernels bfloat16": RIGHT,
        "verify float32": RIGHT,
        "slice float32": RIGHT,
        "slice bfloat16": WRONG,
        "kernels int8": RIGHT,
        "kernels int4": RIGHT,
        "slice int8": RIGHT,
        "slice int4": RIGHT,
    }
    assert findings(outcomes) == [("problem", "slice bfloat16", "ended by SIGSEGV")]


def test_a_torch_that_dies_ends_the_check() -> None:
    outcomes = broken("torch")
    assert states(outcomes) == {"torch": WRONG}
    assert findings(outcomes) == [
        ("problem", "torch", "ran an instruction that this processor does not have")
    ]


@pytest.mark.parametrize(
    ("how", "fault"),
    [
        ("fails", "CUDA error: no kernel image is available for execution on the device"),
        ("crashes", "ended with status 1: KeyError: 'nobody foresaw this'"),
    ],
)
def test_what_fails_is_told_in_a_line(how: str, fault: str) -> None:
    assert findings(broken(how, ("float32",))) == [("problem", "verify float32", fault)]


def test_what_hangs_is_ended_and_what_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(check.SHARES, "verify", 0.002)
    outcomes = broken("hangs", ("float32",))
    assert states(outcomes)["slice float32"] == RIGHT
    assert states(outcomes)["verify float32"] == UNFINISHED
    assert findings(outcomes) == [("warning", "verify float32", "not finished in time: it had 2 s")]
    monkeypatch.setitem(check.SHARES, "verify", 2.0)
    outcomes = broken("hangs", ("float32", "bfloat16"), seconds=6.0)
    found = states(outcomes)
    assert found == {
        "torch": RIGHT,
        "kernels float32": RIGHT,
        "verify float32": UNFINISHED,
        "plain": LEFT_OUT,
        "kernels bfloat16": LEFT_OUT,
    }
    assert [severity for severity, _, _ in findings(outcomes)] == ["warning", "note", "note"]


def test_judgements() -> None:
    def one(step: str, **found: Any) -> list[tuple[str, str, str]]:
        return findings([Outcome(step=step, dtype="int4", state=RIGHT, s=1.0, found=found)])

    faults = "x86 ran an instruction that this processor does not have"
    text = f"plain is used, for {faults}"
    assert one("kernels", kernel="plain", faults=faults) == [("warning", "kernels int4", text)]
    text = "int4 needs a GPU of compute capability 8.0"
    assert one("kernels", kernel="", faults=text, is_lack=True) == [("warning", "kernels int4", text)]
    text = "2 of 6 answers are not those of decoding step by step"
    assert one("verify", wrong=2, answers=6) == [("problem", "verify int4", text)]
    assert one("verify", wrong=0, answers=6) == []
    assert one("slice", logits_off=float("nan"), logits_allowed=1.0, dtype="int4")[0][0] == "problem"
    jetson = replace(BOARD, board=Board(model="NVIDIA Jetson Orin Nano", is_jetson=True, power_mode="15W"))
    gpu = Outcome(step="torch", dtype="", state=RIGHT, s=1.0, found={"is_cpu": False})
    assert ("note", "cuda") in [found[:2] for found in findings([gpu], jetson)]
    outcome = Outcome(step="torch", dtype="", state=RIGHT, s=1.0, found={"is_cpu": True})
    assert findings([outcome], jetson) == [
        ("problem", "device", "a Jetson, but torch can use its CPU only"),
        ("warning", "power mode", "its power mode is 15W, not MAXN"),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/home/alice/.venv/lib/x.so: cannot open", "(path): cannot open"),
        (
            'FAILED at "/opt/pytorch/c10/cuda/CUDACachingAllocator.cpp":995',
            'FAILED at "(path)/CUDACachingAllocator.cpp":995',
        ),
        ("~/models/own and ../x/y", "(path) and (path)"),
        ("nothing listens at 127.0.0.1:7700", "nothing listens at (address)"),
        ("peer fe80::1ff:fe23:4567:890a is gone", "peer (address) is gone"),
        ("at 00:1A:2b:3c:4D:5e", "at (address)"),
        ("built by alice@pi-kitchen", "built by (address)"),
        ("alice on pi-kitchen, alices", "(name) on (name), alices"),
        (
            "64 x 48 in 1/2 s, torch 2.13.0+cpu, at 12:30, R36.4.3",
            "64 x 48 in 1/2 s, torch 2.13.0+cpu, at 12:30, R36.4.3",
        ),
        ("use --dtype float32, or int8/int4", "use --dtype float32, or int8/int4"),
    ],
)
def test_private_things_are_taken_out(text: str, expected: str) -> None:
    assert without_private(text, ("alice", "pi-kitchen")) == expected


def test_the_report_has_no_private_things_wherever_they_come_from() -> None:
    fault = "cannot read /home/alice/models/x of alice at pi-kitchen (192.168.1.21)"
    outcomes = [
        Outcome(step="verify", dtype="int8", state=WRONG, s=1.0, fault=fault, found={"faults": [fault]})
    ]
    document = report_of(
        outcomes,
        findings_of(outcomes, BOARD, BOARD, "auto"),
        system={"system": "alice's system"},
        before=BOARD,
        after=BOARD,
        device="auto",
        seconds=1.0,
        names=("alice", "pi-kitchen"),
    )
    text = json.dumps(document)
    assert "cannot read (path) of (name) at (name) ((address))" in text
    for private in ("alice", "pi-kitchen", "192.168", "/home"):
        assert private not in text
    assert socket.gethostname() in private_names()


def test_an_earlier_report_is_written_over_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    check_file(path)
    path.write_text(json.dumps({"kind": KIND}))
    check_file(path)
    for other in ("{}", "[]", "not json", ""):
        path.write_text(other)
        with pytest.raises(InputError, match="exists and is no earlier report"):
            check_file(path)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--accelerator", "--device=mps"], "--device: expected auto, cpu or cuda:N, got 'mps'"),
        (
            ["--accelerator", "--cluster=x.toml"],
            "--cluster goes with a cluster; --accelerator checks this machine",
        ),
        (["--accelerator", "--model=x"], "--model goes with a cluster"),
        (["--accelerator", "--seconds=0"], "--seconds: expected 1 to 86400, got 0"),
        (
            ["--accelerator", "--report=/no/such/folder/x.json"],
            "--report: expected a file in a folder that exists",
        ),
        (["--device=cpu"], "--device goes with --accelerator"),
        (["--report=x.json"], "--report goes with --accelerator"),
        (["--seconds=9"], "--seconds goes with --accelerator"),
    ],
)
def test_wrong_flags_are_one_line(
    flags: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *flags]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert expected in line


def made_files(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_jetsons_system_and_clocks_are_read(tmp_path: Path) -> None:
    policy, gpu = "sys/devices/system/cpu/cpufreq/policy0", "sys/class/devfreq/17000000.gpu"
    root = made_files(
        tmp_path,
        {
            "etc/nv_tegra_release": (
                "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64\n"
            ),
            "etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 22.04.5 LTS"\n',
            "proc/driver/nvidia/version": (
                "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  540.4.0  (builder@host)\n"
            ),
            f"{policy}/scaling_cur_freq": "729600\n",
            f"{policy}/scaling_max_freq": "1510400\n",
            f"{policy}/cpuinfo_max_freq": "1728000\n",
            f"{policy}/scaling_governor": "schedutil\n",
            f"{gpu}/cur_freq": "306000000\n",
            f"{gpu}/max_freq": "624750000\n",
        },
    )
    system = read_system(root)
    assert (system["l4t"], system["driver"], system["system"]) == ("36.4.3", "540.4.0", "Ubuntu 22.04.5 LTS")
    clocks = read_clocks(root, lambda command: "540.4.0, 306, 624, [N/A], 48\n")
    assert clocks["cores"] == [{"mhz": 729.6, "cap_mhz": 1510.4, "max_mhz": 1728.0, "governor": "schedutil"}]
    assert clocks["devices"] == {"17000000.gpu": {"mhz": 306.0, "max_mhz": 624.8}}
    assert clocks["gpu"]["temperature.gpu"] == "48"


def test_a_machine_that_tells_nothing_is_unknown(tmp_path: Path) -> None:
    system = read_system(tmp_path)
    assert (system["l4t"], system["driver"]) == ("", "")
    assert read_clocks(tmp_path, lambda command: "") == {"cores": [], "devices": {}, "gpu": {}}
    assert read_clocks(tmp_path, lambda command: "Unable to determine, x\n")["gpu"] == {}
