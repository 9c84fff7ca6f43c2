"""Device profiles: every shipped one reads and says where each number is from; wrong files get one clear
line; and one board alone is foretold as others measured it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from flowspec.core.protocol.precision import FILED
from flowspec.errors import InputError
from flowspec.plan.cost import head_curve, layers_curve
from flowspec.plan.memory import weights_of
from flowspec.plan.planner import make_plan
from flowspec.plan.profile import EXPERT_SHARE_CPU, EXPERT_SHARE_GPU, find_profile, read_profile
from flowspec.plan.shape import ModelShape, find_shape
from flowspec.plan.sites import Network, PlanRequest, site
from flowspec.plan.timing import LinkSpec

DEVICES = Path(__file__).parents[2] / "devices"
BOARDS = sorted(DEVICES.glob("*.toml"))
GOOD = (Path(__file__).parents[1] / "data" / "board.toml").read_text()


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


def test_energy_counts_idle_and_busy_time_and_a_missing_precision_is_named() -> None:
    profile = find_profile("jetson-orin-nano")
    assert profile.energy_j(10.0, 4.0) == pytest.approx(
        10 * profile.idle_w + 4 * (profile.busy_w - profile.idle_w)
    )
    assert profile.energy_j(10.0, 11.0) == profile.energy_j(10.0, 10.0)
    with pytest.raises(InputError, match=r"agx-xavier: .* bfloat16"):
        find_profile("jetson-agx-xavier").rates("bfloat16")


def test_a_profile_of_ones_own_is_found_by_its_file_and_experts_read_or_assumed(tmp_path: Path) -> None:
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
        ("layer_us = 200.0", "expert_us = 1e9", "overhead: expert_us: "),
        ("gb_per_s = 68", "gb_per_s = 5e-324", "memory: gb_per_s: "),
        ("[packed.int4]", "[packed.fp8]", "packed: unknown key 'fp8'"),
        ("tflops = 3.0", "tflops = 0", "packed: int4: tflops: "),
        ('basis = "a guess"\n', "", "packed: int4: basis: "),
        ("busy_w = 15.0", "busy_w = 3", "power: "),
        ("[power]", "[energy]", "unknown key 'energy'"),
        ("[memory]\n", "", "unknown key 'gb'"),
        ('description = "a board"\n', "memory = 1\n", "not valid TOML"),
        ("[memory]", "[memory", "not valid TOML"),
        (GOOD, "a = " + "[" * 5000, "not valid TOML"),
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


# ----------------------------------------------------------------------------------------- measured by others

OFF = 0.10
CONTEXT = 150
"""Tokens of context on average of such runs: a short prompt, and an answer of one or two hundred tokens."""
GEMMA = ModelShape("gemma-2b", 18, 2048, 16384, 8, 1, 256, 256000, is_tied=True)
QWEN = ModelShape("qwen1.5-1.8b", 24, 2048, 5504, 16, 16, 128, 151936)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A file of `gb`, and of so many billion weights, on one board."""

    board: str
    shape: ModelShape
    gb: float
    billions: float
    tokens_per_s: float
    source: str

    @property
    def filed(self) -> ModelShape:
        return replace(self.shape, filed_bytes=self.gb / self.billions)


PI_5, PI_4 = "raspberry-pi-5", "raspberry-pi-4"
ISSUES, OLLAMA = "geerlingguy/ai-benchmarks/issues", "aidatatools/ollama-benchmark/pull/9"
LLAMA_3B, LLAMA_8B, LLAMA_13B, LLAMA_7B, TINY = map(
    find_shape, ("llama-3.2-3b", "llama-3-8b", "llama-2-13b", "llama-2-7b", "tinyllama-1.1b")
)
PUBLISHED = tuple(
    Published(board=board, shape=shape, gb=gb, billions=billions, tokens_per_s=rate, source=source)
    for board, shape, gb, billions, rate, source in (
        (PI_5, LLAMA_3B, 2.02, 3.21, 4.88, f"{ISSUES}/7, 16 GB"),
        (PI_5, LLAMA_3B, 2.02, 3.21, 4.61, f"{ISSUES}/1, 8 GB"),
        (PI_5, LLAMA_8B, 4.92, 8.03, 2.17, f"{ISSUES}/7, Llama 3.1, Q4_K_M"),
        (PI_5, LLAMA_13B, 7.37, 13.02, 1.36, f"{ISSUES}/7, Q4_0"),
        (PI_5, TINY, 1.17, 1.10, 9.0, "justine.lol/matmul, Q8_0, llama.cpp 2024-03-26"),
        (PI_4, LLAMA_3B, 2.02, 3.21, 1.60, "geerlingguy/ai-benchmarks, Pi 400"),
        (PI_4, QWEN, 1.1, 1.84, 3.05, f"{OLLAMA}, Q4_0"),
        (PI_4, GEMMA, 1.7, 2.51, 1.83, f"{OLLAMA}, Q4_0"),
        ("phone-arm", LLAMA_7B, 3.79, 6.74, 1 / 0.378, "b4rtaz/distributed-llama/issues/10, Q40, 4 threads"),
    )
)
"""Sources are on GitHub, but for the one that names a place."""


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda each: f"{each.board}-{each.shape.name}")
def test_one_board_alone_is_foretold_as_others_measured_it(published: Published) -> None:
    place = site(published.board, find_profile(published.board))
    request = PlanRequest(
        sites=(replace(place, memory_bytes=64 << 30),),  # some of these boards have 16 GB
        network=Network(default=LinkSpec()),
        shape=published.filed,
        weights=weights_of(published.filed),
        precisions=(FILED,),
        drafter=None,
        context=512,
        typical_context=CONTEXT,
    )
    foretold = make_plan(request).forecast.tokens_per_s
    assert foretold == pytest.approx(published.tokens_per_s, rel=OFF), published.source


def test_a_prompt_on_a_pi_5_is_foretold_as_others_measured_it() -> None:
    """github.com/ggml-org/llama.cpp/pull/6928: 109 tokens of Llama 2 7B in Q4_0 took 13.459 s."""
    board, shape = find_profile(PI_5), replace(find_shape("llama-2-7b"), filed_bytes=3.79 / 6.74)
    layers_s = layers_curve(board, shape, FILED, shape.layers).seconds(109)
    assert layers_s + head_curve(board, shape, FILED).seconds(1) == pytest.approx(13.459, rel=OFF)
