"""Device profiles: every shipped one reads and says where each number is from; wrong files get one clear
line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flowspec.errors import InputError
from flowspec.plan.profile import (
    EXPERT_SHARE_CPU,
    EXPERT_SHARE_GPU,
    find_profile,
    profile_names,
    read_profile,
)

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


def test_the_boards_that_are_promised_are_there() -> None:
    assert {
        "jetson-orin-nano",
        "jetson-orin-nx",
        "jetson-agx-orin",
        "jetson-xavier-nx",
        "jetson-agx-xavier",
        "raspberry-pi-4",
        "raspberry-pi-5",
        "n100-mini-pc",
        "old-laptop",
        "phone-arm",
    } <= set(profile_names())


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
    with pytest.raises(
        InputError,
        match=r"agx-xavier: expected a precision among float32, float16, int8, int4, gguf, got bfloat16",
    ):
        find_profile("jetson-agx-xavier").rates("bfloat16")


def test_a_profile_of_no_device_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        "[memory]\ngb = 1\ngb_per_s = 5e-324\nefficiency = 1\n[compute]\nfloat32 = 1\nefficiency = 1\n"
    )
    with pytest.raises(InputError, match="expected what a device can be, got a speed of"):
        find_profile(str(path))


def test_a_profile_of_ones_own_is_found_by_its_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    profile = find_profile(str(path))
    assert (profile.name, profile.memory_gb_per_s, profile.layer_us, profile.pass_us, profile.serial) == (
        "mine",
        68.0,
        200.0,
        0.0,
        0.0,
    )
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
    path.write_text(GOOD.replace("layer_us = 200.0", "expert_us = 1e9"))
    with pytest.raises(InputError, match=r"got a speed of 1e\+09 \(expert_us\)"):
        find_profile(str(path))


def test_an_unknown_board_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(
        InputError, match=r"^device: expected a \.toml file or one of jetson-agx-orin, .*, got 'cray-1'$"
    ):
        find_profile("cray-1")


@pytest.mark.parametrize("name", ["../devices/phone-arm", "", "/etc/passwd", "a\nb"])
def test_a_board_is_no_path(name: str) -> None:
    with pytest.raises(InputError, match="device: expected"):
        find_profile(name)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("gb = 8.0\n", "", r"memory: gb: expected a number above 0, got nothing"),
        ("gb = 8.0", "gb = 0", r"memory: gb: expected a number above 0, got 0"),
        ("gb = 8.0", "gb = '8'", r"memory: gb: expected a number above 0, got '8'"),
        ("gb = 8.0", "gb = true", r"memory: gb: expected a number above 0, got True"),
        ("gb = 8.0", "gb = nan", r"memory: gb: expected a number above 0, got nan"),
        ("gb = 8.0", "gb = inf", r"memory: gb: expected a number above 0, got inf"),
        (
            "efficiency = 0.75",
            "efficiency = 75",
            r"memory: efficiency: expected a number above 0 to 1, got 75",
        ),
        ("float16 = 10.0\n", "", r"compute: expected TFLOP/s for at least one of float32, bfloat16, "),
        ("float16 = 10.0", "float16 = -1", r"compute: float16: expected a number above 0, got -1"),
        ("float16 = 10.0", "float16 = 1\nfp8 = 3.0", r"compute: unknown key 'fp8'; expected .*float16"),
        (
            "float16 = 10.0",
            "float16 = 1\nserial = 2",
            r"compute: serial: expected a number from 0 to 1, got 2",
        ),
        (
            "layer_us = 200.0",
            "layer_ms = 0.2",
            r"overhead: unknown key 'layer_ms'; expected expert_us, layer_us, pass_us",
        ),
        (
            "layer_us = 200.0",
            "expert_us = -1",
            r"overhead: expert_us: expected a number from 0, got -1",
        ),
        ("layer_us = 200.0", "layer_us = -1", r"overhead: layer_us: expected a number from 0, got -1"),
        ("[packed.int4]", "[packed.fp8]", r"packed: unknown key 'fp8'; expected .*int4"),
        ("[packed.int4]", "[packed.float16]", r"packed: unknown key 'float16'; expected .*int4"),
        ("tflops = 3.0", "tflops = 0", r"packed: int4: tflops: expected a number above 0, got 0"),
        ('basis = "a guess"\n', "", r"packed: int4: basis: expected a printable text, got nothing"),
        ("float16 = 10.0", "float16 = 1\nint8 = 3.0", r"compute: unknown key 'int8'; expected .*float16"),
        ("busy_w = 15.0", "busy_w = 3", r"power: expected busy_w of at least idle_w, got 3 and 4"),
        ("[power]", "[energy]", r"unknown key 'energy'; expected .*power"),
        ("[memory]\n", "", r"memory: expected a table \[memory\], got nothing"),
        ('description = "a board"\n', "memory = 1\n", r"expected TOML, got "),
        ("[memory]", "[memory", r"expected TOML, got "),
    ],
)
def test_a_wrong_file_gets_one_line_with_file_key_and_expectation(
    tmp_path: Path, old: str, new: str, expected: str
) -> None:
    path = tmp_path / "board.toml"
    assert old in GOOD
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(InputError, match=rf"^{re.escape(str(path))}: {expected}") as refused:
        read_profile(path)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_or_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"none\.toml: expected a device profile, but it cannot be read \(No such file"
    ):
        read_profile(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"binary\.toml: expected a device profile, but it cannot be read"):
        read_profile(tmp_path / "binary.toml")
    (tmp_path / "deep.toml").write_text("a = " + "[" * 5000)
    with pytest.raises(InputError, match=r"deep\.toml: expected TOML"):
        read_profile(tmp_path / "deep.toml")
