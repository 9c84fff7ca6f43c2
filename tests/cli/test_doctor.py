"""`flowspec doctor` with real daemons on loopback: silent about a healthy cluster, and naming everything that
is wrong with a sick one."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowspec.cli.doctor import show
from flowspec.cli.main import main
from flowspec.core.protocol.cluster_messages import Error
from flowspec.core.protocol.facts import AskFacts, Facts
from flowspec.plan.memory import mib
from flowspec.runtime.cluster import Device
from flowspec.runtime.health.examine import Examined, ask_all
from flowspec.runtime.links import measure_links
from flowspec.runtime.planning.survey import usable_memory
from flowspec.version import __version__
from tests.cli.pseudo_terminal import COLUMNS, shown
from tests.daemons import DaemonProcess, daemon_process, of_version, slow_wire
from tests.runtime.clusters import Peer, whole_model
from tests.runtime.health.test_diagnose import FACTS, needs

BUNDLED_FOLDER = str(Path(__file__).parents[2] / "flowspec/demo/target")


@pytest.fixture(scope="module")
def healthy() -> Iterator[list[DaemonProcess]]:
    with daemon_process("pi-1") as first, daemon_process("pi-2") as second:
        yield [first, second]


def cluster_file(folder: Path, devices: dict[str, str]) -> Path:
    path = folder / "cluster.toml"
    path.write_text(
        "".join(f'[[device]]\nname = "{name}"\naddress = "{address}"\n' for name, address in devices.items())
    )
    return path


def doctor(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, dict[str, Any]]:
    status = main(["doctor", "--json", "--context=64", *args])
    return status, json.loads(capsys.readouterr().out)


def test_a_healthy_cluster_has_no_problem(
    healthy: list[DaemonProcess], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = cluster_file(tmp_path, {daemon.name: daemon.address for daemon in healthy})
    status, found = doctor(capsys, f"--cluster={path}", "--layers=4,4")
    assert [finding for finding in found["findings"] if finding["severity"] == "problem"] == []
    assert (status, found["problems"]) == (0, 0)
    first, second = found["devices"]
    assert (first["name"], first["layers"], second["layers"]) == ("pi-1", [0, 4], [4, 8])
    for each in (first, second):
        facts = each["facts"]
        assert facts["interface"]["kind"] == each["own_interface"]["kind"] == "loopback"
        assert facts["model"] == "same"
        assert facts["memory_available_bytes"] > 0
        assert not facts["is_held"]
        assert abs(each["clock_offset_s"]) < 5
        assert each["from_head"]["bandwidth_mbps"] > 0
    assert first["onward"]["latency_s"] > 0
    assert second["onward"] is None


def test_a_person_sees_a_table_and_that_all_is_well(
    healthy: list[DaemonProcess], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = cluster_file(tmp_path, {daemon.name: daemon.address for daemon in healthy})
    assert main(["doctor", f"--cluster={path}", "--context=64", "--layers=4,4"]) == 0
    shown = capsys.readouterr().out
    assert "pi-1" in shown
    assert "lo, loopback" in shown
    assert "no problems" in shown.splitlines()[-1]


def test_everything_that_is_wrong_is_named_with_what_to_do(
    healthy: list[DaemonProcess], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        daemon_process("stopped") as stopped,
        daemon_process("small", "--memory=100MiB") as small,
        daemon_process("old", run=of_version("0.0.9")) as old,
        slow_wire(healthy[1].address, 4.0) as slow,
    ):
        stopped.stop()
        devices = {
            "good": healthy[0].address,
            "slow": slow,
            "small": small.address,
            "old": old.address,
            "stopped": stopped.address,
        }
        path = cluster_file(tmp_path, devices)
        status, found = doctor(capsys, f"--cluster={path}")
    assert status == 1
    problems = {
        (finding["device"], finding["check"]): finding
        for finding in found["findings"]
        if finding["severity"] == "problem"
    }
    expected = {
        ("good -> slow", "link"): ("Mbit/s: the hidden states of 16 nodes take", "use a gigabit cable"),
        ("small", "memory"): (
            "of that is allowed (100 MiB)",
            "allow it more (daemon --memory, memory in the cluster file), give it fewer layers",
        ),
        ("old", "version"): ("this daemon runs FlowSpec 0.0.9", "install the same version on all devices"),
        ("stopped", "reachable"): (
            f"nothing listens at {stopped.address}",
            "start its daemon: flowspec daemon --host 127.0.0.1",
        ),
    }
    assert problems.keys() == expected.keys()
    assert found["problems"] == 4
    for where, (text, advice) in expected.items():
        assert text in problems[where]["text"]
        assert advice in problems[where]["advice"]
    assert [each["name"] for each in found["devices"] if each["facts"] is None] == ["old", "stopped"]


def test_a_port_that_something_else_has_is_told_apart_from_a_daemon() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        (found,) = ask_all([Device(name="x", address=f"127.0.0.1:{server.getsockname()[1]}")])
    assert found.failure is not None
    assert "takes connections, but did not answer as a FlowSpec daemon" in found.failure.text
    (found,) = ask_all([Device(name="x", address="no-such-host.invalid:7700")])
    assert found.failure is not None
    assert "cannot find the host" in found.failure.text


def test_a_daemon_tells_whether_it_has_a_model_and_nothing_about_others(
    healthy: list[DaemonProcess], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    states = {}
    with Peer(healthy[0].address) as peer:
        peer.greet()
        for model, fingerprint in (
            (BUNDLED_FOLDER, "x"),
            (str(tmp_path), "x"),
            (str(tmp_path / "no"), "x"),
            ("owner/no-such", "x"),
        ):
            peer.link.send(AskFacts(model=model, fingerprint=fingerprint))
            answer = peer.answer()
            assert isinstance(answer, Facts)
            states[model] = answer.model
            assert answer.interface is None, "no address was asked for"
            assert answer.link is None
    assert list(states.values()) == ["other", "part", "none", "none"]


def test_a_daemon_keeps_listening_while_it_gathers_facts_and_limits_who_waits(
    healthy: list[DaemonProcess],
) -> None:
    with (
        slow_wire(healthy[1].address, 4.0) as slow,
        Peer(healthy[0].address) as peer,
        Peer(healthy[0].address) as other,
    ):
        peer.greet()
        peer.link.send(AskFacts(next_hop=slow))  # half a second at least
        other.greet()
        for _ in range(20):
            peer.link.send(AskFacts())
        refused = peer.answer()
        assert isinstance(refused, Error)
        assert refused.retry_after_s > 0
        answers = []
        while len(answers) < 17:
            answers.append(peer.answer())
        facts = [answer for answer in answers if isinstance(answer, Facts)]
        assert facts[0].link is not None
        assert 0 < facts[0].link.bandwidth_mbps < 8


def test_a_daemon_that_a_head_holds_says_so() -> None:
    with daemon_process("busy", is_warm=False) as daemon, Peer(daemon.address) as peer:
        peer.greet()
        peer.link.send(whole_model(BUNDLED_FOLDER, "another"))
        peer.link.send(AskFacts())  # answered long before torch is imported
        answer = peer.answer()
        assert isinstance(answer, Facts)
        assert answer.is_held
        daemon.process.kill()
        daemon.stop()


def test_local_daemons_are_well(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = doctor(capsys, "--local=2")
    assert (status, found["problems"]) == (0, 0)
    assert [(each["name"], each["layers"]) for each in found["devices"]] == [
        ("local-0", [0, 4]),
        ("local-1", [4, 8]),
    ]


def test_a_link_that_stands_is_measured(healthy: list[DaemonProcess]) -> None:
    steps: list[str] = []
    (peer,) = measure_links([Device(name="pi-1", address=healthy[0].address)], steps.append)
    assert peer.bandwidth_mbps > 0
    assert len(steps) == 2


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--cluster=none.toml"], "none.toml: expected a cluster file, but it cannot be read"),
        (["--model=/no/such"], "there is no folder '/no/such'"),
        (["--layers=9,9", "--local=2"], "--layers: 9+9 is 18, but the model has 8 layers"),
        (["--context=1"], "--context: expected 2 to"),
    ],
)
def test_wrong_input_is_one_line(args: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *args]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert expected in line


def test_daemons_of_one_machine_are_told_the_memory_that_a_plan_gives_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = [
        Examined(device=Device(name=name, address=address), facts=FACTS)
        for name, address in (("one", "10.0.0.1:7701"), ("two", "10.0.0.1:7702"), ("far", "10.0.0.2:7700"))
    ]
    hosts = {"one": "10.0.0.1", "two": "10.0.0.1", "far": "10.0.0.2"}
    usable = {name: mib(size) for name, size in usable_memory(found, hosts).items()}
    show(found, [], needs(1))
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert usable["one"] == usable["two"] != usable["far"]
    for name, size in usable.items():
        assert size in lines[name]


def test_no_word_is_broken_in_a_terminal_of_80_columns(healthy: list[DaemonProcess], tmp_path: Path) -> None:
    path = cluster_file(tmp_path, {daemon.name: daemon.address for daemon in healthy})
    lines = shown("doctor", f"--cluster={path}", "--context=64", "--layers=4,4")
    assert max(map(len, lines)) <= COLUMNS
    text = "\n".join(lines)
    heads = [line.split() for line in lines if line.startswith("device")]
    assert [head[0] for head in heads] == ["device"] * len(heads)
    assert len(heads) > 1, "it does not fit at once"
    for word in ("FlowSpec", "may use", "interface", "from here", "onward", "lo, loopback", __version__):
        assert word in text
    assert len(re.findall(r"\d+\.\d\d ms, \d+ Mbit/s", text)) == 3, "two links from here, and one onward"


def test_what_to_do_stays_indented_in_a_terminal(tmp_path: Path) -> None:
    path = cluster_file(tmp_path, {"gone": "127.0.0.1:9", "too": "127.0.0.1:19"})
    lines = shown("doctor", f"--cluster={path}", status=1, columns=60)
    at = next(number for number, line in enumerate(lines) if line.startswith("        -> "))
    assert lines[at + 1].startswith("          "), lines[at : at + 2]
