"""Times are virtual: each token takes what its way of decoding costs, and the governor is asked after every
verdict."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.head.request import Request
from flowspec.core.methods.continuous import Continuous
from flowspec.core.methods.governor import (
    CLEARLY_BETTER,
    MEASURED_TOKENS,
    NEW_ANSWER_TOKENS_MIN,
    REGRET,
    REGRET_TRIAL,
    REST_TOKENS_MAX,
    REST_TOKENS_MIN,
    SETTLING_TOKENS,
    UNMEASURED_TOKENS_MIN,
    Governor,
)

PLAIN_S = 1.0
CATCHING_UP_S = 3.0
"""What the drafter takes beside the first token after a rest."""


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


class Bursts:
    """Answers of 96 tokens whose verdicts bring a geometric number of tokens each, `ratio` times as fast as
    plain decoding, more or less by answer; waking the drafter costs time."""

    def __init__(self, seed: int, governor: Governor | None) -> None:
        self._random = random.Random(seed)
        self._governor = governor
        self._now_s = 0.0

    def tokens_per_s(self, ratios: list[float], answers: int) -> float:
        tokens, took_s = 0, 0.0
        for number in range(answers):
            ratio = ratios[number % len(ratios)] * self._random.lognormvariate(-0.011, 0.15)
            self._now_s += 5  # the prompt
            if self._governor is not None:
                self._governor.begin()
                self._governor.idle()
            end, was_resting = tokens + 96, False
            while tokens < end:
                is_resting = self._governor is not None and self._governor.is_resting
                count, pass_s = 1, PLAIN_S * self._random.choice((0.9, 1, 1.1))
                if not is_resting:
                    while count < 8 and self._random.random() < 0.55:
                        count += 1
                    pass_s = 2.2 / ratio * self._random.choice((0.8, 1, 1.2))
                    pass_s += CATCHING_UP_S if was_resting else 0.0
                was_resting = is_resting
                self._now_s += pass_s
                took_s += pass_s
                tokens += count
                if self._governor is not None:
                    self._governor.emitted(count)
                    self._governor.look(self._now_s, 1 / PLAIN_S)
        return tokens / took_s


def mean_rate(ratios: list[float], *, governed: bool = True) -> float:
    rates = [Bursts(seed, Governor() if governed else None).tokens_per_s(ratios, 40) for seed in range(12)]
    return sum(rates) / len(rates)


@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.7, 0.85, 0.95])
def test_where_guessing_is_slower_little_is_lost(ratio: float) -> None:
    """From the first token on: forty answers, of which the first pays for what is learnt."""
    assert mean_rate([ratio]) > 0.95


@pytest.mark.parametrize("ratio", [1.15, 1.25, 1.5, 2.5])
def test_where_guessing_is_faster_nearly_all_of_it_is_had(ratio: float) -> None:
    assert mean_rate([ratio]) > 0.95 * mean_rate([ratio], governed=False)


@pytest.mark.parametrize("ratios", [[0.7, 1.5], [0.8, 0.8, 0.8, 2.0], [2.2, 1.8, 2.3, 1.4, 0.8, 0.9]])
def test_answers_of_unlike_kinds_are_faster_than_by_either_way_alone(ratios: list[float]) -> None:
    assert mean_rate(ratios) > max(1.02, mean_rate(ratios, governed=False))


def test_guessing_that_is_clearly_better_is_never_put_on_trial() -> None:
    assert not any(Decoding(PLAIN_S / CLEARLY_BETTER * 0.99).run(5_000))


def test_guessing_is_given_up_when_it_has_cost_as_much_as_may_be_lost() -> None:
    decoding = Decoding(1.4)
    first = decoding.run(200)
    given_up = first.index(True)
    assert given_up == pytest.approx(REGRET / 0.4, abs=2)
    rest = first[given_up:].index(False)
    assert rest == REST_TOKENS_MIN
    trial = first[given_up + rest :].index(True)
    assert trial == pytest.approx(REGRET_TRIAL / 0.4, abs=2)
    after = first[given_up + rest + trial :]
    assert after.index(False) == 2 * REST_TOKENS_MIN


@pytest.mark.parametrize("guessing_s", [1.1, 1.5, 3.0])
def test_in_the_long_run_little_is_lost(guessing_s: float) -> None:
    decoding = Decoding(guessing_s)
    decoding.run(10_000)
    began_s = decoding.now_s
    rested = decoding.run(10_000)
    assert (decoding.now_s - began_s) / 10_000 < 1 + 1.4 * REGRET_TRIAL / REST_TOKENS_MAX
    assert not all(rested), "it looks again now and then"


@given(st.floats(0.2, 5.0), st.floats(0.2, 5.0))
def test_what_became_better_is_found(before_s: float, after_s: float) -> None:
    """Within the longest rest, and a trial that just began to fail."""
    decoding = Decoding(before_s)
    decoding.run(2_000)
    decoding.guessing_s = after_s
    decoding.run(2 * REST_TOKENS_MAX)
    rested = decoding.run(4_000)
    if after_s > 1.1:
        assert sum(rested) > 0.9 * len(rested)
    if after_s < 0.9:
        assert sum(rested) < 0.1 * len(rested)


def test_plain_decoding_that_is_faster_than_its_estimate_is_found() -> None:
    """The estimate is of passes beside the drafter, which takes the stages' cores."""
    decoding = Decoding(1.15, estimate=0.8)
    found = decoding.run(UNMEASURED_TOKENS_MIN + 10).index(True)
    assert found == UNMEASURED_TOKENS_MIN + 1
    assert sum(decoding.run(2_000)) > 1_700


def test_plain_decoding_that_was_measured_in_a_bad_moment_is_measured_again() -> None:
    """A device was away, or a link stood still; then plain decoding is again as fast as it should be."""
    decoding = Decoding(0.9)
    decoding.run(UNMEASURED_TOKENS_MIN + 5)
    assert decoding.governor.is_resting
    decoding.now_s += 60
    decoding.run(MEASURED_TOKENS)
    decoding.guessing_s = 1.6
    assert sum(decoding.run(4_000)) > 0.8 * 4_000


def test_plain_decoding_is_measured_ever_more_seldom_where_guessing_is_better() -> None:
    decoding = Decoding(0.9)
    rested = decoding.run(10_000)
    changes = [place for place in range(1, 10_000) if rested[place] and not rested[place - 1]]
    assert 4 <= len(changes) <= 12
    assert sum(rested) <= (MEASURED_TOKENS + SETTLING_TOKENS + 1) * len(changes)
    gaps = [after - before for before, after in itertools.pairwise(changes)]
    assert gaps == sorted(gaps)


def test_a_text_that_the_drafter_does_not_know_is_noticed_without_a_trial() -> None:
    """Guessing was confirmed for long, then an answer comes for which it is of no use, and then again one for
    which it is."""
    decoding = Decoding(0.9)
    decoding.run(4_000)
    decoding.governor.begin()
    decoding.guessing_s = 1.4
    hard = decoding.run(96)
    assert hard.index(True) <= REGRET / 0.4 + 2
    decoding.run(4_000)
    decoding.governor.begin()
    decoding.guessing_s = 0.6
    easy = decoding.run(96)
    assert not any(easy[NEW_ANSWER_TOKENS_MIN + 1 :]), "rested for long, but each answer has its chance"


def test_answers_that_never_profit_have_ever_fewer_trials() -> None:
    decoding = Decoding(1.5)
    trials = []
    for _ in range(60):
        decoding.governor.begin()
        trials.append(not all(decoding.run(96)))
    assert sum(trials[:4]) >= 3
    assert sum(trials[-30:]) <= 6


def test_the_time_before_an_answer_counts_for_nothing() -> None:
    quick, slow = Decoding(0.8), Decoding(0.8)
    for decoding, pause_s in ((quick, 0.0), (slow, 1_000.0)):
        for _ in range(40):
            decoding.now_s += pause_s
            decoding.governor.begin()
            decoding.governor.idle()
            decoding.run(24)
    assert slow.rested == quick.rested


def test_answers_that_begin_all_the_time_beside_others_do_not_hide_what_guessing_costs() -> None:
    """Many users with short answers: one begins with each token of the others."""
    decoding = Decoding(3.0)
    for _ in range(3_000):
        decoding.governor.begin()
        decoding.run(1)
    assert sum(decoding.rested[1_000:]) > 0.9 * 2_000


def test_the_clock_goes_on_while_any_answer_gives_tokens() -> None:
    """Two answers; the prompt of the second is still read when the first one ends."""
    told: list[str] = []

    class Told(Governor):
        def begin(self) -> None:
            told.append("begin")

        def idle(self) -> None:
            told.append("idle")

    method = Continuous()
    method._governor = Told()
    first, second = (cast("Request", SimpleNamespace(number=number, served=0)) for number in (1, 2))
    method.begin(first)
    assert told == ["begin", "idle"]
    method.walked(first, 1)
    method.begin(second)
    assert told == ["begin", "idle", "begin"]
    method.ended(first)
    assert told == ["begin", "idle", "begin", "idle"]
    method.walked(second, 1)
    method.begin(second)  # again, on other stages
    assert told == ["begin", "idle", "begin", "idle", "begin", "idle"]


def test_nobody_knows_what_plain_decoding_takes_at_first() -> None:
    assert not any(Decoding(5.0, estimate=0.0).run(500))
