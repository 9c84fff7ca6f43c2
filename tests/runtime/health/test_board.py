"""Boards and their heat, as files in a folder: /sys, /proc and /etc of machines that are not here."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from flowspec.core.protocol.facts import Board
from flowspec.runtime.health.board import FIRMWARE, Heat, read_board, read_heat
from flowspec.runtime.health.thermometer import Thermometer
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


def test_no_tool_is_run_on_other_machines(tmp_path: Path) -> None:
    put(tmp_path, {"sys/class/dmi/id/product_name": "20L8S2N800\n"})

    def tool(name: str, flag: str) -> str:
        raise AssertionError(name)

    assert read_board(tmp_path, tool) == Board(model="20L8S2N800")


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


def test_this_machine_has_a_board_whatever_it_tells() -> None:
    assert isinstance(read_board(), Board)


def heat(root: Path, zone: int, milli: str) -> None:
    folder = root / f"sys/class/thermal/thermal_zone{zone}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "temp").write_text(milli)


def test_each_question_brings_a_newer_reading_of_the_hottest_zone(tmp_path: Path) -> None:
    heat(tmp_path, 0, "41500\n")
    heat(tmp_path, 1, "60250\n")
    thermometer = Thermometer(tmp_path)
    try:
        wait_until(lambda: thermometer.last().celsius == 60.25, "the first reading")
        heat(tmp_path, 1, "70000\n")
        wait_until(lambda: thermometer.last().celsius == 70.0, "a newer reading")
    finally:
        thermometer.stop()
    wait_until(
        lambda: not any(each is thermometer._thread for each in threading.enumerate()), "the thread has ended"
    )


def test_without_a_sensor_there_is_no_reading_and_no_thread_is_left(tmp_path: Path) -> None:
    heat(tmp_path, 0, "999999999")
    thermometer = Thermometer(tmp_path)
    assert thermometer.last().celsius is None
    assert thermometer._thread is not None
    thermometer._thread.join()
    assert thermometer.last().celsius is None
    assert not thermometer._thread.is_alive()


def test_what_the_kernel_and_the_firmware_do_about_heat_is_told_and_a_fan_is_not(tmp_path: Path) -> None:
    cooling = tmp_path / "sys/class/thermal"
    for number, kind in enumerate(("pwm-fan", "cpufreq-cpu0")):
        folder = cooling / f"cooling_device{number}"
        folder.mkdir(parents=True)
        (folder / "type").write_text(f"{kind}\n")
        (folder / "cur_state").write_text("3\n" if number == 0 else "0\n")
    for number, clock in enumerate((600_000, 1_500_000)):
        policy = tmp_path / f"sys/devices/system/cpu/cpufreq/policy{number}"
        policy.mkdir(parents=True)
        (policy / "scaling_cur_freq").write_text(f"{clock}\n")
        (policy / "cpuinfo_max_freq").write_text("2400000\n")
    assert read_heat(tmp_path) == Heat(clock_mhz=1500, clock_max_mhz=2400), "the core at work counts"
    (cooling / "cooling_device1/cur_state").write_text("2\n")
    assert read_heat(tmp_path).is_throttled
    (cooling / "cooling_device1/cur_state").write_text("0\n")
    assert read_heat(tmp_path, firmware=0x4).is_throttled
    assert not read_heat(tmp_path, firmware=0x40000).is_throttled, "it was, and is no more"
    firmware = tmp_path / FIRMWARE
    firmware.parent.mkdir(parents=True)
    firmware.write_text("2\n")
    assert read_heat(tmp_path, firmware=0).is_throttled, "the kernel knows better"
