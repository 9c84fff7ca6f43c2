"""Answers in virtual time: exact with every method, reproducible, and timed as the cost model says; also with
several models beside the target, wherever they run.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from flowspec.bench import simulated
from flowspec.bench.cases import synthetic_cases
from flowspec.bench.drafters import Randoms, Synthetic
from flowspec.bench.experiment import FIXED, DrafterPlacement, Setup
from flowspec.bench.records import EXACT, WRONG
from flowspec.bench.simulated import cluster_of, drafting_curve, places_of, run, sampling_curve, stage_curves
from flowspec.core.head.head import Experience
from flowspec.core.methods import METHODS
from flowspec.core.protocol.messages import Sampling
from flowspec.draft.ranking import Ranker
from flowspec.plan.cost import drafter_curve, row_bytes
from flowspec.plan.profile import find_profile
from flowspec.plan.shape import find_shape
from flowspec.sim.drafter_device import DrafterDeviceSpec
from flowspec.sim.language import AnswerLanguage
from tests.bench.benches import boards, drafters, synthetic
from tests.bench.cases import STOP, made

NEW_TOKENS = 12
TINY = synthetic()
AR = Setup(name="ar", method="ar")
OURS = Setup(name="a", method="continuous")
(CASE,) = synthetic_cases(1, [Sampling()], NEW_TOKENS)
UNPUBLISHED = ("ar", "tree-sd", "continuous")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_method_is_exact_and_says_the_same_each_time(temperature: float) -> None:
    (case,) = synthetic_cases(1, [Sampling(temperature=temperature, seed=5)], NEW_TOKENS)
    make, testbed = Synthetic(case, 1024, 0.6).drafter, boards(4)
    for method in METHODS:
        rates = []
        for published in (False, True)[: 1 if method in UNPUBLISHED else 2]:
            setup = Setup(name=method, method=method, published=published)
            first, again = (run(TINY, testbed, setup, case, drafters(setup, make)).record for _ in range(2))
            assert again == first, "digest included"
            assert (first.agreement, first.new_tokens) == (EXACT, len(case.new_tokens))
            rates.append(first.tokens_per_s)
        # As published the head's board takes `lm_head` off the last stage, which may be worth a little.
        assert rates[-1] <= rates[0] * 1.05


@pytest.mark.parametrize(
    ("stages", "board", "published"), [(1, "jetson-orin-nano", False), (8, "raspberry-pi-5", True)]
)
def test_plain_decoding_takes_one_trip_for_each_token(stages: int, board: str, published: bool) -> None:
    testbed = boards(stages, board, head_s=0.0007, slowdown=1.5, head_slowdown=1.5)
    record = run(TINY, testbed, replace(AR, published=published), CASE, {}).record
    passes_s = 0.0
    for place in range(1, NEW_TOKENS):  # the prompt gave the first token
        context = len(CASE.prompt) + place - 1
        passes_s += sum(curve.seconds(1, context) for curve in stage_curves(testbed))
        passes_s += sampling_curve(testbed).seconds(1)
    rows = stages if published else stages - 1  # hidden states also travel back
    links_s = (stages + 1) * testbed.link.delay_s + testbed.head_s
    links_s += rows * testbed.link.transfer_s(row_bytes(testbed.shape, testbed.precision))
    assert record.decode_s == pytest.approx(passes_s + (NEW_TOKENS - 1) * links_s, rel=2e-3)
    assert record.decode_s > passes_s + (NEW_TOKENS - 1) * links_s, "headers travel, too"
    assert record.tokens_per_s == (NEW_TOKENS - 1) / record.decode_s
    assert (record.S, record.rho, record.dropped_rows) == (1, 0, 0)
    assert record.rows == stages * (len(CASE.prompt) + NEW_TOKENS - 1)
    whole_s, device = record.whole_s, testbed.head
    waiting_j = (stages + 1) * device.idle_w * whole_s
    working_j = (device.busy_w - device.idle_w) * sum(record.stage_busy) * whole_s
    assert record.energy_j == pytest.approx(waiting_j + working_j, rel=0.02)


@pytest.mark.parametrize("setup", [AR, OURS], ids=lambda setup: setup.method)
def test_an_answer_that_is_not_the_plain_one_is_wrong(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    make = Synthetic(CASE, 1024, 0.6).drafter
    for at in (0, NEW_TOKENS - 1):
        other = (*CASE.answer[:at], CASE.answer[at] ^ 1, *CASE.answer[at + 1 :])

        def tampered(answers: Any, said: tuple[int, ...] = other) -> AnswerLanguage:
            return AnswerLanguage({prompt: said for prompt in answers})

        with monkeypatch.context() as patch:
            patch.setattr(simulated, "AnswerLanguage", tampered)
            assert run(TINY, boards(), setup, CASE, drafters(setup, make)).record.agreement == WRONG
    assert run(TINY, boards(), setup, CASE, drafters(setup, make)).record.agreement == EXACT
    # Worlds stop at a stop token, and nowhere before the longest answer.
    for answer in ((20, STOP, 22, 23), (20, 21, 22)):
        assert run(TINY, boards(), AR, made("a", answer), {}).record.agreement == WRONG


def test_a_useless_drafter_costs_next_to_nothing() -> None:
    case = made("a", (*range(20, 49), STOP), sampling=Sampling(temperature=1.0, seed=3))
    make = Randoms(case, 1024, Ranker(64), 64).drafter
    experience: Experience | None = None
    one = partial(run, TINY, boards(4))
    for _ in range(2):  # as in a session that has answered before
        found = one(OURS, case, drafters(OURS, make), experience)
        experience = found.experience
    assert found.record.agreement == EXACT
    assert found.record.tokens_per_s >= 0.95 * one(AR, case, {}).record.tokens_per_s


@pytest.mark.parametrize("setup", [AR, OURS], ids=lambda setup: setup.method)
def test_whatever_is_slower_about_a_testbed_makes_answers_slower(setup: Setup) -> None:
    base, make = boards(4), Synthetic(CASE, 1024, 0.6).drafter
    usual, *slower = (
        run(TINY, testbed, setup, CASE, drafters(setup, make)).record.tokens_per_s
        for testbed in (
            base,
            replace(base, slowdown=2.0),
            replace(base, link=replace(base.link, delay_s=0.02)),
            replace(base, link=replace(base.link, bandwidth_mbps=5)),
            replace(base, head_s=0.01),
        )
    )
    assert max(slower) < usual


def test_states_that_drafters_read_are_captured_where_their_layers_are() -> None:
    testbed = boards(4)
    layers, size = testbed.shape.layers, row_bytes(testbed.shape, testbed.precision)
    plain = cluster_of(testbed, OURS, 1024, ["a"])
    assert (plain.row_bytes, plain.captured) == (size, ())
    first, second = testbed.layers[0], sum(testbed.layers[:2])
    depths = tuple(layer / layers for layer in (0, first - 1, first, second, layers))
    found = cluster_of(testbed, OURS, 1024, ["a"], depths)
    assert (found.row_bytes, found.feature_bytes) == (size, size), "rows carry none of them"
    assert found.captured == (2, 1, 1, 1), "what comes out of the last layer is the last stage's"


PI = find_profile("raspberry-pi-5")
APART = DrafterPlacement(models=("mid", "draft-math"), shape=find_shape("llama-68m"), device=PI)


def test_models_share_the_board_that_they_are_on_and_who_looks_up_texts_waits_for_none() -> None:
    near = DrafterPlacement(models=("big",), shape=find_shape("qwen3-0.6b"))
    testbed = boards(boards=(APART, near), head_slowdown=2.0)
    places = places_of(testbed, ["mid", "draft", "big", "draft-math"])
    assert places.boards == (
        DrafterDeviceSpec(drafters=(0, 3), link=testbed.link),
        DrafterDeviceSpec(drafters=(1, 2)),
    )
    assert places.places == (0, None)
    pi = drafter_curve(PI, APART.shape, "float16").scaled(2.0)
    assert places.curves == (
        pi,
        drafting_curve(testbed),
        drafter_curve(testbed.head, near.shape, "float16").scaled(2.0),
        pi,
    )
    testbed = boards(boards=(replace(APART, models=("mid", "ngram")),))
    places = places_of(testbed, ["draft", "suffix", "mid", "ngram"])
    assert [board.drafters for board in places.boards] == [(0,), (1,), (2, 3)]
    assert places.places == (None, None, 0)
    assert places.curves[0] == drafting_curve(testbed)
    assert places.curves[1].seconds(1) < places.curves[0].seconds(1)
    assert places.curves[3] == places.curves[2], "a board that a testbed names is that one's"


@pytest.mark.parametrize("chain", ["", FIXED])
def test_several_models_on_boards_of_their_own_give_the_plain_answer(chain: str) -> None:
    (case,) = synthetic_cases(1, [Sampling(temperature=1.0, seed=4)], 16)
    models = {
        name: drafter
        for name in ("draft", "mid")
        if (drafter := Synthetic(case, 1024, 0.6).drafter()) is not None
    }
    found = run(synthetic(), boards(boards=(APART,)), replace(OURS, chain=chain), case, models)
    assert found.record.agreement == EXACT
    assert found.experience.fusion.levels == ((0, 1) if chain else (0, 0))
    assert all(calibrator.weight > 0 for calibrator in found.experience.fusion.calibrators)
