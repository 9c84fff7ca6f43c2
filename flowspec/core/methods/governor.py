"""Whether guessing pays: the clock with the drafter at work, beside the clock with the drafter at rest.

Where a drafter has cores of its own it costs nothing that a slot's price does not say. Where it shares them
with a stage, or is slow or wrong, plain decoding can be faster, and no model of costs sees that as surely as
a look at the clock. Two questions are asked again and again, and each is paid for in tokens:

- *Is guessing worse than plain decoding?* Its **regret** is how many tokens plain decoding would have given
  beyond those that came, counted from where that was least (a cumulative sum, as in quality control: E. S.
  Page, 1954). Verdicts come in bursts, so a few slow tokens say little; a regret of several tokens does. It
  is also all that giving up late can have cost. After a rest guessing is on trial: it is given up sooner,
  until it has been the faster way for some time.
- *Has that changed?* What plain decoding gives hardly depends on the text, what guessing gives does. A rest
  ends after a while, twice as long a one each time that guessing fails again. An answer that begins may be of
  another kind, so it ends a rest, too; where that fails, again with twice the patience. Where guessing is the
  faster way, but not clearly, what plain decoding gives is measured now and then, ever more seldom.

What is learnt holds for a *kind of prompt* (`core.head.domains`): where one memory serves all, prompts that
guessing suits give back the patience that others had built up, and each answer of these pays for it anew.
Each domain whose answers guessing was tried in has a `Stance` of its own: where the look at the clock is, its
patience, and what guessing **gains** in an answer, in tokens, on average. An answer of a domain where that is
above 0 begins with guesses, on trial; where it is not, and guessing was given up, at rest, until the domain
has rested for as long as its patience says. A trial that begins with an answer has all of it to pay, and
nothing to catch up with. An answer of a domain that is not known yet goes by the `Stance` that all of these
share, and so does all that is under way where answers are several at once: then it is how full the slots are
that decides, and one look is at all of them.

With the patience at its longest a trial of `REGRET_TRIAL` tokens each `REST_TOKENS_MAX` is all that is lost.

Drafters that look up texts take next to no time. What they would have guessed is known at rest, too, so
nobody has to send it to learn whether it comes true: an answer rests until it does (`watched`), and a trial
may be short.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from flowspec.core.head.learnt import Count, Number
from flowspec.validation import Document

CLEARLY_BETTER = 1.3
"""Times the rate of plain decoding, as last measured and as estimated, from which on it is not measured. The
estimate knows what a measurement cannot: that stages were lost or slow then, and are not now."""
REGRET = 10.0
"""Tokens of regret at which guessing is given up that had been the faster way."""
REGRET_TRIAL = 6.0
"""Tokens of regret at which a trial has failed; what the drafter takes to catch up is among them."""
PROOF_TOKENS = 32
"""Tokens after which a trial is passed that was the faster way."""
SETTLING_TOKENS = 2
"""Tokens of rest that still owe to guesses."""
MEASURED_TOKENS = 10
"""Tokens for which plain decoding is measured."""
REST_TOKENS_MIN, REST_TOKENS_MAX = 24, 768
LONGER, LONGER_KNOWN = 2, 4
"""How many times as long the next rest is where a trial failed; and in a domain that is known."""
NEW_ANSWER_TOKENS_MIN = 8
"""Tokens of a rest after which an answer that begins has its trial, while its domain is not known."""
UNMEASURED_TOKENS_MIN, UNMEASURED_TOKENS_MAX = 48, 2_048
"""Tokens of guessing between two measurements of plain decoding."""
SHARE_NEW = 0.1
"""Weight of the newest answer in what guessing gains in one; the first ones count as a plain mean with one in
which it gained nothing."""
GAIN_CLEAR = 4.0
"""Tokens from which on guessing clearly gains: an answer may lose as much as without a trial."""
GAIN_POOR = -2.0
"""Tokens below which guessing loses in answers of a kind on average, though none of them gave it up."""
REGRET_WATCHED, REGRET_TRIAL_WATCHED = 5.0, 3.0
"""The same as `REGRET` and `REGRET_TRIAL` where guesses are watched at rest: guessing is taken up in time."""
RUN = 3
"""So many guesses in a row that would have been right end a rest; twice as many after a trial that failed in
the same answer."""
RIGHT_SHARE, RIGHT_TOKENS, RIGHT_DUE = 0.5, 16, 0.2
"""The share of right guesses, of about so many tokens, that ends a rest, too; and the least that a rest must
have seen for a trial that is due."""
GAIN_MAX = 8.0
"""Tokens that guessing gains in an answer, at most, or loses: what was better for long may be so no more."""


_Rest = Annotated[int, Meta(ge=REST_TOKENS_MIN, le=REST_TOKENS_MAX)]


class StanceState(Document, frozen=True, kw_only=True):
    is_faster: bool
    rest_tokens: _Rest
    rested: Number
    gain: Annotated[float, Meta(ge=-GAIN_MAX, le=GAIN_MAX)]
    answers: Count


class GovernorState(Document, frozen=True, kw_only=True):
    plain_rate: Number
    new_answer_tokens: Annotated[int, Meta(ge=NEW_ANSWER_TOKENS_MIN, le=REST_TOKENS_MAX)]
    unmeasured_tokens: Annotated[int, Meta(ge=UNMEASURED_TOKENS_MIN, le=UNMEASURED_TOKENS_MAX)]
    shared: StanceState
    domains: dict[str, StanceState]


@dataclass(slots=True)
class Stance:
    """Where the look at the clock is in answers of a kind, with the patience and `gain` that are learnt of
    them.

    `tokens` and `took_s` are those of this rest, of which `measured_tokens` are timed, or of this trial;
    `unmeasured_tokens` those of guessing, trials and all, since plain decoding was measured.
    """

    is_resting: bool = False
    is_measuring: bool = False
    is_trial: bool = False
    rest_tokens: int = REST_TOKENS_MIN
    tokens: float = 0.0
    took_s: float = 0.0
    measured_tokens: float = 0.0
    unmeasured_tokens: float = 0.0
    unmeasured_s: float = 0.0
    guessing_rate: float = 0.0
    regret: float = 0.0
    gain: float = 0.0
    answers: int = 0

    def rest(self) -> None:
        self.is_resting, self.is_trial = True, False
        self.tokens = self.took_s = self.measured_tokens = 0.0

    def start(self, *, is_trial: bool) -> None:
        """Guessing begins, or goes on."""
        self.is_resting, self.is_trial = False, is_trial
        self.tokens = self.took_s = self.measured_tokens = self.regret = 0.0
        self.unmeasured_tokens = self.unmeasured_s = 0.0

    def answered(self, gain: float) -> None:
        """An answer is over in which guessing was tried."""
        self.answers += 1
        self.gain += max(SHARE_NEW, 1 / (self.answers + 1)) * (gain - self.gain)
        self.gain = min(GAIN_MAX, max(-GAIN_MAX, self.gain))

    @property
    def is_faster(self) -> bool:
        """Whether guessing is, as far as is known."""
        return not self.is_resting or self.is_measuring

    def state_dict(self) -> StanceState:
        return StanceState(
            is_faster=self.is_faster,
            rest_tokens=self.rest_tokens,
            rested=0.0 if self.is_faster else self.tokens,
            gain=self.gain,
            answers=self.answers,
        )

    @staticmethod
    def of(state: StanceState) -> Stance:
        return Stance(
            is_resting=not state.is_faster,
            rest_tokens=state.rest_tokens,
            tokens=state.rested,
            gain=state.gain,
            answers=state.answers,
        )


class Governor:
    """See the module."""

    def __init__(self) -> None:
        self._plain_rate = 0.0
        self._unmeasured_tokens = UNMEASURED_TOKENS_MIN
        self._emitted = 0.0
        self._looked_s: float | None = None
        self._shared = self._stance = Stance()
        self._stances: dict[int, Stance] = {}  # of the domains that are known
        self._new_answer_tokens = NEW_ANSWER_TOKENS_MIN
        self._is_new_answer = self._is_trial_of_new = False  # of those that share a stance
        self._domain: int | None = None  # of the answer under way, if it is alone
        self._gain: float | None = None  # of guesses in it, if there were any
        self._rested_tokens = 0.0  # in it, since it began or guesses were given up
        self._is_watched = False  # whether what would be guessed is known at rest
        self._run, self._run_needed = 0, RUN  # of right guesses in it
        self._right, self._seen = 0.0, 0  # their share, and tokens about which it is

    @property
    def is_resting(self) -> bool:
        """The drafter should not be asked for anything now."""
        return self._stance.is_resting

    def begin(self, domain: int | None = None, *, is_watched: bool = False) -> None:
        """An answer begins: of this domain, or (None) beside others, and then all are looked at as one until
        none is under way. `is_watched`: what would be guessed is known at rest, too."""
        self._leave()
        self._is_watched = is_watched
        self._run, self._run_needed, self._right, self._seen = 0, RUN, 0.0, 0
        self._domain, self._gain, self._rested_tokens = domain, None, 0.0
        known = None if domain is None else self._stances.get(domain)
        self._stance = stance = self._shared if known is None else known
        if known is None:
            self._is_new_answer = True
        elif stance.is_resting:
            is_due = stance.gain > 0 or stance.tokens >= stance.rest_tokens
            if is_due and not stance.is_measuring:
                stance.start(is_trial=True)
        elif not stance.is_trial:
            stance.is_trial = True
            stance.tokens = stance.took_s = 0.0
        if is_watched and stance.gain <= 0 and not stance.is_resting:
            self._rest()

    def watched(self, *, is_right: bool) -> None:
        """The likeliest guess at a token became known, which was sent or not."""
        self._run = self._run + 1 if is_right else 0
        self._seen = min(self._seen + 1, RIGHT_TOKENS)
        self._right += (is_right - self._right) / self._seen
        is_often = self._seen == RIGHT_TOKENS and self._right >= RIGHT_SHARE
        stance = self._stance
        if stance.is_resting and not stance.is_measuring and (self._run >= self._run_needed or is_often):
            self._try()

    def end(self) -> None:
        """The last answer under way is over."""
        if self._domain is not None and self._gain is not None:
            if self._stance is self._shared:
                self._stance = dataclasses.replace(self._shared)
                self._stances[self._domain] = self._stance
            self._stance.answered(self._gain)
            if self._stance.gain < GAIN_POOR and not self._stance.is_resting:
                self._give_up()
        self._leave()

    def idle(self) -> None:
        """No answer is under way: the time until the next token says nothing."""
        self._looked_s = None

    def emitted(self, tokens: float) -> None:
        """Tokens of each answer under way became known, on average; `look` comes after."""
        self._emitted += tokens

    def look(self, now_s: float, plain_rate: float) -> None:
        """Takes note of the time; `plain_rate` is an answer's by plain decoding as it should be, 0 while
        nobody knows."""
        if self._emitted == 0:
            return
        tokens, self._emitted = self._emitted, 0.0
        looked_s, self._looked_s = self._looked_s, now_s
        if looked_s is None:
            return
        if self.is_resting:
            self._rested(tokens, now_s - looked_s)
        else:
            self._guessed(tokens, now_s - looked_s, plain_rate)

    def state_dict(self) -> GovernorState:
        return GovernorState(
            plain_rate=self._plain_rate,
            new_answer_tokens=self._new_answer_tokens,
            unmeasured_tokens=self._unmeasured_tokens,
            shared=self._shared.state_dict(),
            domains={str(domain): stance.state_dict() for domain, stance in sorted(self._stances.items())},
        )

    def load_state_dict(self, state: GovernorState) -> None:
        """An earlier run's verdicts. Where guessing was the slower way for those that share a stance it is on
        trial from the start; a domain rests on."""
        self._plain_rate, self._unmeasured_tokens = state.plain_rate, state.unmeasured_tokens
        self._new_answer_tokens = state.new_answer_tokens
        self._is_trial_of_new = is_trial = not state.shared.is_faster
        self._shared = self._stance = Stance(rest_tokens=state.shared.rest_tokens, is_trial=is_trial)
        self._stances = {int(domain): Stance.of(each) for domain, each in state.domains.items()}

    # ------------------------------------------------------------------------------------ look by look

    def _guessed(self, tokens: float, took_s: float, estimate: float) -> None:
        stance = self._stance
        plain_rate = self._plain_rate or estimate
        stance.tokens += tokens
        stance.took_s += took_s
        stance.unmeasured_tokens += tokens
        stance.unmeasured_s += took_s
        more = took_s * plain_rate - tokens
        stance.regret = max(0.0, stance.regret + more)
        if plain_rate:
            self._gain = (self._gain or 0.0) - more
        is_faster = stance.tokens >= stance.took_s * plain_rate
        if stance.regret > self._regret_max():
            self._give_up()
        elif stance.is_trial and stance.tokens >= PROOF_TOKENS and is_faster:
            stance.is_trial, stance.rest_tokens = False, REST_TOKENS_MIN
            if stance is self._shared:
                self._new_answer_tokens = NEW_ANSWER_TOKENS_MIN
        elif plain_rate and not stance.is_trial and stance.unmeasured_tokens >= self._unmeasured_tokens:
            if stance.unmeasured_tokens < CLEARLY_BETTER * max(plain_rate, estimate) * stance.unmeasured_s:
                stance.is_measuring = True
                stance.guessing_rate = stance.unmeasured_tokens / stance.unmeasured_s
                self._rest()
            else:
                stance.unmeasured_tokens = stance.unmeasured_s = 0.0

    def _rested(self, tokens: float, took_s: float) -> None:
        stance = self._stance
        stance.tokens += tokens
        self._rested_tokens += tokens
        if self._rested_tokens > SETTLING_TOKENS:
            stance.measured_tokens += tokens
            stance.took_s += took_s
        if stance.is_measuring:
            if stance.measured_tokens >= MEASURED_TOKENS:
                self._measured()
        elif self._is_due() and (not self._is_watched or self._right >= RIGHT_DUE):
            self._try()

    def _try(self) -> None:
        """A rest ends."""
        stance = self._stance
        self._learn()
        if stance is self._shared:
            self._is_trial_of_new, self._is_new_answer = self._is_new_answer, False
        stance.start(is_trial=True)

    def _regret_max(self) -> float:
        """More where guesses have clearly gained of late: it is rather bad luck then that they do not."""
        stance = self._stance
        gains = stance is not self._shared and stance.gain >= GAIN_CLEAR
        if stance.is_trial and not gains:
            return REGRET_TRIAL_WATCHED if self._is_watched else REGRET_TRIAL
        return REGRET_WATCHED if self._is_watched else REGRET

    def _is_due(self) -> bool:
        """Whether a rest has lasted long enough in the midst of an answer."""
        stance = self._stance
        if stance is not self._shared:
            return self._rested_tokens >= stance.rest_tokens
        return stance.tokens >= stance.rest_tokens or (
            self._is_new_answer and stance.tokens >= self._new_answer_tokens
        )

    # ------------------------------------------------------------------------------------ from one to another

    def _give_up(self) -> None:
        stance = self._stance
        self._run, self._run_needed = 0, 2 * self._run_needed
        self._right, self._seen = 0.0, 0
        if not stance.is_trial:
            stance.rest_tokens = REST_TOKENS_MIN
        elif stance is not self._shared:
            stance.rest_tokens = min(LONGER_KNOWN * stance.rest_tokens, REST_TOKENS_MAX)
        else:
            stance.rest_tokens = min(LONGER * stance.rest_tokens, REST_TOKENS_MAX)
            if self._is_trial_of_new:
                self._new_answer_tokens = min(LONGER * self._new_answer_tokens, REST_TOKENS_MAX)
        self._rest()

    def _measured(self) -> None:
        """What plain decoding gives is known: the faster way is kept."""
        stance = self._stance
        stance.is_measuring = False
        self._learn()
        if stance.guessing_rate >= self._plain_rate:
            self._unmeasured_tokens = min(2 * self._unmeasured_tokens, UNMEASURED_TOKENS_MAX)
            stance.start(is_trial=False)
        else:
            self._unmeasured_tokens = UNMEASURED_TOKENS_MIN
            stance.rest_tokens = REST_TOKENS_MIN

    def _learn(self) -> None:
        stance = self._stance
        if stance.took_s > 0 and stance.measured_tokens > 0:
            self._plain_rate = stance.measured_tokens / stance.took_s

    def _rest(self) -> None:
        self._rested_tokens = 0.0
        if self._stance is self._shared:
            self._is_new_answer = False
        self._stance.rest()

    def _leave(self) -> None:
        """Other answers come, and it may be long until the next one of this kind: what was measured of plain
        decoding is taken in while it is new."""
        stance = self._stance
        if stance is not self._shared and stance.is_resting and not stance.is_measuring:
            if stance.measured_tokens >= MEASURED_TOKENS:
                self._learn()
            stance.took_s = stance.measured_tokens = 0.0
        self._domain = None
