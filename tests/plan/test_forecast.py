"""The forecast: plain decoding exactly, guesses by the rules that any pipeline obeys."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.plan.forecast import HEAD_S, Guessing, guessing_rates, plain_rates, seconds_per_token

TIMES = st.floats(0.002, 2.0)
ACCEPTANCES = st.floats(0.2, 0.9)


def one(slot_s: float, trip_s: float, nodes: float, acceptance: float, pass_s: float = 0.001) -> float:
    found, _, _ = seconds_per_token(
        np.array(slot_s), np.array(trip_s), np.array(nodes), Guessing(acceptance=acceptance, pass_s=pass_s)
    )
    return float(found)


@given(
    slot_s=TIMES,
    stages=st.floats(1, 8),
    more=st.floats(1, 3),
    acceptance=ACCEPTANCES,
    nodes=st.sampled_from([1, 4, 16]),
)
def test_a_longer_trip_and_a_slower_drafter_never_help(
    slot_s: float, stages: float, more: float, acceptance: float, nodes: int
) -> None:
    trip_s = slot_s * stages
    time_s = one(slot_s, trip_s, nodes, acceptance)
    assert one(slot_s, trip_s * more, nodes, acceptance) >= time_s * (1 - 1e-12)
    assert one(slot_s, trip_s, nodes, acceptance, pass_s=0.001 * more) >= time_s * (1 - 1e-12)


@given(slot_s=TIMES, stages=st.floats(1, 8), acceptance=ACCEPTANCES, nodes=st.sampled_from([1, 4, 16]))
def test_more_nodes_and_a_better_drafter_help_if_they_cost_nothing(
    slot_s: float, stages: float, acceptance: float, nodes: int
) -> None:
    time_s = one(slot_s, slot_s * stages, nodes, acceptance)
    assert one(slot_s, slot_s * stages, 2 * nodes, acceptance) <= time_s * (1 + 1e-12)
    assert one(slot_s, slot_s * stages, nodes, min(0.95, acceptance + 0.05)) <= time_s * (1 + 1e-12)


def test_plain_decoding_takes_a_trip_and_users_share_slots() -> None:
    slot_s, trip_s = np.array([0.1, 0.1, 0.12]), np.array([0.4, 0.4, 0.48])
    nodes = np.array([1.0, 2.0, 4.0])
    assert plain_rates(slot_s, trip_s, nodes, 1) == pytest.approx([1 / (0.4 + HEAD_S), 0, 0]), (
        "one user has one node"
    )
    assert plain_rates(slot_s, trip_s, nodes, 4)[0] == pytest.approx(4 / (0.4 + HEAD_S))
    assert plain_rates(slot_s, trip_s, nodes, 100) == pytest.approx([10, 20, 4 / 0.12])


def test_users_together_are_faster_than_one_and_no_faster_than_as_many_clusters() -> None:
    slot_s, trip_s, nodes = np.array([0.1]), np.array([0.8]), np.array([16.0])
    guessing = Guessing(acceptance=0.635, pass_s=0.005)
    one_user, eight = (
        float(guessing_rates(slot_s, trip_s, nodes, guessing, users)[0].max()) for users in (1, 8)
    )
    assert one_user < eight <= 8 * one_user * (1 + 1e-9)
    assert one_user == pytest.approx(1 / one(0.1, 0.8, 16, 0.635, 0.005))
