"""Answers in virtual time: exact with every method on every testbed, reproducible, and timed as the cost
model says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from flowspec.bench import simulated
from flowspec.bench.config import Setup
from flowspec.bench.drafting import open_drafting
from flowspec.bench.guesses import Maker
from flowspec.bench.outcome import EXACT, WRONG
from flowspec.bench.plain import PlainCase, make_samplings, plain_cases
from flowspec.bench.random_guesses import Randoms
from flowspec.bench.simulated import experiment, run, sampling_curve, stage_curves
from flowspec.bench.summary import summarise
from flowspec.bench.synthetic import Synthetic, synthetic_cases
from flowspec.core.head.head import Experience
from flowspec.core.methods import METHODS, options_of
from flowspec.core.protocol.messages import Sampling
from flowspec.draft.ranking import Ranker
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.prompts import Prompt
from flowspec.plan.cost import row_bytes
from flowspec.plan.shape import find_shape
from flowspec.sim.language import AnswerLanguage
from tests.bench.benches import boards, drafters, synthetic
from tests.bench.cases import STOP, made

NEW_TOKENS = 12
BUNDLED_TOKENS = 8
BENCH = synthetic()
AR = Setup(name="ar", method="ar")
OURS = Setup(name="a", method="continuous")
TEXT = "Continue the play:\nDUKE:\nWho comes so late to our gate?"
LEAST: dict[str, Any] = {"chain": ()}
"""Of the parameters that an experiment may give; 1 of all others."""
LARGEST: dict[str, Any] = {"value_min": 1.0, "window_slack": 16.0, "width": 16, "chain": (0,)}
"""256 of all others."""


def plain_or_published(setup: Setup) -> list[Setup]:
    return (
        [setup, replace(setup, published=True)]
        if setup.method not in ("ar", "tree-sd", "continuous")
        else [setup]
    )


def check_all(case: PlainCase, make: Maker, counts: Sequence[int]) -> None:
    """Every method on so many stages, on four of them twice."""
    for stages in counts:
        testbed = boards(stages)
        rates: dict[str, float] = {}
        for setup in (
            each for method in METHODS for each in plain_or_published(Setup(name=method, method=method))
        ):
            first = run(BENCH, testbed, setup, case, drafters(setup, make)).record
            assert first.agreement == EXACT
            if stages == 4:
                again = run(BENCH, testbed, setup, case, drafters(setup, make)).record
                assert again == first, "a run is reproducible, digest included"
            assert first.new_tokens == len(case.new_tokens)
            assert len(first.stage_busy) == stages
            assert first.oracle_s is not None
            assert 0 < first.oracle_s <= first.decode_s * (1 + 1e-9)
            if case.domain != "synthetic":
                continue  # answers too short, and guesses that another training may change
            if setup.published:
                # The head's board takes `lm_head` off the last stage, which may be worth a little where there
                # are few.
                assert first.tokens_per_s <= rates[setup.method] * 1.05
            else:
                rates[setup.method] = first.tokens_per_s
            if setup.method == "ar":
                assert first.oracle_s == pytest.approx(first.decode_s, rel=0.02)
                assert (first.S, first.rho, first.dropped_rows) == (1, 0, 0)


@pytest.fixture(scope="module")
def bundled() -> list[PlainCase]:
    """A prompt at temperatures 0 and 1."""
    prompt = Prompt(prompt_id="p", domain="plays", turns=(TEXT,))
    return plain_cases(ModelFiles(BUNDLED), [prompt], make_samplings((0.0, 1.0), (3,)), BUNDLED_TOKENS)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_method_is_exact_with_a_synthetic_drafter(temperature: float) -> None:
    (case,) = synthetic_cases(1, [Sampling(temperature=temperature, seed=5)], NEW_TOKENS)
    check_all(case, Synthetic(0.6, 1024).begin(case), (1, 4))


@pytest.mark.parametrize(("at", "coupled"), [(0, True), (1, True), (1, False)])
def test_every_method_is_exact_with_the_bundled_drafter(
    bundled: list[PlainCase], at: int, coupled: bool
) -> None:
    make = open_drafting(BUNDLED, ModelFiles(BUNDLED), coupled=coupled).begin(bundled[at])
    check_all(bundled[at], make, (4,))


@pytest.mark.parametrize("method", [method for method in METHODS if options_of(method)])
def test_every_method_is_exact_with_the_least_and_the_most_that_an_experiment_may_ask_for(
    method: str,
) -> None:
    (case,) = synthetic_cases(1, [Sampling()], NEW_TOKENS)
    for options in (
        {name: LEAST.get(name, 1) for name in options_of(method)},
        {name: LARGEST.get(name, 256) for name in options_of(method)},
    ):
        setup = Setup(name="a", method=method, options=options)
        assert (
            run(
                BENCH, boards(3), setup, case, drafters(setup, Synthetic(0.6, 1024).begin(case))
            ).record.agreement
            == EXACT
        )


@pytest.mark.parametrize(("stages", "board"), [(1, "jetson-orin-nano"), (8, "raspberry-pi-5")])
@pytest.mark.parametrize("published", [False, True])
def test_plain_decoding_takes_one_trip_for_each_token(stages: int, board: str, published: bool) -> None:
    testbed = boards(stages, board, head_s=0.0007, slowdown=1.5, head_slowdown=1.5)
    (case,) = synthetic_cases(1, [Sampling()], NEW_TOKENS)
    record = run(BENCH, testbed, replace(AR, published=published), case, {}).record
    passes_s = 0.0
    for place in range(1, NEW_TOKENS):  # the prompt gave the first token
        context = len(case.prompt) + place - 1
        passes_s += sum(curve.seconds(1, context) for curve in stage_curves(testbed)) + sampling_curve(
            testbed
        ).seconds(1)
    row = row_bytes(testbed.shape, testbed.precision)
    hops = stages + 1
    rows = stages if published else stages - 1  # hidden states also travel back
    links_s = hops * testbed.link.delay_s + rows * testbed.link.transfer_s(row) + testbed.head_s
    assert record.decode_s == pytest.approx(passes_s + (NEW_TOKENS - 1) * links_s, rel=2e-3)
    assert record.decode_s > passes_s + (NEW_TOKENS - 1) * links_s, "headers travel, too"
    assert record.tokens_per_s == (NEW_TOKENS - 1) / record.decode_s
    assert record.rows == stages * (len(case.prompt) + NEW_TOKENS - 1)


def test_plain_decoding_is_far_from_what_an_oracle_does_with_the_guesses_of_others() -> None:
    (case,) = synthetic_cases(1, [Sampling()], 24)
    make, setups = Synthetic(0.8, 1024).begin(case), (AR, OURS, Setup(name="tree-sd", method="tree-sd"))
    records = [run(BENCH, boards(4), setup, case, drafters(setup, make)).record for setup in setups]
    (table,) = summarise("a", "simulated", records)["tables"]
    plain, ours, tree = (table["statistics"][setup.name] for setup in setups)
    assert plain["own_oracle_share"] == pytest.approx(1, rel=0.02)
    assert plain["oracle_share"] < 0.4 < ours["oracle_share"] <= ours["own_oracle_share"] <= 1
    assert tree["oracle_share"] <= tree["own_oracle_share"] <= 1


def test_where_the_head_verifies_the_hidden_states_of_all_rows_travel_back() -> None:
    (case,) = synthetic_cases(1, [Sampling()], NEW_TOKENS)
    testbed = boards(2)
    plain, published = (
        run(BENCH, testbed, replace(AR, published=each), case, {}).record for each in (False, True)
    )
    assert published.rows == plain.rows
    assert published.network_bytes - plain.network_bytes == plain.rows // 2 * row_bytes(
        testbed.shape, testbed.precision
    )


def test_boards_take_energy_while_they_wait_and_more_while_they_compute() -> None:
    (case,) = synthetic_cases(1, [Sampling()], NEW_TOKENS)
    testbed = boards(4)
    record = run(BENCH, testbed, AR, case, {}).record
    whole_s = record.time_to_first_token_s + record.decode_s
    board = testbed.head
    busy_s = sum(record.stage_busy) * whole_s
    assert record.energy_j == pytest.approx(
        5 * board.idle_w * whole_s + (board.busy_w - board.idle_w) * busy_s, rel=0.02
    )
    drafted = run(BENCH, testbed, OURS, case, drafters(OURS, Synthetic(0.6, 1024).begin(case))).record
    assert (
        5 * board.idle_w
        < drafted.energy_j / (drafted.time_to_first_token_s + drafted.decode_s)
        < 5 * board.busy_w
    )


def test_on_one_board_a_correction_waits_for_the_drafter() -> None:
    """A whole tree a time is the best that one board can do; `continuous` sends less than one only where that
    is faster."""
    testbed = boards(
        1,
        "jetson-agx-orin",
        shape=find_shape("qwen3-32b"),
        drafter_shape=find_shape("eagle-qwen3-32b"),
        precision="int4",
    )
    rates = {}
    for setup in (OURS, Setup(name="tree-sd", method="tree-sd")):
        experience, spent_s = None, 0.0
        for case in synthetic_cases(3, [Sampling()], 64):
            made = drafters(setup, Synthetic(0.635, 1024, balanced=True).begin(case))
            found = run(BENCH, testbed, setup, case, made, experience)
            assert found.record.agreement == EXACT
            spent_s += found.record.decode_s if experience is not None else 0.0
            experience = found.experience
        rates[setup.name] = 1 / spent_s
    assert rates[OURS.name] > rates["tree-sd"]


def test_an_answer_that_is_not_the_plain_one_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = synthetic_cases(1, [Sampling()], NEW_TOKENS)
    for setup in (AR, OURS):
        make = Synthetic(0.6, 1024).begin(case)
        for at in (0, NEW_TOKENS - 1):
            other = (*case.answer[:at], case.answer[at] ^ 1, *case.answer[at + 1 :])

            def tampered(answers: Any, said: tuple[int, ...] = other) -> AnswerLanguage:
                return AnswerLanguage({prompt: said for prompt in answers})

            with monkeypatch.context() as patch:
                patch.setattr(simulated, "AnswerLanguage", tampered)
                assert run(BENCH, boards(), setup, case, drafters(setup, make)).record.agreement == WRONG
        assert run(BENCH, boards(), setup, case, drafters(setup, make)).record.agreement == EXACT


def test_an_answer_that_ends_where_the_plain_one_goes_on_is_wrong() -> None:
    for answer in (
        (20, STOP, 22, 23),
        (20, 21, 22),
    ):  # worlds stop at a stop token, and nowhere before the longest answer
        assert run(BENCH, boards(), AR, made("a", answer), {}).record.agreement == WRONG


@pytest.mark.parametrize(("board", "temperature"), [("jetson-orin-nano", 1.0), ("raspberry-pi-5", 0.0)])
def test_a_useless_drafter_costs_next_to_nothing(board: str, temperature: float) -> None:
    case = made("a", (*range(20, 49), STOP), sampling=Sampling(temperature=temperature, seed=3))
    testbed = boards(4, board)
    make = Randoms(Ranker(64), 64, 1024).begin(case)
    experience: Experience | None = None
    one = partial(run, BENCH, testbed)
    for _ in range(2):  # as in a session that has answered before
        found = one(OURS, case, drafters(OURS, make), experience)
        experience = found.experience
    assert found.record.agreement == EXACT
    assert found.record.tokens_per_s >= 0.95 * one(AR, case, {}).record.tokens_per_s


def test_whatever_is_slower_about_a_testbed_makes_answers_slower() -> None:
    (case,) = synthetic_cases(1, [Sampling()], NEW_TOKENS)
    base = boards(4)
    others = {
        "slow": replace(base, slowdown=2.0),
        "far": replace(base, link=replace(base.link, delay_s=0.02)),
        "narrow": replace(base, link=replace(base.link, bandwidth_mbps=5)),
        "busy head": replace(base, head_s=0.01),
    }
    make = Synthetic(0.6, 1024).begin(case)
    for setup in (AR, OURS):
        plain = run(BENCH, base, setup, case, drafters(setup, make)).record
        for name, testbed in others.items():
            record = run(BENCH, testbed, setup, case, drafters(setup, make)).record
            assert record.tokens_per_s < plain.tokens_per_s, name
            assert record.agreement == EXACT


def test_states_that_drafters_read_are_captured_where_their_layers_are() -> None:
    testbed = boards(4)
    layers = testbed.shape.layers
    size = row_bytes(testbed.shape, testbed.precision)
    plain = experiment(testbed, OURS, 1024, ["a"])
    assert (plain.row_bytes, plain.captured) == (size, ())
    first, second = testbed.layers[0], sum(testbed.layers[:2])
    depths = tuple(layer / layers for layer in (0, first - 1, first, second, layers))
    found = experiment(testbed, OURS, 1024, ["a"], depths)
    assert (found.row_bytes, found.feature_bytes) == (size, size), "rows carry none of them"
    assert found.captured == (2, 1, 1, 1), "what comes out of the last layer is the last stage's"
