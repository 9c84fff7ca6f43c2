"""Device profiles: every shipped one reads and says where each number is from; wrong files get one clear
line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flowspec.errors import InputError
from flowspec.plan.profile import EXPERT_SHARE_CPU, EXPERT_SHARE_GPU, find_profile, read_profile

DEVICES = Path(__file__).parents[2] / "devices"
BOARDS = sorted(DEVICES.glob("*.toml"))
GOOD = """description = "a board"
[memory]
gb = 8.0
gb_per_s = 68
efficiency = 0.75
[compute]
float16 = 10.0
efficiency = 0.5
[packed.int4]
gb_per_s = 40.0
tflops = 3.0
basis = "a guess"
[overhead]
layer_us = 200.0
[power]
idle_w = 4.0
busy_w = 15.0
"""


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_a_shipped_board_reads_and_has_a_source_for_every_number(path: Path) -> None:
    profile = read_profile(path)
    assert profile == find_profile(path.stem)
    assert profile.name == path.stem
    assert 0 < profile.idle_w < profile.busy_w
    assert profile.layer_us > 0
    assert profile.tflops["float16"] >= profile.tflops["float32"]
    for line in path.read_text("utf-8").splitlines():
        if re.match(r"\w+ *= *[\d.]", line):
            number, _, source = line.partition("#")
            assert len(source.split()) >= 3, f"{path.name}: no source for {number}"
            if "estimate" in source:
                assert re.search(r"estimate: \S+", source), (
                    f"{path.name}: an estimate of {number} for no reason"
                )


def test_energy_counts_idle_and_busy_time() -> None:
    profile = find_profile("jetson-orin-nano")
    assert profile.energy_j(10.0, 4.0) == pytest.approx(
        10 * profile.idle_w + 4 * (profile.busy_w - profile.idle_w)
    )
    assert profile.energy_j(10.0, 11.0) == profile.energy_j(10.0, 10.0)


def test_a_precision_that_a_board_lacks_is_named() -> None:
    with pytest.raises(InputError, match=r"agx-xavier: .* bfloat16"):
        find_profile("jetson-agx-xavier").rates("bfloat16")


def test_a_profile_of_ones_own_is_found_by_its_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    profile = find_profile(str(path))
    assert (profile.name, profile.memory_gb_per_s) == ("mine", 68.0)
    assert (profile.layer_us, profile.pass_us, profile.serial) == (200.0, 0.0, 0.0)
    assert profile.bytes_per_s() == pytest.approx(51e9)
    assert profile.rates("float16").tflops == pytest.approx(5)
    assert profile.rates("int4") == profile.packed["int4"]
    assert profile.rates("int8") == profile.rates("float16")
    assert profile.basis("int4") == "a guess"


def test_what_an_expert_takes_is_read_or_assumed(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    assert find_profile(str(path)).expert_us == EXPERT_SHARE_GPU * 200.0
    path.write_text(GOOD.replace("[compute]", "[compute]\nserial = 1.0"))
    assert find_profile(str(path)).expert_us == EXPERT_SHARE_CPU * 200.0
    path.write_text(GOOD.replace("layer_us = 200.0", "layer_us = 200.0\nexpert_us = 7.5"))
    assert find_profile(str(path)).expert_us == 7.5


@pytest.mark.parametrize("name", ["../devices/phone-arm", "", "/etc/passwd", "a\nb", "cray-1"])
def test_an_unknown_board_or_a_path_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="device: expected"):
        find_profile(name)


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("gb = 8.0\n", "", "memory: gb: "),
        *(("gb = 8.0", f"gb = {value}", "memory: gb: ") for value in ("0", "'8'", "true", "nan", "inf")),
        ("efficiency = 0.75", "efficiency = 75", "memory: efficiency: "),
        ("float16 = 10.0\n", "", "compute: "),
        ("float16 = 10.0", "float16 = 1\nfp8 = 3.0", "compute: unknown key 'fp8'"),
        ("float16 = 10.0", "float16 = 1\nserial = 2", "compute: serial: "),
        ("layer_us = 200.0", "layer_ms = 0.2", "overhead: unknown key 'layer_ms'"),
        ("layer_us = 200.0", "expert_us = -1", "overhead: expert_us: "),
        ("layer_us = 200.0", "expert_us = 1e9", "expected what a device can be, got a speed of"),
        ("gb_per_s = 68", "gb_per_s = 5e-324", "expected what a device can be, got a speed of"),
        ("[packed.int4]", "[packed.fp8]", "packed: unknown key 'fp8'"),
        ("tflops = 3.0", "tflops = 0", "packed: int4: tflops: "),
        ('basis = "a guess"\n', "", "packed: int4: basis: "),
        ("busy_w = 15.0", "busy_w = 3", "power: "),
        ("[power]", "[energy]", "unknown key 'energy'"),
        ("[memory]\n", "", "memory: "),
        ('description = "a board"\n', "memory = 1\n", "expected TOML"),
        ("[memory]", "[memory", "expected TOML"),
        (GOOD, "a = " + "[" * 5000, "expected TOML"),
    ],
)
def test_a_wrong_file_gets_one_line_with_file_and_key(tmp_path: Path, old: str, new: str, place: str) -> None:
    path = tmp_path / "board.toml"
    assert old in GOOD
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(InputError) as refused:
        read_profile(path)
    assert str(refused.value).startswith(f"{path}: {place}")
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_or_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    for name in ("none.toml", "binary.toml"):
        with pytest.raises(InputError, match=re.escape(name)):
            read_profile(tmp_path / name)
