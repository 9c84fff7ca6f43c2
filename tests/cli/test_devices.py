"""Daemons that announce themselves on loopback, and those that do not; real processes and real multicast."""

from __future__ import annotations

import functools
import re
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flowspec import __version__
from flowspec.runtime.cluster_file import read_cluster
from flowspec.runtime.device.links import ask
from flowspec.runtime.discovery import FOUND_MAX, Announced, announcing, find_announced
from tests.cli.running import Run
from tests.daemons import daemon_process


def has_multicast() -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            group = struct.pack("4s4s", socket.inet_aton("224.0.0.251"), socket.inet_aton("127.0.0.1"))
            probe.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
        except OSError:
            return False
        return True


multicast = pytest.mark.skipif(not has_multicast(), reason="no multicast on loopback here")


@multicast
def test_only_daemons_that_were_asked_to_are_found_and_written(
    tmp_path: Path, run: Run, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find_once = functools.cache(lambda timeout_s: find_announced(timeout_s))
    monkeypatch.setattr("flowspec.cli.devices.find_announced", find_once)
    path = tmp_path / "mine.toml"
    names = ('desk [1] "é"', "quiet")
    with daemon_process(names[0], "--announce", "--memory=3GiB") as loud, daemon_process(names[1]):
        found = run("devices", "--json", f"--write={path}").json
        (each,) = [each for each in found["devices"] if each["name"] in names]
        told = (each["name"], each["address"], each["version"], each["memory_bytes"])
        assert told == (names[0], loud.address, __version__, 3 << 30)
        assert (each["device"], each["state"], each["problem"]) == ("cpu", "free", "")
        assert each["available_bytes"] > 0
        shown = run("devices").out
        assert names[0] in shown
        assert re.search(rf"{loud.address} +{__version__} +3072 MiB .* free", shown)
        assert "exists; give --force" in refused("devices", f"--write={path}")
    (device,) = (device for device in read_cluster(path) if device.name == names[0])
    assert device.address == loud.address


@multicast
def test_a_daemon_on_loopback_is_announced_on_loopback_only_and_takes_its_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import zeroconf

    asked = []
    real = zeroconf.Zeroconf

    def opened(interfaces: Any) -> zeroconf.Zeroconf:
        asked.append(interfaces)
        return real(interfaces=interfaces)

    monkeypatch.setattr(zeroconf, "Zeroconf", opened)
    with announcing(name="here", host="localhost", port=7700, memory_bytes=5, device="auto"):
        found = [each for each in find_announced(1.0) if each.name == "here"]
    assert asked[0] == ["127.0.0.1"]
    (each,) = found
    assert (each.addresses, each.version) == (("127.0.0.1:7700",), __version__)
    assert (each.memory_bytes, each.device) == (5, "auto")
    assert "here" not in [each.name for each in find_announced(0.5)]


def test_nothing_found_is_a_helpful_line_and_what_is_gone_is_shown_and_not_written(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Announced] = []
    monkeypatch.setattr("flowspec.cli.devices.find_announced", lambda timeout_s: found)
    (line,) = run("devices", status=1).told
    assert "flowspec daemon --host ADDRESS --announce" in line
    assert run("devices", "--json", status=1).json == {"devices": [], "written": None}
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    found.append(
        Announced(name="gone", addresses=(address,), version="0.0.9", memory_bytes=0, device="[red]cpu")
    )
    path = tmp_path / "mine.toml"
    ended = run("devices", f"--write={path}", status=1)
    assert "[red]cpu" in ended.out
    assert "no answer" in ended.out
    assert "was not written" in ended.err
    assert not path.exists()


def test_false_announcements_are_looked_up_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody announces more daemons than there are, none of which tells its address: one after another they
    would take a second each."""
    looked_up: list[str] = []
    ended: list[str] = []
    most = 0

    def opened(*_: Any, handlers: Any = (), **__: Any) -> Any:
        for handler in handlers:
            for number in range(300):
                handler(name=f"false-{number}", state_change="added")
        return network

    def get_service_info(service: str, name: str, patience_ms: int) -> None:
        nonlocal most
        looked_up.append(name)
        most = max(most, len(looked_up) - len(ended))
        time.sleep(patience_ms / 1000)
        ended.append(name)

    network = SimpleNamespace(Zeroconf=opened, ServiceBrowser=opened, get_service_info=get_service_info)
    network.ServiceStateChange = SimpleNamespace(Removed="removed")
    network.InterfaceChoice = SimpleNamespace(All="all")
    network.cancel = network.close = lambda: None
    monkeypatch.setattr("flowspec.runtime.discovery._zeroconf", lambda: network)
    assert find_announced(1.0) == []
    assert 10 < most <= len(looked_up) <= FOUND_MAX


def test_the_time_out_is_that_of_the_whole_command(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many announcements of an address where nobody answers, and one daemon: it is found, and they
    share the time."""
    with daemon_process("true") as daemon, socket.create_server(("127.0.0.1", 0), backlog=100) as deaf:
        place = f"127.0.0.1:{deaf.getsockname()[1]}"
        true = Announced(name="true", addresses=(daemon.address,), version="0", memory_bytes=0, device="cpu")
        false = [replace(true, name=f"a{number:03}", addresses=(place,)) for number in range(64)]
        monkeypatch.setattr("flowspec.cli.devices.find_announced", lambda timeout_s: [*false, true])
        given_s: list[float] = []

        def ask_timed(*asked: Any, within_s: float) -> Any:
            given_s.append(within_s)
            return ask(*asked, within_s=within_s)

        monkeypatch.setattr("flowspec.cli.devices.ask", ask_timed)
        found = run("devices", "--json", "--timeout=3").json
    assert 0 < given_s[0] <= 3
    assert [each["name"] for each in found["devices"] if each["state"] == "free"] == ["true"]
    assert found["devices"][0]["problem"]
