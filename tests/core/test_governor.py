"""Times are virtual: each token takes what its way of decoding costs, and the governor is asked after every
token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.methods.governor import (
    CLEARLY_BETTER,
    LOOK_TOKENS,
    SETTLING_TOKENS,
    STAY_TOKENS_MAX,
    STAY_TOKENS_MIN,
    TRIAL_TOKENS,
    Governor,
)

PLAIN_S = 1.0


class Decoding:
    """Decodes with `guessing_s` a token while the drafter works and 1 s while it rests."""

    def __init__(self, guessing_s: float, estimate: float = 1 / PLAIN_S) -> None:
        self.governor = Governor()
        self.guessing_s = guessing_s
        self.estimate = estimate
        self.now_s = 0.0
        self.rested: list[bool] = []

    def run(self, tokens: int) -> list[bool]:
        for _ in range(tokens):
            self.rested.append(self.governor.is_resting)
            self.now_s += PLAIN_S if self.governor.is_resting else self.guessing_s
            self.governor.emitted(1)
            self.governor.look(self.now_s, self.estimate)
        return self.rested[-tokens:]


def test_guessing_that_is_clearly_better_is_never_put_on_trial() -> None:
    assert not any(Decoding(PLAIN_S / CLEARLY_BETTER * 0.99).run(5_000))


def test_guessing_that_costs_more_than_it_gives_is_given_up_after_one_look_and_one_trial() -> None:
    decoding = Decoding(1.4)
    first = decoding.run(LOOK_TOKENS + 2 * SETTLING_TOKENS + TRIAL_TOKENS + 4)
    assert first.index(True) <= LOOK_TOKENS + SETTLING_TOKENS + 2
    assert all(first[first.index(True) :])


@pytest.mark.parametrize("guessing_s", [1.1, 1.5, 3.0])
def test_in_the_long_run_little_is_lost(guessing_s: float) -> None:
    decoding = Decoding(guessing_s)
    decoding.run(10_000)
    began_s = decoding.now_s
    rested = decoding.run(10_000)
    assert (decoding.now_s - began_s) / 10_000 < 1 + 0.03 * guessing_s
    assert not all(rested), "it looks again now and then"


@given(st.floats(0.2, 5.0), st.floats(0.2, 5.0))
def test_what_became_better_is_found(before_s: float, after_s: float) -> None:
    """Within the longest stay and a trial, and a look's tokens more where the trial was under way."""
    decoding = Decoding(before_s)
    decoding.run(2_000)
    decoding.guessing_s = after_s
    decoding.run(2 * STAY_TOKENS_MAX)
    rested = decoding.run(4_000)
    if after_s > 1.1:
        assert sum(rested) > 0.9 * len(rested)
    if after_s < 0.7:
        assert sum(rested) < 0.2 * len(rested)


def test_a_text_that_the_drafter_does_not_know_is_noticed_without_a_trial() -> None:
    """Guessing was confirmed for long, then an answer comes for which it is of no use, and then again one for
    which it is."""
    decoding = Decoding(0.9)
    decoding.run(4_000)
    decoding.governor.begin()
    decoding.guessing_s = 1.4
    hard = decoding.run(96)
    assert hard.index(True) <= 2 * (LOOK_TOKENS + SETTLING_TOKENS)
    decoding.run(4_000)
    decoding.governor.begin()
    decoding.guessing_s = 0.6
    easy = decoding.run(96)
    assert not any(easy[STAY_TOKENS_MIN + 2 * SETTLING_TOKENS :]), (
        "rested for long, but each answer has its chance"
    )


def test_the_time_before_an_answer_counts_for_nothing() -> None:
    quick, slow = Decoding(0.8), Decoding(0.8)
    for decoding, pause_s in ((quick, 0.0), (slow, 1_000.0)):
        for _ in range(40):
            decoding.now_s += pause_s
            decoding.governor.begin()
            decoding.run(24)
    assert slow.rested == quick.rested


def test_nobody_knows_what_plain_decoding_takes_at_first() -> None:
    assert not any(Decoding(5.0, estimate=0.0).run(500))
