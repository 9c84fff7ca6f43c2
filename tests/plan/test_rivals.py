"""What others would make of the same boards: formulas beside arithmetic by hand, random runs of the same
events, published figures, and the simulator's own methods."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from flowspec.bench.config import Setup
from flowspec.bench.simulated import run_many, sampling_curve, stage_curves
from flowspec.bench.synthetic import synthetic_cases
from flowspec.core.protocol.messages import Sampling
from flowspec.plan.accepted_length import EAGLE_2_LENGTHS
from flowspec.plan.cost import drafter_curve, row_bytes
from flowspec.plan.drafted_trees import tree_lengths
from flowspec.plan.memory import weights_of
from flowspec.plan.profile import DeviceProfile, find_profile
from flowspec.plan.rival_pipelines import (
    ALONE,
    LOCK_STEP,
    PLAIN,
    TENSOR_PARALLEL,
    TENSOR_PARALLEL_GUESSING,
    rivals_of,
)
from flowspec.plan.rivals import Guesser, Pipeline, Rated, always_one, chains, linear_windows, plain, trees
from flowspec.plan.shape import find_shape
from flowspec.plan.sites import Network, PlannedDrafter, PlanRequest, site
from flowspec.plan.tensor_parallel import TensorParallel, best_cut, can_cut
from flowspec.plan.timing import Curve, LinkSpec
from tests.bench.benches import boards
from tests.plan.shapes import shape_of

PING = LinkSpec(bandwidth_mbps=1000, delay_s=0.226e-3 / 2)
"""Between two Pi 5s on a switch (danielcorrea-hellomatik/distributed-llama)."""
HALF_MS = LinkSpec(bandwidth_mbps=1000, delay_s=0.5e-3)
"""As transfer times of 56 and 75 ms for 128 ways say, of b4rtaz/distributed-llama's pull request 64."""


def asked(board: str, count: int, model: str, link: LinkSpec = PING, acceptance: float = 0.8) -> PlanRequest:
    shape = find_shape(model)
    return PlanRequest(
        sites=tuple(site(f"{board}-{number}", find_profile(board)) for number in range(count)),
        network=Network(default=link),
        shape=shape,
        weights=weights_of(shape),
        precisions=("int4",),
        drafter=PlannedDrafter(name="eagle", shape=find_shape(f"eagle-{model}"), acceptance=acceptance),
        context=2048,
    )


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
    shape = shape_of("small", 3, 1024, 2048, 8, 8, 128, 4000)
    four = TensorParallel(
        boards=(board,) * 4,
        link=LinkSpec(bandwidth_mbps=100, delay_s=0.002),
        shape=shape,
        precision="float32",
    )
    weights = 3 * (4 * 1024 * 1024 + 3 * 1024 * 2048) + 4000 * 1024
    reading_s = weights * 4 / 10e9 / 4
    one_s = 0.002 + 3 * 1024 * 34 / 32 * 8 / 100e6
    logits_s = 0.002 + 3 / 4 * 4000 * 4 * 8 / 100e6
    assert four.pass_s(1, 0) == pytest.approx(reading_s + 3 * 0.0007 + 6 * one_s + logits_s, rel=1e-3)
    five_rows_s = 0.002 + 5 * 3 * 1024 * 34 / 32 * 8 / 100e6
    assert four.waits_s(5) == pytest.approx(6 * five_rows_s + logits_s)
    via = TensorParallel(
        boards=four.boards, link=four.link, shape=shape, precision="float32", through_root=True
    )
    assert via.waits_s(1) == pytest.approx(6 * 2 * one_s)


README, PULL_64 = "danielcorrea-hellomatik/distributed-llama README", "b4rtaz/distributed-llama/pull/64"


@pytest.mark.parametrize(
    ("boards", "model", "link", "through_root", "tokens_per_s", "off", "source"),
    [
        (4, "qwen3-30b-a3b", PING, False, 13.04, 0.1, "b4rtaz/distributed-llama, discussion 255"),
        (4, "llama-3-8b", PING, False, 6.85, 0.1, f"{README}: tuned system"),
        (4, "llama-3-8b", PING, False, 7.18, 0.1, f"{README}: patched, too"),
        (2, "llama-3-8b", HALF_MS, True, 3.07, 0.1, PULL_64),
        (4, "llama-3-8b", HALF_MS, True, 4.08, 0.15, PULL_64),
    ],
)
def test_tensor_parallelism_is_foretold_as_others_measured_it(
    boards: int, model: str, link: LinkSpec, through_root: bool, tokens_per_s: float, off: float, source: str
) -> None:
    """Tokens/s of distributed-llama on Pi 5s, and how far off the formula may be."""
    cut = TensorParallel(
        boards=(find_profile("raspberry-pi-5"),) * boards,
        link=link,
        shape=find_shape(model),
        precision="int4",
        through_root=through_root,
    )
    assert 1 / cut.pass_s(1, 100) == pytest.approx(tokens_per_s, rel=off), source


def test_boards_are_powers_of_two_and_only_known_models_are_cut() -> None:
    for count, model, used in ((8, "qwen3-30b-a3b", 4), (3, "llama-3-8b", 2), (8, "llama-3-8b", 8)):
        cut = best_cut(asked("raspberry-pi-5", count, model), "int4")
        assert cut is not None
        assert len(cut.boards) == used
    assert best_cut(asked("raspberry-pi-5", 4, "llama-3-70b"), "int4") is None
    assert best_cut(asked("raspberry-pi-5", 1, "llama-3-8b"), "int4") is None
    assert can_cut(find_shape("llama-3-8b"), "int4")
    assert not can_cut(find_shape("llama-3-8b"), "float16")
    assert not can_cut(find_shape("gpt-oss-20b"), "int4")
    found = rivals_of(asked("jetson-agx-orin", 4, "gpt-oss-20b"), 512)
    assert PLAIN in found
    assert TENSOR_PARALLEL not in found


@pytest.mark.parametrize(("acceptance", "length"), EAGLE_2_LENGTHS)
def test_the_best_tree_gives_what_eagle_2s_gives(acceptance: float, length: float) -> None:
    lengths = tree_lengths(acceptance)
    assert lengths[6, 61] == pytest.approx(length, rel=0.06)
    chain = sum(acceptance**guess for guess in range(5))
    assert lengths[4, 5] >= 0.97 * chain, "the best tree of five nodes is no worse than a chain of them"
    assert (lengths[4, 1:] >= lengths[3, 1:]).all()
    assert (lengths[1:, 2:] >= lengths[1:, 1:-1]).all()


def pipeline() -> Pipeline:
    """A slot of w rows takes 10 + w ms, a trip four slots and 4 ms of links and half a millisecond of the
    head."""
    return Pipeline(
        stages=(Curve(fixed_s=0.01, extra_row_s=0.001),) * 4,
        sampling=Curve(),
        hops=(LinkSpec(delay_s=0.0008),) * 5,
        row_bytes=0,
        context=0,
    )


def test_chains_and_plain_decoding_by_hand() -> None:
    pipe = pipeline()
    assert pipe.slot_s(3) == pytest.approx(0.013)
    assert pipe.trip_s(3) == pytest.approx(4 * 0.013 + 0.0045)
    assert plain(pipe.trip_s).tokens_per_s == pytest.approx(1 / 0.0485)
    by_hand = {
        count: sum(0.6**guess for guess in range(count + 1))
        / (count * 0.005 + 4 * (0.011 + count / 1000) + 0.0045)
        for count in range(1, 9)
    }
    found = chains(pipe.trip_s, Guesser(acceptance=0.6, pass_s=lambda rows: 0.005))
    best = max(by_hand, key=lambda count: by_hand[count])
    assert found.how == f"chains of {best}"
    assert found.tokens_per_s == pytest.approx(by_hand[best])


def runs(acceptance: float, count: int, seed: int) -> list[int]:
    """How many guesses are right in a row, again and again."""
    chance = random.Random(seed)
    return [int(math.log(1 - chance.random()) / math.log(acceptance)) for _ in range(count)]


@pytest.mark.parametrize("acceptance", [0.5, 0.86])
@pytest.mark.parametrize("formula", [linear_windows, always_one])
def test_windows_and_pipe_infer_take_as_long_as_when_each_is_sent_and_awaited(
    formula: Callable[..., Rated], acceptance: float
) -> None:
    """Windows, and PipeInfer's runs, are sent one by one in a run of the same events without a formula."""
    pipe, draft_s = pipeline(), 0.004
    found = formula(pipe, Guesser(acceptance=acceptance, pass_s=lambda rows: draft_s))
    width = int(found.how.split()[-1])
    every_s = max(pipe.slot_s(width), width * draft_s)
    tokens, now_s = 0, 0.0
    for right in runs(acceptance, 20_000, 1):
        tokens += right + 1
        if formula is always_one and right == 0:  # what the token alone gives
            now_s += pipe.trip_s(1)
            continue
        begun_s = width * draft_s  # the first window has the root, and verifies its guesses
        if formula is always_one:
            begun_s = max(begun_s, pipe.slot_s(1))
        more = max(0, -(-right // width) - 1)
        now_s += begun_s + more * every_s + pipe.trip_s(width + (formula is linear_windows))
    assert tokens / now_s == pytest.approx(found.tokens_per_s, rel=0.03)


# ----------------------------------------------------------------------------------- beside the simulator


def test_plain_decoding_takes_as_long_as_in_the_simulator() -> None:
    testbed, tokens = boards(3, "raspberry-pi-5", link=PING), 40
    (case,) = synthetic_cases(1, [Sampling()], tokens, 11)
    world = run_many(testbed, Setup(name="one", method="ar"), [case], {}, 256)
    times = world.answers[0][0].times_s
    pipe = Pipeline(
        stages=tuple(stage_curves(testbed)),
        sampling=sampling_curve(testbed),
        hops=(PING,) * 4,
        row_bytes=row_bytes(testbed.shape, testbed.precision),
        context=64 + tokens // 2,
    )
    rate = (len(times) - 1) / (times[-1] - times[0])
    assert plain(pipe.trip_s).tokens_per_s == pytest.approx(rate, rel=0.01)


# ------------------------------------------------------------------------------------------------- all rivals


def test_rivals_of_four_pis() -> None:
    found = rivals_of(asked("raspberry-pi-5", 4, "llama-3-8b"), 512)
    assert found[ALONE].boards == 1
    assert found[ALONE].rated.how == "plain: no drafter fits"
    assert found[TENSOR_PARALLEL].boards == 4
    for better, than in ((TENSOR_PARALLEL_GUESSING, TENSOR_PARALLEL), (LOCK_STEP, PLAIN)):
        assert found[better].rated.tokens_per_s >= found[than].rated.tokens_per_s
    slow = rivals_of(asked("raspberry-pi-5", 4, "llama-3-8b", LinkSpec(bandwidth_mbps=50, delay_s=0.02)), 512)
    assert slow[TENSOR_PARALLEL].rated.tokens_per_s < slow[PLAIN].rated.tokens_per_s
    assert slow[TENSOR_PARALLEL].first_token_s > found[TENSOR_PARALLEL].first_token_s
    assert rivals_of(asked("raspberry-pi-5", 4, "llama-3-70b"), 512) == {}


@pytest.mark.parametrize(
    ("board", "least", "most"), [("jetson-agx-orin", 1.2, 2.0), ("raspberry-pi-5", 0.5, 1.05)]
)
def test_trees_pay_where_rows_cost_nothing(board: str, least: float, most: float) -> None:
    """A Jetson runs some ninety rows in the time of one, a Pi computes each."""
    curve = drafter_curve(find_profile(board), find_shape("llama-3-8b"), "int4")
    guesser = Guesser(acceptance=0.7, pass_s=lambda rows: 0.01)
    tree, chain = (rate(curve.seconds, guesser) for rate in (trees, chains))
    assert least <= tree.tokens_per_s / chain.tokens_per_s <= most
