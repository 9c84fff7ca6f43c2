"""Commands that plan by themselves, with real daemons on loopback whose declared boards differ strongly."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowspec.cli.main import main
from flowspec.core.protocol.messages import Sampling
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.reference import Reference
from tests import warm
from tests.daemons import DaemonProcess, daemon_process

SPEEDS = {"fast": 1.0, "slow": 0.02, "mid": 0.7}
MEMORY = {"fast": "608MiB", "slow": "2GiB", "mid": "608MiB"}
"""Neither of the good boards holds the whole model."""
WANTED = ("--drafter=ngram", "--context=200")
PROMPT = (5, 6, 7, 8, 9)


@pytest.fixture(scope="module")
def boards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a profile for each device."""
    folder = tmp_path_factory.mktemp("boards")
    for name, share in SPEEDS.items():
        text = (
            f"[memory]\ngb = 8\ngb_per_s = {share}\nefficiency = 1.0\n[compute]\nfloat32 = "
            f"{0.01 * share}\nefficiency = 1.0\n"
        )
        (folder / f"{name}.toml").write_text(text)
    return folder


@pytest.fixture(scope="module")
def daemons(boards: Path) -> Iterator[list[DaemonProcess]]:
    """In the order of the cluster file; the middle one tells its board itself."""
    with (
        daemon_process("fast", "--threads=1") as fast,
        daemon_process("slow", "--threads=1", f"--profile={boards / 'slow.toml'}") as slow,
        daemon_process("mid", "--threads=1") as mid,
    ):
        yield [fast, slow, mid]


def cluster_file(boards: Path, daemons: list[DaemonProcess], *, tells: bool = True, **memory: str) -> str:
    """With profiles for all, or (`tells`) for all but the slow device, which knows its own."""
    text = 'links = ["10000/0.05"]\n'
    for daemon in daemons:
        text += f'[[device]]\nname = "{daemon.name}"\naddress = "{daemon.address}"\n'
        text += f'memory = "{(MEMORY | memory)[daemon.name]}"\n'
        text += "" if tells and daemon.name == "slow" else f'profile = "{daemon.name}.toml"\n'
    path = boards / "cluster.toml"
    path.write_text(text)
    return f"--cluster={path}"


def run(capsys: pytest.CaptureFixture[str], *args: str, status: int = 0) -> Any:
    assert main([*args, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def generate(capsys: pytest.CaptureFixture[str], *args: str, status: int = 0) -> Any:
    asked = (
        f"--prompt-token-ids={','.join(map(str, PROMPT))}",
        "--max-new-tokens=24",
        "--ignore-eos",
        "--dtype=float32",
    )
    return run(capsys, "generate", *asked, *WANTED, *args, status=status)


def test_generate_and_the_doctor_use_the_plan_that_plan_prints(
    boards: Path, daemons: list[DaemonProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    planned = run(capsys, "plan", cluster_file(boards, daemons, tells=False), "--dtype=float32", *WANTED)
    used = [(stage["device"], stage["layers"]) for stage in planned["stages"]]
    assert {name for name, _ in used} == {"fast", "mid"}
    file = cluster_file(boards, daemons)
    found = generate(capsys, file)
    assert [(stage["name"], stage["layers"]) for stage in found["stages"]] == used
    told = found["plan"]
    assert [(stage["device"], stage["layers"]) for stage in told["stages"]] == used
    assert told["tokens_per_s"] == pytest.approx(planned["tokens_per_s"], rel=1e-9)
    assert told["not_used"] == ["slow"]
    assert {name: each["source"] for name, each in told["profiles"].items()} == {
        "fast": "declared",
        "slow": "given",
        "mid": "declared",
    }
    assert not any(
        "assigns layers" in line for daemon in daemons if daemon.name == "slow" for line in daemon.lines
    )
    expected = Reference(ModelFiles(BUNDLED), "float32").generate(PROMPT, Sampling(), 24, frozenset())
    assert found["token_ids"] == expected
    report = run(capsys, "doctor", "--dtype=float32", "--context=200", file)
    assert [(each["name"], each["layers"]) for each in report["devices"]] == [*used, ("slow", None)]
    assert [(each["device"], each["check"]) for each in report["findings"] if each["device"] == "slow"] == [
        ("slow", "plan")
    ]


def test_a_plan_says_that_links_within_a_machine_are_not_measured(
    boards: Path, daemons: list[DaemonProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(cluster_file(boards, daemons).removeprefix("--cluster="))
    args = ("plan", "--dtype=float32", *WANTED, f"--cluster={file}")
    declared = run(capsys, *args)["assumptions"]
    assert "links of 10000 Mbit/s and 0.05 ms; as the cluster file says" in declared
    file.write_text("".join(file.read_text().splitlines(keepends=True)[1:]))
    (told,) = (line for line in run(capsys, *args)["assumptions"] if line.startswith("links"))
    assert told == "links within a machine, which are not measured, of 10000 Mbit/s and 0.1 ms"


def test_a_plan_asks_the_devices_and_is_the_one_that_chat_runs(
    boards: Path, daemons: list[DaemonProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    """The slow device's board is in no file: it tells it itself."""
    file = cluster_file(boards, daemons)
    planned = run(capsys, "plan", file, "--dtype=float32", *WANTED)
    found = generate(capsys, file)
    used = [(stage["name"], stage["layers"]) for stage in found["stages"]]
    assert [(stage["device"], stage["layers"]) for stage in planned["stages"]] == used
    assert planned["tokens_per_s"] == pytest.approx(found["plan"]["tokens_per_s"], rel=1e-9)
    assert planned["why_not_used"] == found["plan"]["why_not_used"]
    assert (planned["absent"]["was_asked"], planned["absent"]["not_there"]) == (True, {})


def test_a_device_that_is_absent_is_left_out_of_a_plan_in_a_line(
    boards: Path, daemons: list[DaemonProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    path = boards / "gone.toml"
    path.write_text(
        'links = ["10000/0.05"]\n'
        f'[[device]]\nname = "mid"\naddress = "{daemons[2].address}"\nprofile = "mid.toml"\n'
        '[[device]]\nname = "gone"\naddress = "127.0.0.1:1"\nprofile = "fast.toml"\n'
    )
    assert main(["plan", f"--cluster={path}", *WANTED]) == 0
    text = capsys.readouterr().out
    assert (
        "gone is left out: it is absent (the machine is there, but nothing listens at 127.0.0.1:1;"
        in " ".join(text.split())
    )
    assert max(map(len, text.splitlines())) <= 80
    assert list(run(capsys, "plan", f"--cluster={path}", *WANTED)["absent"]["not_there"]) == ["gone"]


def test_a_forecast_that_was_far_too_good_explains_itself(
    boards: Path, daemons: list[DaemonProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    """The board is said to be a thousand times as fast as any."""
    (boards / "wonder.toml").write_text(
        "[memory]\ngb = 8\ngb_per_s = 90000\nefficiency = 1.0\n[compute]\nfloat32 = 9000\nefficiency = 1.0\n"
    )
    path = boards / "wonders.toml"
    path.write_text(
        f'links = ["10000/0.05"]\n[[device]]\nname = "fast"\naddress = "{daemons[0].address}"\n'
        'profile = "wonder.toml"\n'
    )
    asked = ["--prompt-token-ids=5,6,7", "--max-new-tokens=32", "--ignore-eos", "--dtype=float32"]
    assert main(["generate", f"--cluster={path}", *asked, *WANTED]) == 0
    lines = capsys.readouterr().err.splitlines()
    (told,) = [line for line in lines if line.startswith("  layers as planned: ")]
    assert re.search(r"forecast [\d.]+ tokens/s, measured [\d.]+: ", told)
    assert re.search(r"fast computes [\d.]+ times as long as reckoned \(cores (busy|shared)", told)
    assert ", continuous, drafter ngram" in lines[0] + lines[1]


def test_a_server_says_who_is_left_out(boards: Path, daemons: list[DaemonProcess]) -> None:
    command = [sys.executable, "-m", "flowspec.cli.main", "serve", "--port=0", *WANTED]
    command.append(cluster_file(boards, daemons))
    with warm.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("serving ")
        process.send_signal(signal.SIGINT)
        error = process.communicate(timeout=60)[1]
    assert re.search(
        r"^\(slow is left out: the forecast is .* tokens/s, .* with one device more\)$", error, re.MULTILINE
    )


def test_every_device_is_used_where_that_is_asked_for(
    boards: Path, daemons: list[DaemonProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    found = generate(capsys, cluster_file(boards, daemons), "--all-devices")
    assert {stage["name"] for stage in found["stages"]} == {"fast", "slow", "mid"}
    assert found["token_ids"] == Reference(ModelFiles(BUNDLED), "float32").generate(
        PROMPT, Sampling(), 24, frozenset()
    )


def test_a_split_by_hand_is_kept_and_compared(
    boards: Path, daemons: list[DaemonProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    file = cluster_file(boards, daemons)
    found = generate(capsys, file, "--layers=2,4,2")
    assert [(stage["name"], stage["layers"]) for stage in found["stages"]] == [
        ("fast", [0, 2]),
        ("slow", [2, 6]),
        ("mid", [6, 8]),
    ]
    told = found["plan"]
    assert told["is_given"]
    assert told["better"]["gain"] == pytest.approx(told["better"]["tokens_per_s"] / told["tokens_per_s"] - 1)
    assert told["better"]["gain"] > 1
    assert found["token_ids"] == Reference(ModelFiles(BUNDLED), "float32").generate(
        PROMPT, Sampling(), 24, frozenset()
    )


def test_what_does_not_fit_is_refused_as_plan_refuses_it(
    boards: Path, daemons: list[DaemonProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    file = cluster_file(boards, daemons, slow="100MiB", fast="580MiB", mid="580MiB")
    before = [len(daemon.lines) for daemon in daemons]
    found = generate(capsys, file, status=1)
    assert not found["fits"]
    assert {each["device"] for each in found["devices"] if each["short_bytes"]} >= {"slow"}
    assert found["would_fit"]
    assert main(["generate", "--dtype=float32", *WANTED, file, "What is 17 + 25?"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("flowspec generate: bundled does not fit the devices in float32:\n")
    assert "it would fit with" in shown.err
    assert max(map(len, shown.err.splitlines())) <= 80
    assert [len(daemon.lines) for daemon in daemons] == before, "nothing was assigned"
    report = run(capsys, "doctor", "--dtype=float32", "--context=200", file, status=1)
    assert {each["device"] for each in report["findings"] if each["check"] == "memory"} >= {"slow"}


def test_a_board_that_nobody_knows_is_one_line(
    boards: Path, daemons: list[DaemonProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    path = boards / "wrong.toml"
    path.write_text(f'[[device]]\nname = "pi"\naddress = "{daemons[0].address}"\nprofile = "pi5"\n')
    assert main(["generate", f"--cluster={path}", "hi"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "wrong.toml: pi: profile: expected a .toml file or one of" in line
    assert line.endswith("got 'pi5'; did you mean raspberry-pi-5?")
