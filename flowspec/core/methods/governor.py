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

With the patience at its longest a trial of `REGRET_TRIAL` tokens each `REST_TOKENS_MAX` is all that is lost.
"""

from __future__ import annotations

from typing import Any

from flowspec.core.head.kept import Kept

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
NEW_ANSWER_TOKENS_MIN = 8
"""Tokens of a rest after which an answer that begins has its trial."""
UNMEASURED_TOKENS_MIN, UNMEASURED_TOKENS_MAX = 48, 2_048
"""Tokens of guessing between two measurements of plain decoding."""


class Governor:
    """`is_resting`: the drafter should not be asked for anything now."""

    def __init__(self) -> None:
        self.is_resting = False
        self._plain_rate = 0.0
        self._emitted = 0.0
        self._looked_s: float | None = None
        self._rest_tokens = REST_TOKENS_MIN
        self._new_answer_tokens = NEW_ANSWER_TOKENS_MIN
        self._unmeasured_tokens = UNMEASURED_TOKENS_MIN
        self._is_new_answer = False
        self._is_measuring = False
        self._is_trial = self._is_trial_of_new = False
        self._tokens, self._took_s = 0.0, 0.0  # of this phase
        self._measured_tokens = 0.0
        self._guessing_rate = 0.0
        self._regret = 0.0

    def begin(self) -> None:
        """An answer begins: its text may be another one for the drafter."""
        self._is_new_answer = True

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

    def kept(self) -> dict[str, Any]:
        return {
            "plain_rate": self._plain_rate,
            "is_faster": not self.is_resting or self._is_measuring,
            "rest_tokens": self._rest_tokens,
            "new_answer_tokens": self._new_answer_tokens,
            "unmeasured_tokens": self._unmeasured_tokens,
        }

    def recall(self, kept: Kept) -> None:
        """An earlier run's verdict: guessing is on trial from the start where it was the slower way. Raises
        `ValueError`."""
        plain_rate = kept["plain_rate"].number()
        rest_tokens = kept["rest_tokens"].whole(REST_TOKENS_MIN, REST_TOKENS_MAX)
        new_answer_tokens = kept["new_answer_tokens"].whole(NEW_ANSWER_TOKENS_MIN, REST_TOKENS_MAX)
        unmeasured_tokens = kept["unmeasured_tokens"].whole(UNMEASURED_TOKENS_MIN, UNMEASURED_TOKENS_MAX)
        is_faster = kept["is_faster"].flag()
        self._plain_rate, self._rest_tokens = plain_rate, rest_tokens
        self._new_answer_tokens, self._unmeasured_tokens = new_answer_tokens, unmeasured_tokens
        self._is_trial = self._is_trial_of_new = not is_faster

    # ------------------------------------------------------------------------------ a phase, look by look

    def _guessed(self, tokens: float, took_s: float, estimate: float) -> None:
        plain_rate = self._plain_rate or estimate
        self._tokens += tokens
        self._took_s += took_s
        more = took_s * plain_rate - tokens
        self._regret = max(0.0, self._regret + more)
        is_faster = self._tokens >= self._took_s * plain_rate
        if self._regret > (REGRET_TRIAL if self._is_trial else REGRET):
            self._give_up()
        elif self._is_trial and self._tokens >= PROOF_TOKENS and is_faster:
            self._is_trial = False
            self._rest_tokens, self._new_answer_tokens = REST_TOKENS_MIN, NEW_ANSWER_TOKENS_MIN
        elif plain_rate and not self._is_trial and self._tokens >= self._unmeasured_tokens:
            if self._tokens < CLEARLY_BETTER * max(plain_rate, estimate) * self._took_s:
                self._is_measuring = True
                self._guessing_rate = self._tokens / self._took_s
                self._rest()
            else:
                self._tokens = self._took_s = 0.0

    def _rested(self, tokens: float, took_s: float) -> None:
        self._tokens += tokens
        if self._tokens > SETTLING_TOKENS:
            self._measured_tokens += tokens
            self._took_s += took_s
        if self._is_measuring:
            if self._measured_tokens >= MEASURED_TOKENS:
                self._measured()
        elif self._tokens >= self._rest_tokens or (
            self._is_new_answer and self._tokens >= self._new_answer_tokens
        ):
            self._learn()
            self._is_trial, self._is_trial_of_new = True, self._is_new_answer
            self._start()

    # ------------------------------------------------------------------------------ from phase to phase

    def _give_up(self) -> None:
        if not self._is_trial:
            self._rest_tokens = REST_TOKENS_MIN
        else:
            self._rest_tokens = min(2 * self._rest_tokens, REST_TOKENS_MAX)
            if self._is_trial_of_new:
                self._new_answer_tokens = min(2 * self._new_answer_tokens, REST_TOKENS_MAX)
        self._rest()

    def _measured(self) -> None:
        """What plain decoding gives is known: the faster way is kept."""
        self._is_measuring = False
        self._learn()
        if self._guessing_rate >= self._plain_rate:
            self._unmeasured_tokens = min(2 * self._unmeasured_tokens, UNMEASURED_TOKENS_MAX)
            self._start()
        else:
            self._unmeasured_tokens = UNMEASURED_TOKENS_MIN
            self._rest_tokens = REST_TOKENS_MIN

    def _learn(self) -> None:
        if self._took_s > 0:
            self._plain_rate = self._measured_tokens / self._took_s

    def _rest(self) -> None:
        self.is_resting, self._is_trial = True, False
        self._is_new_answer = False
        self._tokens = self._took_s = self._measured_tokens = 0.0

    def _start(self) -> None:
        """Guessing begins, or goes on."""
        self.is_resting = False
        self._is_new_answer = False
        self._tokens = self._took_s = self._measured_tokens = self._regret = 0.0
