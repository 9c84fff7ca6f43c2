"""What a machine says of itself, by files in a folder: /sys, /proc and /etc of machines that are not here."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowspec.core.protocol.device_messages import Board, Interface
from flowspec.errors import InputError
from flowspec.runtime.addresses import ADDRESSES
from flowspec.runtime.device.board import (
    FIRMWARE,
    Heat,
    Thermometer,
    interface_of,
    read_board,
    read_heat,
    read_interface,
)
from flowspec.runtime.device.links import own_address
from tests.runtime.clusters import wait_until

PI = b"Raspberry Pi 5 Model B Rev 1.0\0"
ORIN = b"NVIDIA Jetson Orin Nano Developer Kit\0"


def no_tool(name: str, flag: str) -> str:
    return ""


def put(root: Path, files: dict[str, str | bytes]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def zone(number: int, milli: int, trips: dict[str, int]) -> dict[str, str | bytes]:
    folder = f"sys/class/thermal/thermal_zone{number}"
    found: dict[str, str | bytes] = {f"{folder}/temp": f"{milli}\n"}
    for at, (kind, degrees) in enumerate(trips.items()):
        found |= {
            f"{folder}/trip_point_{at}_type": f"{kind}\n",
            f"{folder}/trip_point_{at}_temp": f"{degrees}\n",
        }
    return found


def test_a_raspberry_pi_tells_of_its_firmware_its_heat_and_its_clock(tmp_path: Path) -> None:
    put(
        tmp_path,
        {
            "proc/device-tree/model": PI,
            "sys/devices/platform/soc/soc:firmware/get_throttled": "50005\n",
            "sys/devices/system/cpu/cpufreq/policy0/scaling_max_freq": "1500000\n",
            "sys/devices/system/cpu/cpufreq/policy0/cpuinfo_max_freq": "2400000\n",
            **zone(0, 84500, {"critical": 110000, "hot": 80000, "passive": 85000}),
            **zone(1, 30000, {"passive": 20000}),
        },
    )
    assert read_board(tmp_path, no_tool) == Board(
        model="Raspberry Pi 5 Model B Rev 1.0",
        throttled=0x50005,
        celsius=84.5,
        trip_c=80.0,
        cpu_mhz=1500,
        cpu_max_mhz=2400,
    )


def test_vcgencmd_is_asked_where_the_kernel_does_not_tell(tmp_path: Path) -> None:
    put(tmp_path, {"proc/device-tree/model": PI})
    asked = []

    def tool(name: str, flag: str) -> str:
        asked.append((name, flag))
        return "throttled=0x20002\n"

    assert read_board(tmp_path, tool).throttled == 0x20002
    assert asked == [("vcgencmd", "get_throttled")]


def test_a_jetson_is_known_by_its_release_file_or_its_model_and_tells_its_power_mode(tmp_path: Path) -> None:
    put(tmp_path, {"proc/device-tree/model": ORIN})
    board = read_board(tmp_path, lambda name, flag: "NV Power Mode: 15W\n0\n" if name == "nvpmodel" else "")
    assert board == Board(model="NVIDIA Jetson Orin Nano Developer Kit", is_jetson=True, power_mode="15W")
    other = tmp_path / "other"
    put(other, {"etc/nv_tegra_release": "# R36"})
    assert read_board(other, no_tool).is_jetson


@pytest.mark.parametrize("content", [b"", b"n/a\n", b"\xff\xfe\0", b"-274000\n", b"9" * 5000])
def test_files_that_hold_something_else_leave_facts_unknown(tmp_path: Path, content: bytes) -> None:
    put(
        tmp_path,
        {
            "proc/device-tree/model": PI,
            "sys/devices/platform/soc/soc:firmware/get_throttled": content,
            "sys/class/thermal/thermal_zone0/temp": content,
            "sys/devices/system/cpu/cpufreq/policy0/scaling_max_freq": content,
            "sys/devices/system/cpu/cpufreq/policy0/cpuinfo_max_freq": content,
        },
    )
    assert read_board(tmp_path, no_tool) == Board(model="Raspberry Pi 5 Model B Rev 1.0")


def test_each_question_brings_a_newer_reading_of_the_hottest_zone(tmp_path: Path) -> None:
    put(tmp_path, zone(0, 41500, {}) | zone(1, 60250, {}))
    thermometer = Thermometer(tmp_path)
    wait_until(lambda: thermometer.last().temperature_c == 60.25, "the first reading")
    put(tmp_path, zone(1, 70000, {}))
    wait_until(lambda: thermometer.last().temperature_c == 70.0, "a newer reading")


def test_what_the_kernel_and_the_firmware_do_about_heat_is_told_and_a_fan_is_not(tmp_path: Path) -> None:
    cooling, policies = "sys/class/thermal/cooling_device", "sys/devices/system/cpu/cpufreq/policy"
    put(
        tmp_path,
        {
            f"{cooling}0/type": "pwm-fan\n",
            f"{cooling}0/cur_state": "3\n",
            f"{cooling}1/type": "cpufreq-cpu0\n",
            f"{cooling}1/cur_state": "0\n",
            **{f"{policies}{number}/cpuinfo_max_freq": "2400000\n" for number in (0, 1)},
            f"{policies}0/scaling_cur_freq": "600000\n",
            f"{policies}1/scaling_cur_freq": "1500000\n",
        },
    )
    assert read_heat(tmp_path) == Heat(clock_mhz=1500, clock_max_mhz=2400), "the core at work counts"
    put(tmp_path, {f"{cooling}1/cur_state": "2\n"})
    assert read_heat(tmp_path).is_throttled
    put(tmp_path, {f"{cooling}1/cur_state": "0\n", FIRMWARE: "40000\n"})
    assert not read_heat(tmp_path).is_throttled, "it was, and is no more"
    put(tmp_path, {FIRMWARE: "4\n"})
    assert read_heat(tmp_path).is_throttled


def test_an_interface_is_of_its_kind(tmp_path: Path) -> None:
    for name, kind, files, folders in (
        ("lo", "loopback", {"type": "772"}, []),
        ("eth0", "wired", {"type": "1", "speed": "1000", "mtu": "1500"}, ["device"]),
        ("eth1", "wired", {"type": "1", "speed": "-1", "mtu": "1500"}, ["device"]),
        ("wlan0", "wi-fi", {"type": "1", "uevent": "DEVTYPE=wlan\nINTERFACE=wlan0"}, ["device"]),
        ("wlan1", "wi-fi", {"type": "1"}, ["device", "phy80211"]),
        ("br0", "bridge", {"type": "1"}, ["bridge"]),
        ("tun0", "tunnel", {"type": "65534", "tun_flags": "0x1001"}, []),
        ("wg0", "tunnel", {"type": "65534", "uevent": "DEVTYPE=wireguard"}, []),
        ("veth1", "virtual", {"type": "1", "uevent": "INTERFACE=veth1"}, []),
        ("bond0", "wired", {"type": "1", "uevent": "DEVTYPE=bond"}, []),
        ("odd", "unknown", {}, []),
    ):
        root = tmp_path / "sys/class/net" / name
        root.mkdir(parents=True)
        put(root, {each: f"{content}\n" for each, content in files.items()})
        for each in folders:
            (root / each).mkdir()
        speed = max(0, int(files.get("speed", 0)))  # one that the kernel does not know is zero
        assert read_interface(name, tmp_path) == Interface(
            name=name, kind=kind, speed_mbps=speed, mtu=int(files.get("mtu", 0))
        )


def test_an_address_is_of_this_machine_or_of_none_of_its_interfaces() -> None:
    assert ADDRESSES.wait_for("localhost") in ("127.0.0.1", "::1")
    assert own_address("127.0.0.1") == "127.0.0.1"
    for address in ("127.0.0.1", "127.0.0.2"):
        found = interface_of(address)
        assert found is not None
        assert found.kind == "loopback"
    assert interface_of("203.0.113.9") is interface_of("no address") is None
    with pytest.raises(InputError, match="cannot find the host"):
        ADDRESSES.wait_for("no-such-host.invalid")
