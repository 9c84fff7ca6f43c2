"""A device's heat is read beside its other work, and where nothing tells it, it is unknown."""

from __future__ import annotations

import threading
from pathlib import Path

from flowspec.runtime.health.board import FIRMWARE, Heat, read_heat
from flowspec.runtime.health.thermometer import Thermometer
from tests.runtime.clusters import wait_until


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
