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
from flowspec.runtime.health.system import read_clocks, read_system
from tests import warm
from tests.caches import BUILT, make_cache
from tests.model.fake_gpu import FakeGpu
from tests.nightly import at_night

BOARD = BoardState(board=Board(), clocks={})


@pytest.fixture(autouse=True)
def warm_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are processes of their own all the same; they find our kernels built, but not tried."""
    cache = {"XDG_CACHE_HOME": make_cache(tmp_path / "cache", BUILT)}

    def start(command: Sequence[str], environment: Mapping[str, str], errors: Any) -> warm.Popen[bytes]:
        null, pipe = subprocess.DEVNULL, subprocess.PIPE
        return warm.Popen(
            command,
            stdin=null,
            stdout=pipe,
            stderr=errors,
            start_new_session=True,
            env={**environment, **cache},
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


@at_night
def test_the_command_on_this_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = check.start
    small = [sys.executable, "-m", "tests.bench.broken_accelerator", "small"]
    monkeypatch.setattr(
        check, "start", lambda command, *given: start([*small, *command[len(check.COMMAND) :]], *given)
    )
    path = tmp_path / "report.json"
    asked = ["doctor", "--accelerator", "--device", "cpu", "--dtype", "float32", "--seconds", "3000"]
    assert main([*asked, f"--report={path}"]) == 0
    assert f"written to {path}\n" in capsys.readouterr().out
    report = json.loads(path.read_text("utf-8"))
    assert (report["kind"], report["problems"], report["asked_device"]) == (KIND, 0, "cpu")
    found = {step["step"]: step["found"] for step in report["steps"]}
    assert {step["state"] for step in report["steps"]} == {RIGHT}
    assert found.keys() == {"torch", "kernels", "verify", "plain", "slice"}
    assert found["torch"]["device"] == "cpu"
    assert (found["kernels"]["dtype"], found["kernels"]["faults"]) == ("float32", "")
    assert found["slice"]["logits_off"] <= found["slice"]["logits_allowed"] < 0.01
    assert found["slice"]["same_choices"] == found["slice"]["tokens"] == found["plain"]["tokens"]
    assert found["slice"]["memory"]["weight_bytes"] > 40e6
    assert (found["verify"]["exact"], found["verify"]["wrong"], found["verify"]["answers"]) == (4, 0, 4)
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
    outcome = Outcome(step="slice", dtype="float32", state=RIGHT, s=1.0, found=wrong)
    assert [each[:2] for each in findings([outcome])] == [("problem", "slice float32")]
    with pytest.raises(InputError, match="plain logits"):
        check_slice(gpu, tmp_path / "empty", "float32")


def test_a_broken_kernel_shows() -> None:
    outcomes = broken("kernel", ("int8",))
    assert states(outcomes) == {"torch": RIGHT, "kernels int8": RIGHT}, "nothing is run with it"
    ((severity, what, text),) = findings(outcomes)
    assert (severity, what) == ("problem", "kernels int8")
    assert "kernels do not run right" in text


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


@pytest.mark.parametrize(
    ("how", "what", "fault"),
    [
        ("torch", "torch", "ran an instruction that this processor does not have"),
        ("fails", "verify float32", "CUDA error: no kernel image is available for execution on the device"),
    ],
)
def test_what_dies_or_fails_is_told_in_a_line(how: str, what: str, fault: str) -> None:
    outcomes = broken(how, ("float32",))
    assert findings(outcomes) == [("problem", what, fault)]
    assert len(outcomes) == (1 if how == "torch" else 5), "without torch there is nothing more to check"


def test_what_hangs_is_ended_and_what_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(check.SHARES, "verify", 2.0)
    outcomes = broken("hangs", ("float32", "bfloat16"), seconds=4.5)
    assert states(outcomes) == {
        "torch": RIGHT,
        "kernels float32": RIGHT,
        "verify float32": UNFINISHED,
        "plain": LEFT_OUT,
        "kernels bfloat16": LEFT_OUT,
    }
    assert [severity for severity, _, _ in findings(outcomes)] == ["warning", "note", "note"]


def test_judgements() -> None:
    def one(step: str, **found: Any) -> list[tuple[str, str]]:
        outcome = Outcome(step=step, dtype="int4", state=RIGHT, s=1.0, found=found)
        return [each[:2] for each in findings([outcome])]

    assert one("kernels", kernel="plain", faults="x86 is not right") == [("warning", "kernels int4")]
    assert one("kernels", kernel="", faults="a lack", is_lack=True) == [("warning", "kernels int4")]
    assert one("verify", wrong=2, answers=6) == [("problem", "verify int4")]
    assert one("verify", wrong=0, answers=6) == []
    assert one("slice", logits_off=float("nan"), logits_allowed=1.0, dtype="int4")[0][0] == "problem"
    jetson = replace(BOARD, board=Board(model="NVIDIA Jetson Orin Nano", is_jetson=True, power_mode="15W"))
    for is_cpu, expected in ((False, ("note", "cuda")), (True, ("problem", "device"))):
        outcome = Outcome(step="torch", dtype="", state=RIGHT, s=1.0, found={"is_cpu": is_cpu})
        found = [each[:2] for each in findings([outcome], jetson)]
        assert expected in found
        assert ("warning", "power mode") in found


PRIVATE = [
    ("/home/alice/.venv/lib/x.so: cannot open", "(path): cannot open"),
    ('at "/opt/pytorch/c10/cuda/Caching.cpp":995', 'at "(path)/Caching.cpp":995'),
    ("~/models/own and ../x/y", "(path) and (path)"),
    ("nothing listens at 127.0.0.1:7700", "nothing listens at (address)"),
    ("peer fe80::1ff:fe23:4567:890a is gone", "peer (address) is gone"),
    ("at 00:1A:2b:3c:4D:5e", "at (address)"),
    ("built by alice@pi-kitchen", "built by (address)"),
    ("alice on pi-kitchen, alices", "(name) on (name), alices"),
    *[(text, text) for text in ("64 x 48 in 1/2 s, torch 2.13.0+cpu, at 12:30, R36.4.3", "use int8/int4")],
]


def test_private_things_are_taken_out_wherever_they_are_in_a_report() -> None:
    names = ("alice", "pi-kitchen")
    assert [without_private(text, names) for text, _ in PRIVATE] == [expected for _, expected in PRIVATE]
    fault = "cannot read /home/alice/models/x of alice at pi-kitchen (192.168.1.21)"
    outcome = Outcome(step="verify", dtype="int8", state=WRONG, s=1.0, fault=fault, found={"faults": [fault]})
    document = report_of(
        [outcome],
        findings_of([outcome], BOARD, BOARD, "auto"),
        system={"system": "alice's system"},
        before=BOARD,
        after=BOARD,
        device="auto",
        seconds=1.0,
        names=names,
    )
    text = json.dumps(document)
    assert "cannot read (path) of (name) at (name) ((address))" in text
    assert not [private for private in ("alice", "pi-kitchen", "192.168", "/home") if private in text]
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
    "flags",
    [
        ["--device=mps", "--accelerator"],
        ["--cluster=x.toml", "--accelerator"],
        ["--model=x", "--accelerator"],
        ["--seconds=0", "--accelerator"],
        ["--report=/no/such/folder/x.json", "--accelerator"],
        ["--device=cpu"],
        ["--report=x.json"],
        ["--seconds=9"],
    ],
)
def test_wrong_flags_are_one_line(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert flags[0].partition("=")[0] in line


def test_a_jetsons_system_and_clocks_are_read(tmp_path: Path) -> None:
    policy, gpu = "sys/devices/system/cpu/cpufreq/policy0", "sys/class/devfreq/17000000.gpu"
    driver = "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  540.4.0  (builder@host)\n"
    for name, text in (
        ("etc/nv_tegra_release", "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic\n"),
        ("etc/os-release", 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 22.04.5 LTS"\n'),
        ("proc/driver/nvidia/version", driver),
        (f"{policy}/scaling_cur_freq", "729600\n"),
        (f"{policy}/scaling_max_freq", "1510400\n"),
        (f"{policy}/cpuinfo_max_freq", "1728000\n"),
        (f"{policy}/scaling_governor", "schedutil\n"),
        (f"{gpu}/cur_freq", "306000000\n"),
        (f"{gpu}/max_freq", "624750000\n"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    system = read_system(tmp_path)
    assert (system["l4t"], system["driver"], system["system"]) == ("36.4.3", "540.4.0", "Ubuntu 22.04.5 LTS")
    clocks = read_clocks(tmp_path, lambda command: "540.4.0, 306, 624, [N/A], 48\n")
    assert clocks["cores"] == [{"mhz": 729.6, "cap_mhz": 1510.4, "max_mhz": 1728.0, "governor": "schedutil"}]
    assert clocks["devices"] == {"17000000.gpu": {"mhz": 306.0, "max_mhz": 624.8}}
    assert clocks["gpu"]["temperature.gpu"] == "48"
