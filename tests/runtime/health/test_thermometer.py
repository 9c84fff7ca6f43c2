"""A device's heat is read beside its other work, and where nothing tells it, it is unknown."""

from __future__ import annotations

import threading
from pathlib import Path

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
        wait_until(lambda: thermometer.last_c() == 60.25, "the first reading")
        heat(tmp_path, 1, "70000\n")
        wait_until(lambda: thermometer.last_c() == 70.0, "a newer reading")
    finally:
        thermometer.stop()
    wait_until(lambda: not any(each is thermometer._thread for each in threading.enumerate()), "the thread has ended")


def test_without_a_sensor_there_is_no_reading_and_no_thread_is_left(tmp_path: Path) -> None:
    heat(tmp_path, 0, "999999999")
    thermometer = Thermometer(tmp_path)
    assert thermometer.last_c() is None
    assert thermometer._thread is not None
    thermometer._thread.join()
    assert thermometer.last_c() is None
    assert not thermometer._thread.is_alive()
