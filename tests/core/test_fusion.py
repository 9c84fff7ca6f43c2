"""How what several models propose below a node becomes one ranking, and how confidences become chances."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.head.calibration import CHANCE_MAX, Calibrator
from flowspec.core.head.fusion import Fusion, Offers

OFFERS = st.dictionaries(st.integers(0, 5), st.floats(0.001, 0.999), min_size=1, max_size=4).map(
    lambda found: tuple(sorted(found.items(), key=lambda offer: -offer[1]))
)


def plain(*levels: int, fuses: bool = True) -> Fusion:
    return Fusion(levels, is_calibrated=False, fuses=fuses)


def test_agreement_makes_a_token_likelier_and_a_higher_level_has_the_last_word() -> None:
    found: dict[int, Offers] = {0: ((7, 0.6), (8, 0.3)), 1: ((8, 0.5), (7, 0.2))}
    assert dict(plain(0, 0).rank(found, [1, 1]).offers) == pytest.approx({7: 1 - 0.4 * 0.8, 8: 1 - 0.7 * 0.5})
    assert dict(plain(0, 0).rank(found, [1, 0.5]).offers) == pytest.approx(
        {7: 1 - 0.4 * 0.9, 8: 1 - 0.7 * 0.75}
    )
    assert dict(plain(0, 0, fuses=False).rank(found, [1, 0.5]).offers) == pytest.approx({7: 0.6, 8: 0.3})
    found: dict[int, Offers] = {0: ((7, 0.9),), 1: ((8, 0.5),), 2: ((9, 0.2),)}
    ranked = plain(0, 1, 2).rank(found, [1, 1, 1])
    assert (ranked.offers, ranked.is_verdict) == (((9, 0.2),), True)
    assert not plain(0, 0, 0).rank(found, [1, 1, 1]).is_verdict
    fusion = plain(0)
    assert (fusion.chance_of(0, ((7, 0.6),), 7), fusion.chance_of(0, ((7, 0.6),), 8)) == (0.6, 0.0)


@given(OFFERS, OFFERS, st.floats(0, 1))
def test_a_fused_score_is_between_the_surest_word_and_certainty(
    first: Offers, second: Offers, weight: float
) -> None:
    fused = plain(0, 0).rank({0: first, 1: second}, [1, weight])
    surest = dict(plain(0, 0, fuses=False).rank({0: first, 1: second}, [1, weight]).offers)
    assert [score for _, score in fused.offers] == sorted((score for _, score in fused.offers), reverse=True)
    assert {token for token, _ in fused.offers} == {token for token, _ in (*first, *second)}
    assert all(surest[token] - 1e-12 <= score <= 1 for token, score in fused.offers)


def test_drafters_that_agree_more_than_independent_ones_would_are_believed_less_after_a_while() -> None:
    fusion = Fusion([0, 0])
    offers: dict[int, Offers] = {0: ((7, 0.5),), 1: ((7, 0.5),)}
    for turn in range(400):  # both are right in half of the cases, and always together
        fusion.observe(offers, fusion.rank(offers, [1, 1]), 7 if turn % 2 else 8)
    ranked = fusion.rank(offers, [1, 1])
    assert ranked.offers[0][1] == pytest.approx(0.75, abs=0.02)
    assert fusion.chance(ranked, ranked.offers[0][1]) == pytest.approx(0.5, abs=0.05)


# ------------------------------------------------------------------------------------------------ calibration

CONFIDENCES = st.floats(0, 1)
SEEN = st.lists(st.tuples(CONFIDENCES, st.booleans()), max_size=60)


def taught(seen: list[tuple[float, bool]]) -> Calibrator:
    calibrator = Calibrator.empty()
    for confidence, is_right in seen:
        calibrator.observe(confidence, is_right=is_right)
    return calibrator


@given(CONFIDENCES)
def test_before_anything_is_seen_the_drafter_is_believed(confidence: float) -> None:
    assert Calibrator.empty().chance(confidence) == pytest.approx(min(CHANCE_MAX, confidence))
    assert Calibrator.empty().error == 0


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
