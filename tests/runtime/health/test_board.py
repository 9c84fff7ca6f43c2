"""Boards that are not here: their /sys, /proc and /etc as files in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowspec.core.protocol.facts import Board
from flowspec.runtime.health.board import read_board

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
