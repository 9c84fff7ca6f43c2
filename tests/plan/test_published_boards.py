"""One board alone, as others measured it with llama.cpp, ollama (which runs llama.cpp) or distributed-llama:
what the planner foretells of it from the shipped profile. Figures, models and files are those of the
publications; profiles say what was fitted to them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from flowspec.core.protocol.precision import FILED
from flowspec.plan.cost import head_curve, layers_curve
from flowspec.plan.memory import weights_of
from flowspec.plan.planner import make_plan
from flowspec.plan.profile import find_profile
from flowspec.plan.shape import ModelShape, find_shape
from flowspec.plan.sites import Network, PlanRequest, site
from flowspec.plan.timing import LinkSpec

OFF = 0.10
CONTEXT = 150
"""Tokens of context on average of such runs: a short prompt, and an answer of one or two hundred tokens."""
GEMMA = ModelShape(
    name="gemma-2b",
    layers=18,
    hidden=2048,
    intermediate=16384,
    heads=8,
    kv_heads=1,
    head_dim=256,
    vocabulary=256000,
    is_tied=True,
)
QWEN = ModelShape(
    name="qwen1.5-1.8b",
    layers=24,
    hidden=2048,
    intermediate=5504,
    heads=16,
    kv_heads=16,
    head_dim=128,
    vocabulary=151936,
)


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
