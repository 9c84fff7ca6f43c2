"""Commands that plan by themselves, with real daemons on loopback whose declared boards differ strongly."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowspec.core.protocol.messages import Sampling
from flowspec.model.files import BUNDLED, ModelFiles
from lab.plain_model import PlainModel
from tests.cli.running import Run
from tests.daemons import BOARD, DaemonProcess, cluster_file, daemon_process

SPEEDS = {"fast": 1.0, "slow": 0.02, "mid": 0.7}
MEMORY = {"fast": "608MiB", "slow": "2GiB", "mid": "608MiB"}
"""Neither of the good boards holds the whole model."""
WANTED = ("--drafter=ngram", "--context=200", "--dtype=float32")
PROMPT = (5, 6, 7, 8, 9)
ASKED = (f"--prompt-token-ids={','.join(map(str, PROMPT))}", "--max-new-tokens=24", "--ignore-eos", *WANTED)


@pytest.fixture(scope="module")
def boards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the cluster file and profiles."""
    return tmp_path_factory.mktemp("boards")


@pytest.fixture(scope="module")
def daemons(boards: Path) -> Iterator[list[DaemonProcess]]:
    """In the order of the cluster file; the middle one tells its board itself."""
    (boards / "slow.toml").write_text(BOARD.format(rate=SPEEDS["slow"]))
    with (
        daemon_process("fast", "--threads=1") as fast,
        daemon_process("slow", "--threads=1", f"--profile={boards / 'slow.toml'}") as slow,
        daemon_process("mid", "--threads=1") as mid,
    ):
        yield [fast, slow, mid]


def planned_file(boards: Path, daemons: list[DaemonProcess], **memory: str) -> str:
    """The flag of a cluster file with profiles for all but the slow device, which knows its own."""
    addresses = {daemon.name: daemon.address for daemon in daemons}
    rates = {name: rate for name, rate in SPEEDS.items() if name != "slow"}
    fields = {name: f'memory = "{size}"\n' for name, size in (MEMORY | memory).items()}
    return f"--cluster={cluster_file(boards, addresses, rates=rates, fields=fields)}"


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return PlainModel(ModelFiles(BUNDLED), "float32").generate(PROMPT, Sampling(), 24, frozenset())


def layers(found: Any) -> list[tuple[str, list[int]]]:
    return [(stage.get("name") or stage["device"], stage["layers"]) for stage in found["stages"]]


def test_generate_and_the_doctor_use_the_plan_that_plan_prints(
    boards: Path, daemons: list[DaemonProcess], run: Run, expected: list[int]
) -> None:
    file = planned_file(boards, daemons)
    planned = run("plan", "--json", file, *WANTED).json
    assert (planned["absent"]["was_asked"], planned["absent"]["not_there"]) == (True, {})
    used = layers(planned)
    assert {name for name, _ in used} == {"fast", "mid"}
    found = run("generate", file, "--json", *ASKED).json
    told = found["plan"]
    assert layers(found) == layers(told) == used
    assert told["tokens_per_s"] == pytest.approx(planned["tokens_per_s"], rel=1e-9)
    assert told["not_used"] == ["slow"]
    assert told["why_not_used"] == planned["why_not_used"]
    sources = {name: each["source"] for name, each in told["profiles"].items()}
    assert sources == {"fast": "declared", "slow": "given", "mid": "declared"}
    assert not any("assigns layers" in line for line in daemons[1].lines)
    assert found["token_ids"] == expected
    report = run("doctor", "--json", "--dtype=float32", "--context=200", file).json
    assert [(each["name"], each["layers"]) for each in report["devices"]] == [*used, ("slow", None)]
    assert [each["check"] for each in report["findings"] if each["device"] == "slow"] == []
    told = run("generate", "--json", file, *ASKED, "--layers=2,4,2").json["plan"]
    assert (layers(told), told["is_given"]) == ([("fast", [0, 2]), ("slow", [2, 6]), ("mid", [6, 8])], True)
    assert told["better"]["gain"] > 1


def test_a_forecast_that_was_far_too_good_explains_itself(
    boards: Path, daemons: list[DaemonProcess], run: Run
) -> None:
    """The board is said to be a thousand times as fast as any."""
    path = cluster_file(boards / "wonder", {"fast": daemons[0].address}, rates={"fast": 90000})
    ended = run("generate", f"--cluster={path}", *ASKED)
    (told,) = [line for line in ended.told if line.startswith("  layers as planned: ")]
    assert re.search(r"forecast [\d.]+ tokens/s, measured [\d.]+: ", told)
    assert re.search(r"fast took [\d.]+ times as long as predicted \(cores (busy|shared)", told)
    assert any(", continuous, drafter ngram" in line for line in ended.told)
    short = run("generate", f"--cluster={path}", *ASKED, "--max-new-tokens=4")
    (told,) = [line for line in short.told if line.startswith("  layers as planned: ")]
    assert re.fullmatch(r"  layers as planned: forecast [\d.]+ tokens/s", told), "nothing is known of it yet"


def test_what_does_not_fit_is_refused_as_plan_refuses_it(
    boards: Path, daemons: list[DaemonProcess], run: Run
) -> None:
    file = planned_file(boards, daemons, slow="100MiB", fast="580MiB", mid="580MiB")

    def assigned() -> list[str]:
        return [line for daemon in daemons for line in daemon.lines if "assigns layers" in line]

    before = assigned()
    found = run("generate", "--json", file, *ASKED, status=1).json
    assert not found["fits"]
    assert {each["device"] for each in found["devices"] if each["short_bytes"]} >= {"slow"}
    assert found["would_fit"]
    ended = run("generate", *WANTED, file, "What is 17 + 25?", status=1)
    assert ended.out == ""
    assert "bundled does not fit the devices in float32:\n" in ended.err
    assert "it would fit with" in ended.err
    assert max(map(len, ended.err.splitlines())) <= 80
    assert assigned() == before
    report = run("doctor", "--json", "--dtype=float32", "--context=200", file, status=1).json
    assert {each["device"] for each in report["findings"] if each["check"] == "memory"} >= {"slow"}
