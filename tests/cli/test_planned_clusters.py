"""Commands that plan by themselves, with real daemons on loopback whose declared boards differ strongly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowspec.cli.main import main
from flowspec.core.protocol.messages import Sampling
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.reference import Reference
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


def test_generate_and_the_doctor_use_the_plan_that_a_quick_plan_prints(
    boards: Path, daemons: list[DaemonProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    planned = run(
        capsys, "plan", cluster_file(boards, daemons, tells=False), "--precision=float32", "--quick", *WANTED
    )
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
    assert line.endswith("got 'pi5'")
