"""How fast a daemon says that its device is: given, kept, probed once and remembered, or not known while it
works."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from flowspec.core.protocol.precision import PRECISION_BYTES
from flowspec.model.cpu import Cpu
from flowspec.model.engines import prepare
from flowspec.model.layer import Linear, Packed, RowsFunction
from flowspec.plan.profile import completed, find_profile, profile_names, profile_of, speed_of
from flowspec.runtime.device import probe as probing
from flowspec.runtime.device import report as module
from flowspec.runtime.device.probe import Sizes, probe
from flowspec.runtime.device.report import kept_profile, own_speed
from flowspec.runtime.machine import Machine
from tests.model.fake_gpu import FakeGpu

MACHINE = Machine(device="cpu")
PROBED = speed_of(find_profile("raspberry-pi-5"), "probed")


@pytest.fixture
def probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Machine]:
    """Machines that were probed, in a home of their own."""
    found: list[Machine] = []

    def count(machine: Machine) -> object:
        found.append(machine)
        return PROBED

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_probe", count)
    return found


def keep(text: str) -> None:
    kept_profile().parent.mkdir(parents=True)
    kept_profile().write_text(text)


def test_a_probe_is_remembered_for_the_same_machine(probes: list[Machine]) -> None:
    assert own_speed(MACHINE) == own_speed(MACHINE) == PROBED
    assert probes == [MACHINE]
    assert own_speed(MACHINE, may_probe=False) == PROBED, "that of a device that works is told, too"
    assert own_speed(replace(MACHINE, threads=1), may_probe=False) is None
    own_speed(replace(MACHINE, threads=1))
    assert len(probes) == 2, "other threads, another speed"


def test_a_broken_memory_is_written_anew(probes: list[Machine], tmp_path: Path) -> None:
    (tmp_path / "cache/flowspec").mkdir(parents=True)
    broken = ("", "[]", '{"x": 1}', '{"x": {"name": "y"}}', "\0", "[" * 100_000)
    for count, content in enumerate(broken, 1):
        (tmp_path / "cache/flowspec/speed.json").write_text(content)
        assert own_speed(MACHINE) == own_speed(MACHINE) == PROBED
        assert len(probes) == count


def test_what_the_user_says_comes_before_what_was_measured_before_a_probe(
    probes: list[Machine], caplog: pytest.LogCaptureFixture
) -> None:
    keep("[memory]\ngb = 8\ngb_per_s = 10\nefficiency = 1.0\n[compute]\nfloat32 = 0.1\nefficiency = 1.0\n")
    kept = own_speed(MACHINE)
    assert kept is not None
    assert (kept.source, kept.gb_per_s, kept.float32, kept.float16) == ("kept", 10.0, 0.1, 0.0)
    told = own_speed(replace(MACHINE, profile=find_profile("raspberry-pi-5")))
    assert told is not None
    assert (told.source, told.name) == ("given", "raspberry-pi-5")
    assert probes == []
    kept_profile().write_text("[memory]\n")
    assert own_speed(MACHINE) == PROBED
    assert "flowspec profile --keep" in caplog.text


def test_a_told_profile_is_as_fast_as_the_board() -> None:
    for board in map(find_profile, profile_names()):
        told = profile_of(speed_of(board, "given"), int(board.memory_gb * 1e9))
        packed = {dtype: structs.replace(rates, basis="") for dtype, rates in board.packed.items()}
        assert told == structs.replace(board, packed=packed, idle_w=0.0, busy_w=0.0, caution="")


def test_a_precision_that_a_profile_lacks_runs_as_the_slowest() -> None:
    board = structs.replace(find_profile("raspberry-pi-5"), tflops={"float32": 0.2, "float16": 0.4})
    assert completed(board, "bfloat16").tflops["bfloat16"] == 0.2
    assert completed(board, "float16") is board
    for precision in PRECISION_BYTES:
        assert completed(board, precision).rates(precision).tflops > 0


@pytest.mark.slow
def test_a_probe_of_this_machine_measures_the_kernels_of_packed_weights_that_were_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare()
    found = probe("cpu")
    assert min(found.layer_us, found.pass_us) > 0
    assert {"float32", "float16", "bfloat16"} == found.tflops.keys()
    assert min(found.tflops.values()) > 0
    told = speed_of(found, "probed").packed
    assert [each.dtype for each in told] == ["int4", "gguf"]
    right = Cpu.rows

    def slowed(self: Cpu, *, linear: Linear | None = None, **others: Any) -> RowsFunction:
        is_packed = linear is not None and isinstance(linear.matrices[0], Packed)
        run = right(self, linear=linear, **others)
        return (lambda rows: time.sleep(0.5)) if is_packed else run

    monkeypatch.setattr(Cpu, "rows", slowed)
    slow = probe("cpu").packed
    assert slow.keys() == {each.dtype for each in told}
    for rates in slow.values():
        assert rates.gb_per_s < 0.2, "what is measured is what a slice's layers call"


def test_a_gpu_is_probed_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here this machine plays it."""
    small = Sizes(read=(256, 256), packed=(256, 256), computed=(256, 256), rows=4)
    monkeypatch.setattr(probing, "accelerator_of", lambda device: FakeGpu())
    monkeypatch.setattr(probing._Gpu, "sizes", small)
    found = probe("cuda:0")
    assert found.serial == 0
    assert found.packed.keys() == {"gguf"}
    assert min(*found.tflops.values(), found.packed["gguf"].tflops, found.layer_us, found.pass_us) > 0
