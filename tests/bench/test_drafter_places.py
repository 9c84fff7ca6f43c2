"""Several models beside the target: where they run, what they cost, and that answers stay exact."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flowspec.bench.config import FIXED, DrafterPlacement, Setup
from flowspec.bench.drafter_places import drafting_curve, places_of
from flowspec.bench.outcome import EXACT
from flowspec.bench.simulated import run
from flowspec.bench.synthetic import Synthetic, synthetic_cases
from flowspec.core.protocol.messages import Sampling
from flowspec.plan.cost import drafter_curve
from flowspec.plan.profile import find_profile
from flowspec.plan.shape import find_shape
from flowspec.plan.timing import LinkSpec
from flowspec.sim.drafter_device import DrafterDeviceSpec
from tests.bench.benches import boards, synthetic

PI = find_profile("raspberry-pi-5")
FAR = LinkSpec(bandwidth_mbps=50, delay_s=0.002)
APART = DrafterPlacement(
    models=("mid", "draft-math"), shape=find_shape("llama-68m"), precision="float16", device=PI, link=FAR
)
OURS = Setup(name="continuous", method="continuous")


def test_models_share_the_board_that_they_are_on() -> None:
    near = DrafterPlacement(models=("big",), shape=find_shape("qwen3-0.6b"), precision="float16")
    testbed = boards(boards=(APART, near), head_slowdown=2.0)
    places = places_of(testbed, ["mid", "draft", "big", "draft-math"])
    assert places.boards == (DrafterDeviceSpec(drafters=(0, 3), link=FAR), DrafterDeviceSpec(drafters=(1, 2)))
    assert places.numbers == (0, None)
    pi = drafter_curve(PI, APART.shape, "float16").scaled(2.0)
    assert places.curves == (
        pi,
        drafting_curve(testbed),
        drafter_curve(testbed.head, near.shape, "float16").scaled(2.0),
        pi,
    )


def test_who_looks_up_texts_at_the_head_waits_for_no_model() -> None:
    testbed = boards(boards=(replace(APART, models=("mid", "ngram")),))
    places = places_of(testbed, ["draft", "suffix", "mid", "ngram"])
    assert [board.drafters for board in places.boards] == [(0,), (1,), (2, 3)]
    assert places.numbers == (None, None, 0)
    assert places.curves[0] == drafting_curve(testbed)
    assert places.curves[1].seconds(1) < places.curves[0].seconds(1)
    assert places.curves[3] == places.curves[2], "a board that a testbed names is that one's"


@pytest.mark.parametrize("chain", ["", FIXED])
def test_several_models_on_boards_of_their_own_give_the_plain_answer(chain: str) -> None:
    (case,) = synthetic_cases(1, [Sampling(temperature=1.0, seed=4)], 16)
    models = {
        name: drafter
        for name in ("draft", "mid")
        if (drafter := Synthetic(0.6, 1024).begin(case)()) is not None
    }
    found = run(synthetic(), boards(boards=(APART,)), replace(OURS, chain=chain), case, models)
    assert 0 < (found.record.oracle_s or 0.0) <= found.record.decode_s * (1 + 1e-9)
    assert found.record.agreement == EXACT
    assert found.experience.fusion.levels == ((0, 1) if chain else (0, 0))
    assert all(calibrator.weight > 0 for calibrator in found.experience.fusion.calibrators)
