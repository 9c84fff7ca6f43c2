"""Kinds of interfaces by a made /sys/class/net, and this machine's own loopback for real."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowspec.core.protocol.facts import Interface
from flowspec.errors import InputError
from flowspec.runtime.health.interfaces import interface_of, own_address, read_interface, resolve


@pytest.mark.parametrize(
    ("name", "files", "folders", "kind"),
    [
        ("lo", {"type": "772"}, [], "loopback"),
        ("eth0", {"type": "1", "speed": "1000", "mtu": "1500"}, ["device"], "wired"),
        ("wlan0", {"type": "1", "uevent": "DEVTYPE=wlan\nINTERFACE=wlan0"}, ["device"], "wi-fi"),
        ("wlan1", {"type": "1"}, ["device", "phy80211"], "wi-fi"),
        ("br0", {"type": "1"}, ["bridge"], "bridge"),
        ("tun0", {"type": "65534", "tun_flags": "0x1001"}, [], "tunnel"),
        ("wg0", {"type": "65534", "uevent": "DEVTYPE=wireguard"}, [], "tunnel"),
        ("veth1", {"type": "1", "uevent": "INTERFACE=veth1"}, [], "virtual"),
        ("bond0", {"type": "1", "uevent": "DEVTYPE=bond"}, [], "wired"),
        ("odd", {}, [], "unknown"),
    ],
)
def test_an_interface_is_of_its_kind(
    tmp_path: Path, name: str, files: dict[str, str], folders: list[str], kind: str
) -> None:
    root = tmp_path / "sys/class/net" / name
    root.mkdir(parents=True)
    for each, content in files.items():
        (root / each).write_text(f"{content}\n")
    for each in folders:
        (root / each).mkdir()
    assert read_interface(name, tmp_path) == Interface(
        name=name, kind=kind, speed_mbps=int(files.get("speed", 0)), mtu=int(files.get("mtu", 0))
    )


def test_a_speed_that_the_kernel_does_not_know_is_zero(tmp_path: Path) -> None:
    (tmp_path / "sys/class/net/eth0").mkdir(parents=True)
    (tmp_path / "sys/class/net/eth0/speed").write_text("-1\n")
    assert read_interface("eth0", tmp_path).speed_mbps == 0


def test_the_way_to_this_machine_is_its_loopback() -> None:
    assert resolve("localhost") in ("127.0.0.1", "::1")
    assert own_address("127.0.0.1") == "127.0.0.1"
    for address in ("127.0.0.1", "127.0.0.2"):
        found = interface_of(address)
        assert found is not None
        assert found.kind == "loopback"


def test_an_address_of_another_machine_is_on_no_interface_of_ours() -> None:
    assert interface_of("203.0.113.9") is None
    assert interface_of("no address") is None
    with pytest.raises(InputError, match="cannot find the host"):
        resolve("no-such-host.invalid")
