"""Chances begin as the drafter's own confidences, become what was seen, and follow when that changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.head.calibration import CHANCE_MAX, Calibrator

CONFIDENCES = st.floats(0, 1)
SEEN = st.lists(st.tuples(CONFIDENCES, st.booleans()), max_size=60)


def taught(seen: list[tuple[float, bool]]) -> Calibrator:
    calibrator = Calibrator()
    for confidence, is_right in seen:
        calibrator.observe(confidence, is_right=is_right)
    return calibrator


@given(CONFIDENCES)
def test_before_anything_is_seen_the_drafter_is_believed(confidence: float) -> None:
    assert Calibrator().chance(confidence) == pytest.approx(min(CHANCE_MAX, confidence))
    assert Calibrator().error == 0


@pytest.mark.parametrize(("confidence", "share"), [(0.95, 0.5), (0.95, 0.0), (0.2, 0.8), (0.01, 0.3)])
def test_what_is_seen_often_outweighs_what_the_drafter_says(confidence: float, share: float) -> None:
    seen = [(confidence, index % 10 < 10 * share) for index in range(400)]
    assert taught(seen).chance(confidence) == pytest.approx(share, abs=0.03)


def test_a_drafter_that_turns_useless_is_found_out_and_forgiven() -> None:
    calibrator = taught([(0.8, True)] * 2000)
    assert calibrator.chance(0.8) > 0.98
    for _ in range(1200):
        calibrator.observe(0.8, is_right=False)
    assert calibrator.chance(0.8) < 0.07
    for _ in range(1200):
        calibrator.observe(0.8, is_right=True)
    assert calibrator.chance(0.8) > 0.93


@given(SEEN, CONFIDENCES)
def test_a_chance_is_a_chance_and_never_certain(seen: list[tuple[float, bool]], confidence: float) -> None:
    assert 0 <= taught(seen).chance(confidence) <= CHANCE_MAX


@given(SEEN, CONFIDENCES)
def test_being_right_never_lowers_a_chance_and_being_wrong_never_raises_it(
    seen: list[tuple[float, bool]], confidence: float
) -> None:
    before = taught(seen).chance(confidence)
    assert taught([*seen, (confidence, True)]).chance(confidence) >= before - 1e-9
    assert taught([*seen, (confidence, False)]).chance(confidence) <= before + 1e-9


def test_the_error_is_the_distance_between_word_and_deed_weighted_by_how_often() -> None:
    assert taught([(0.7, False)] * 50).error == pytest.approx(0.7)
    assert taught([(0.5, index % 2 == 0) for index in range(400)]).error == pytest.approx(0, abs=2e-3)
    mixed = taught([(0.9, False), (0.9, False), (0.1, False), (0.1, False), (0.1, False), (0.1, False)])
    assert mixed.error == pytest.approx((2 * 0.9 + 4 * 0.1) / 6, rel=1e-2)
