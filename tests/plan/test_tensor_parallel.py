"""distributed-llama's tensor parallelism beside arithmetic by hand and published figures."""

from __future__ import annotations

import pytest

from flowspec.plan.memory import weights_of
from flowspec.plan.profile import DeviceProfile, find_profile
from flowspec.plan.shape import ModelShape, find_shape
from flowspec.plan.sites import Network, PlanRequest, site
from flowspec.plan.tensor_parallel import best_cut, token_s
from flowspec.plan.timing import LinkSpec

PING = LinkSpec(bandwidth_mbps=1000, delay_s=0.226e-3 / 2)
"""Between two Pi 5s on a switch (danielcorrea-hellomatik/distributed-llama)."""


def test_tensor_parallelism_reads_a_part_and_waits_twice_a_layer() -> None:
    board = DeviceProfile(
        name="reader",
        memory_gb=8,
        memory_gb_per_s=10,
        memory_efficiency=1.0,
        tflops={"float32": 1e6},
        compute_efficiency=1.0,
        layer_us=1000,
    )
    shape = ModelShape("small", 3, 1024, 2048, 8, 8, 128, 4000)
    weights = 3 * (4 * 1024 * 1024 + 3 * 1024 * 2048) + 4000 * 1024
    reading_s = weights * 4 / 10e9 / 4
    one_s = 0.002 + 3 * 1024 * 34 / 32 * 8 / 100e6
    logits_s = 0.002 + 3 / 4 * 4000 * 4 * 8 / 100e6
    found = token_s([board] * 4, LinkSpec(bandwidth_mbps=100, delay_s=0.002), shape, "float32", 0)
    assert found == pytest.approx(reading_s + 3 * 0.0007 + 6 * one_s + logits_s, rel=1e-3)


README = "danielcorrea-hellomatik/distributed-llama README"


@pytest.mark.parametrize(
    ("model", "tokens_per_s", "source"),
    [
        ("qwen3-30b-a3b", 13.04, "b4rtaz/distributed-llama, discussion 255"),
        ("llama-3-8b", 6.85, f"{README}: tuned system"),
        ("llama-3-8b", 7.18, f"{README}: patched, too"),
    ],
)
def test_tensor_parallelism_is_predicted_as_others_measured_it(
    model: str, tokens_per_s: float, source: str
) -> None:
    """Tokens/s of distributed-llama on four Pi 5s."""
    boards = [find_profile("raspberry-pi-5")] * 4
    found = 1 / token_s(boards, PING, find_shape(model), "int4", 100)
    assert found == pytest.approx(tokens_per_s, rel=0.1), source


@pytest.mark.parametrize(
    ("count", "model", "precision", "used"),
    [
        (8, "qwen3-30b-a3b", "int4", 4),
        (3, "llama-3-8b", "int4", 2),
        (8, "llama-3-8b", "int4", 8),
        (1, "llama-3-8b", "int4", None),
        (4, "llama-3-8b", "float16", None),
        (4, "llama-3-70b", "int4", None),
        (8, "gpt-oss-20b", "int4", None),
    ],
)
def test_boards_are_powers_of_two_and_only_known_models_are_cut(
    count: int, model: str, precision: str, used: int | None
) -> None:
    shape = find_shape(model)
    request = PlanRequest(
        sites=tuple(site(f"pi-{number}", find_profile("raspberry-pi-5")) for number in range(count)),
        network=Network(default=PING),
        shape=shape,
        weights=weights_of(shape),
        precisions=(precision,),
        drafter=None,
        context=2048,
    )
    cut = best_cut(request, precision)
    assert (cut and cut[1]) == used
