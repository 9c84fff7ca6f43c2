"""Times are virtual: each token takes what its way of decoding costs, and the governor is asked after every
verdict."""

from __future__ import annotations

import itertools
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
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
    REGRET_TRIAL_WATCHED,
    REST_TOKENS_MAX,
    REST_TOKENS_MIN,
    RUN,
    SETTLING_TOKENS,
    UNMEASURED_TOKENS_MIN,
    Governor,
)
from tests.nightly import nightly

PLAIN_S = 1.0
CATCHING_UP_S = 3.0
"""What the drafter takes beside the first token after a rest."""


class Decoding:
    """Decodes with `guessing_s` a token while the drafter works and 1 s while it rests."""

    def __init__(self, guessing_s: float = PLAIN_S, estimate: float = 1 / PLAIN_S) -> None:
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

    def answer(self, domain: int | None, guessing_s: float, tokens: int = 96) -> list[bool]:
        """Whether the drafter rested, token by token."""
        self.guessing_s = guessing_s
        self.governor.begin(domain)
        self.governor.idle()
        rested = self.run(tokens)
        self.governor.end()
        return rested


@dataclass(frozen=True)
class Kind:
    """Answers in which guessing gives `ratio` times the tokens of plain decoding, more or less by answer, so
    many each; `domain` None: of an unknown one."""

    ratio: float
    domain: int | None = None
    tokens: int = 96
    spread: float = 0.15


class Bursts:
    """Answers whose verdicts bring a geometric number of tokens each; waking the drafter costs time."""

    def __init__(self, seed: int, governor: Governor | None) -> None:
        self._random = random.Random(seed)
        self._governor = governor
        self._now_s = 0.0

    def rates(self, kinds: Sequence[Kind]) -> dict[Kind, float]:
        """An answer of each, in this order: tokens per second by kind."""
        tokens: Counter[Kind] = Counter()
        took_s: defaultdict[Kind, float] = defaultdict(float)
        for kind in kinds:
            answered = self._answer(kind)
            tokens[kind] += answered[0]
            took_s[kind] += answered[1]
        return {kind: tokens[kind] / took_s[kind] for kind in tokens}

    def _answer(self, kind: Kind) -> tuple[int, float]:
        tokens, took_s, was_resting = 0, 0.0, False
        ratio = kind.ratio * self._random.lognormvariate(-(kind.spread**2) / 2, kind.spread)
        self._now_s += 5  # the prompt
        if self._governor is not None:
            self._governor.begin(kind.domain)
            self._governor.idle()
        while tokens < kind.tokens:
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
        if self._governor is not None:
            self._governor.end()
        return tokens, took_s


def mean_rates(kinds: Sequence[Kind], *, governed: bool = True, seeds: int = 12) -> dict[Kind, float]:
    """Of sessions with these answers."""
    found = [Bursts(seed, Governor() if governed else None).rates(kinds) for seed in range(seeds)]
    return {kind: statistics.mean(each[kind] for each in found) for kind in found[0]}


def mean_rate(ratios: list[float], *, governed: bool = True) -> float:
    """Of forty answers that nobody can tell apart, with these ratios in turns."""
    kinds = [Kind(ratios[number % len(ratios)]) for number in range(40)]
    rates = mean_rates(kinds, governed=governed)
    return len(kinds) / sum(1 / rates[kind] for kind in kinds)


@pytest.mark.parametrize("ratio", nightly([0.3, 0.85, 1.15, 2.5], [each / 10 for each in range(3, 26)]))
def test_whatever_guessing_is_worth_little_is_lost_to_the_better_way(ratio: float) -> None:
    """From the first token on: forty answers, of which the first pays for what is learnt."""
    assert mean_rate([ratio]) > 0.95 * max(1.0, mean_rate([ratio], governed=False))


@pytest.mark.parametrize("ratios", [[0.7, 1.5], [0.8, 0.8, 0.8, 2.0], [2.2, 1.8, 2.3, 1.4, 0.8, 0.9]])
def test_answers_of_unlike_kinds_are_faster_than_by_either_way_alone(ratios: list[float]) -> None:
    assert mean_rate(ratios) > max(1.02, mean_rate(ratios, governed=False))


@pytest.mark.parametrize(
    ("ratios", "tokens"),
    [((0.7, 1.5), 96), ((0.5, 2.2), 32), ((0.6, 0.9, 1.6), 256), ((0.3,), 32), ((1.15,), 256)],
)
@pytest.mark.parametrize("block", [1, 10])
def test_where_kinds_are_known_apart_each_has_its_faster_way(
    ratios: tuple[float, ...], tokens: int, block: int
) -> None:
    """From the first token of the first answer on, in turns and in blocks of answers."""
    kinds = [Kind(ratio, domain, tokens) for domain, ratio in enumerate(ratios)]
    order = [kinds[number // block % len(kinds)] for number in range(60)]
    rates, best = mean_rates(order), mean_rates(order, governed=False)
    for kind, rate in rates.items():
        assert rate > 0.93 * max(1.0, best[kind])


CODE, PLAYS, SUMS = 0, 1, 2


def test_an_answer_begins_as_its_domain_did_last_and_trials_become_fewer() -> None:
    answers = Decoding()
    for _ in range(6):
        answers.answer(CODE, 1.6)
        answers.answer(PLAYS, 0.6)
    for _ in range(3):
        assert all(answers.answer(CODE, 1.6)[:40])
        assert not any(answers.answer(PLAYS, 0.6))
    assert not any(answers.answer(SUMS, 0.6)), "not known: as the last one that was not"
    answers = Decoding()
    tried = []
    for _ in range(60):
        tried.append(not all(answers.answer(CODE, 1.6)))
        answers.answer(PLAYS, 0.6)
    assert tried[0]
    assert 3 <= sum(tried) <= 12
    assert sum(tried[-32:]) == 32 * 96 // REST_TOKENS_MAX, "as seldom as it gets"


def test_a_trial_that_a_domain_passes_gives_its_patience_back() -> None:
    """It is at the beginning of an answer, as soon as the domain has rested for long enough."""
    answers = Decoding()
    for _ in range(40):
        answers.answer(CODE, 1.6)
    late = [answers.answer(CODE, 0.6) for _ in range(1 + REST_TOKENS_MAX // 96)]
    passed = [number for number, rested in enumerate(late) if not any(rested)]
    assert passed
    assert not any(late[-1])
    assert answers.governor.state_dict().domains["0"].rest_tokens == REST_TOKENS_MIN


def test_several_answers_are_looked_at_as_one_and_hide_no_cost() -> None:
    answers = Decoding()
    for _ in range(2):
        answers.answer(CODE, 1.6)
        answers.answer(PLAYS, 0.6)
    before = answers.governor.state_dict().domains
    answers.governor.begin(PLAYS)
    answers.answer(None, 1.6, tokens=2_000)
    assert answers.governor.state_dict().domains == before
    assert answers.governor.is_resting
    assert not any(answers.answer(PLAYS, 0.6))
    # Many users with short answers: one begins with each token of the others.
    decoding = Decoding(3.0)
    for _ in range(3_000):
        decoding.governor.begin()
        decoding.run(1)
    assert sum(decoding.rested[1_000:]) > 0.9 * 2_000


def test_a_domain_rests_on_in_the_next_run() -> None:
    first = Decoding()
    for _ in range(12):
        first.answer(CODE, 1.6)
        first.answer(PLAYS, 0.6)
    kept = first.governor.state_dict()
    second = Governor()
    second.load_state_dict(kept)
    assert second.state_dict() == kept
    second.begin(CODE)
    assert second.is_resting
    second.begin(PLAYS)
    assert not second.is_resting


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


def test_plain_decoding_is_measured_again_where_its_estimate_or_its_moment_was_bad() -> None:
    """The estimate is of passes beside the drafter, which takes the stages' cores."""
    decoding = Decoding(1.15, estimate=0.8)
    found = decoding.run(UNMEASURED_TOKENS_MIN + 10).index(True)
    assert found == UNMEASURED_TOKENS_MIN + 1
    assert sum(decoding.run(2_000)) > 1_700
    # A device was away, or a link stood still; then plain decoding is again as fast as it should be.
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


def test_the_time_before_an_answer_counts_for_nothing() -> None:
    quick, slow = Decoding(0.8), Decoding(0.8)
    for decoding, pause_s in ((quick, 0.0), (slow, 1_000.0)):
        for _ in range(40):
            decoding.now_s += pause_s
            decoding.governor.begin()
            decoding.governor.idle()
            decoding.run(24)
    assert slow.rested == quick.rested


class Told(Governor):
    """Notes what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[int | str | None] = []

    def begin(self, domain: int | None = None, *, is_watched: bool = False) -> None:
        self.told.append(domain)

    def idle(self) -> None:
        self.told.append("idle")

    def end(self) -> None:
        self.told.append("end")

    def take(self) -> list[int | str | None]:
        """What it was told since it was last asked."""
        told, self.told = self.told, []
        return told


def question(number: int, prompt: tuple[int, ...]) -> Request:
    return cast("Request", SimpleNamespace(number=number, served=0, submit=SimpleNamespace(prompt=prompt)))


def test_the_clock_goes_on_while_any_answer_gives_tokens_and_domains_are_told_of_answers_alone() -> None:
    """Two answers; the prompt of the second is still read when the first one ends."""
    method, governor = Continuous(), Told()
    method._governor = governor
    prompts = ((1, 2, 3), (7, 8, 9), (1, 2, 3))
    first, second, third = (question(number, prompt) for number, prompt in enumerate(prompts))
    method.begin(first)
    assert governor.take() == [0, "idle"]
    method.walked(first, 1)
    method.begin(second)
    assert governor.take() == [None]
    method.ended(first)
    assert governor.take() == ["idle"]
    method.walked(second, 1)
    method.begin(second)  # again, on other stages, and alone
    assert governor.take() == [1, "idle"]
    method.ended(second)
    assert governor.take() == ["end", "idle"]
    method.begin(third)
    assert governor.take() == [0, "idle"]


def watched(decoding: Decoding, *right: bool) -> list[bool]:
    """Tokens of which the likeliest guess is right or not, with whether the drafter rested at each."""
    found = []
    for is_right in right:
        decoding.governor.watched(is_right=is_right)
        found += decoding.run(1)
    return found


def test_an_answer_whose_guesses_are_watched_rests_until_they_come_true() -> None:
    decoding = Decoding(guessing_s=1.2)
    decoding.governor.begin(is_watched=True)
    assert all(watched(decoding, *[True, *[False] * 9] * 9))
    assert decoding.now_s == 90 * PLAIN_S, "nothing was lost"
    assert watched(decoding, *[True] * RUN)[-1] is False
    often = Decoding(guessing_s=0.5)
    often.governor.begin(is_watched=True)
    assert watched(often, *[True, False] * 20)[-1] is False, "half of them are right"
    unknown = Decoding(guessing_s=1.2)
    unknown.governor.begin()
    assert not unknown.governor.is_resting, "others must be sent to be known"


def test_after_a_trial_that_failed_more_guesses_must_come_true() -> None:
    decoding = Decoding(guessing_s=1.5)
    decoding.governor.begin(is_watched=True)
    assert watched(decoding, *[True] * RUN)[-1] is False
    lost = watched(decoding, *[False] * 12)
    assert lost.count(False) <= 2 * REGRET_TRIAL_WATCHED + 1
    assert watched(decoding, *[True] * (2 * RUN - 1))[-1] is True
    assert watched(decoding, True) == [False]
    decoding.governor.begin(is_watched=True)
    assert watched(decoding, *[True] * RUN)[-1] is False, "another answer"


def test_a_kind_rests_that_loses_on_average() -> None:
    """Each loses less than a trial may."""
    decoding = Decoding(guessing_s=1.12)
    governor = decoding.governor
    for _ in range(3):
        governor.begin(2)
        decoding.run(40)
        governor.end()
    governor.begin(2)
    assert governor.is_resting
    gains = Kind(1.2, 0, spread=0.35)
    assert mean_rates([gains] * 60, seeds=24)[gains] > 1.1
    loses = Kind(0.85, 0, spread=0.35)
    assert mean_rates([loses] * 60, seeds=24)[loses] > 0.98


def test_guessing_that_is_clearly_better_or_not_yet_compared_is_not_put_on_trial() -> None:
    assert not any(Decoding(PLAIN_S / CLEARLY_BETTER * 0.99).run(5_000))
    assert not any(Decoding(5.0, estimate=0.0).run(500))
