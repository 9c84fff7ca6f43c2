"""`flowspec doctor` with real daemons on loopback: silent about a healthy cluster, and naming everything that
is wrong with a sick one."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowspec.core.protocol.cluster_messages import Error
from flowspec.core.protocol.device_messages import AskFacts, Facts
from flowspec.runtime.transport import split_address
from flowspec.version import __version__
from tests.cli.pseudo_terminal import COLUMNS, shown
from tests.cli.running import Run
from tests.daemons import DaemonProcess, cluster_file, daemon_process, of_version, slow_wire
from tests.runtime.clusters import Peer, whole_model

BUNDLED_FOLDER = str(Path(__file__).parents[2] / "flowspec/demo/target")


@pytest.fixture(scope="module")
def healthy() -> Iterator[list[DaemonProcess]]:
    with daemon_process("pi-1") as first, daemon_process("pi-2") as second:
        yield [first, second]


def test_a_healthy_cluster_has_no_problem(healthy: list[DaemonProcess], tmp_path: Path, run: Run) -> None:
    path = cluster_file(tmp_path, {daemon.name: daemon.address for daemon in healthy})
    asked = ("doctor", f"--cluster={path}", "--layers=4,4", "--context=64")
    found = run(*asked, "--json").json
    assert [finding for finding in found["findings"] if finding["severity"] == "problem"] == []
    assert found["problems"] == 0
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
    lines = shown(*asked)
    assert "no problems" in lines[-1]
    assert max(map(len, lines)) <= COLUMNS
    assert sum(line.startswith("device ") for line in lines) > 1, "it does not fit at once"
    text = "\n".join(lines)
    for word in ("FlowSpec", "may use", "interface", "from here", "onward", "lo, loopback", __version__):
        assert word in text, "no word is broken"
    assert len(re.findall(r"\d+\.\d\d ms, \d+ Mbit/s", text)) == 3, "two links from here, and one onward"


def test_everything_that_is_wrong_is_named_with_what_to_do(
    healthy: list[DaemonProcess], tmp_path: Path, run: Run
) -> None:
    with (
        daemon_process("stopped") as stopped,
        daemon_process("small", "--memory=100MiB") as small,
        daemon_process("old", run=of_version("0.0.9")) as old,
        slow_wire(healthy[1].address, 4.0) as slow,
        socket.socket() as kept,
    ):
        stopped.stop()
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(split_address(stopped.address))  # or somebody else may take the port, and listen
        devices = {
            "good": healthy[0].address,
            "slow": slow,
            "small": small.address,
            "old": old.address,
            "stopped": stopped.address,
        }
        path = cluster_file(tmp_path, devices)
        found = run("doctor", "--json", "--context=64", f"--cluster={path}", status=1).json
    problems = {
        (finding["device"], finding["check"]): finding
        for finding in found["findings"]
        if finding["severity"] == "problem"
    }
    expected = {
        ("good -> slow", "link"): ("Mbit/s", "a gigabit cable"),
        ("small", "memory"): ("(100 MiB)", "daemon --memory"),
        ("old", "version"): ("0.0.9", "the same version"),
        ("stopped", "reachable"): (stopped.address, "flowspec daemon --host 127.0.0.1"),
    }
    assert problems.keys() == expected.keys()
    assert found["problems"] == 4
    for where, (text, advice) in expected.items():
        assert text in problems[where]["text"]
        assert advice in problems[where]["advice"]
    assert [each["name"] for each in found["devices"] if each["facts"] is None] == ["old", "stopped"]


def test_a_daemon_tells_whether_it_has_a_model_or_is_held_and_nothing_about_others(
    healthy: list[DaemonProcess], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    states = {}
    with Peer(healthy[0].address) as peer:
        peer.greet()
        for model in (BUNDLED_FOLDER, str(tmp_path), str(tmp_path / "no"), "owner/no-such"):
            peer.link.send(AskFacts(model=model, fingerprint="x"))
            answer = peer.answer()
            assert isinstance(answer, Facts)
            states[model] = answer.model
            assert answer.interface is None, "no address was asked for"
            assert answer.link is None
        peer.link.send(whole_model(BUNDLED_FOLDER, "another"))
        peer.link.send(AskFacts())
        while not isinstance(answer := peer.answer(), Facts):
            pass  # it asks for the model
    assert answer.is_held
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


def test_local_daemons_are_well(run: Run) -> None:
    found = run("doctor", "--json", "--context=64", "--local=2").json
    assert found["problems"] == 0
    layers = {each["name"]: each["layers"] for each in found["devices"]}
    assert layers == {"local-0": [0, 4], "local-1": [4, 8]}
    assert found["this_machine"]["kernels"][0]["kernel"]
