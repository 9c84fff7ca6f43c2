"""Whether guessing pays: tokens per second with the drafter at work, beside those with the drafter at rest.

Where a drafter has cores of its own it costs nothing that a slot's price does not say. Where it shares them with a stage, or is slow
or wrong, plain decoding can be faster, and no model of costs sees that as surely as a look at the clock. So where the rate is not
clearly above what plain decoding should reach, a few tokens are decoded plainly, and the faster way is kept for a while; each time that
confirms it, for longer.
"""

from __future__ import annotations

CLEARLY_BETTER = 1.3
"""Times the rate of plain decoding, as estimated, from which on no trial is made."""
MARGIN = 1.03
"""How much faster the other way must be."""
SETTLING_TOKENS = 3
"""Tokens after a change that still owe to what was before."""
TRIAL_TOKENS = 12
FIRST_TOKENS = 16
STAY_TOKENS_MIN, STAY_TOKENS_MAX = 48, 768


class Governor:
    """`is_resting`: the drafter should not be asked for anything now."""

    def __init__(self) -> None:
        self.is_resting = False
        self._is_trial = False
        self._rates = {False: 0.0, True: 0.0}
        self._stay = STAY_TOKENS_MIN
        self._left = FIRST_TOKENS
        self._settling = float(SETTLING_TOKENS)
        self._emitted = 0.0
        self._tokens = 0.0
        self._since_s: float | None = None

    def begin(self) -> None:
        """An answer begins: the time until its first token says nothing."""
        self._since_s = None
        self._settling = SETTLING_TOKENS

    def emitted(self, tokens: float) -> None:
        """Tokens of each answer under way became known, on average; `look` comes after."""
        self._emitted += tokens

    def look(self, now_s: float, plain_rate: float) -> None:
        """Takes note of the time; `plain_rate` is an answer's by plain decoding as it should be, 0 while nobody knows."""
        if self._emitted == 0:
            return
        emitted, self._emitted = self._emitted, 0.0
        if self._settling > 0:
            self._settling -= emitted
            if self._settling <= 0:
                self._since_s, self._tokens = now_s, 0.0
            return
        if self._since_s is None:
            self._since_s, self._tokens = now_s, 0.0
            return
        self._tokens += emitted
        if self._tokens >= self._left and now_s > self._since_s:
            self._rates[self.is_resting] = self._tokens / (now_s - self._since_s)
            self._decide(plain_rate)
            self._since_s, self._tokens = now_s, 0.0

    def _decide(self, plain_rate: float) -> None:
        """A phase is over: stay, try the other way, or after a trial keep what was faster."""
        here, there = self._rates[self.is_resting], self._rates[not self.is_resting]
        if not self._is_trial:
            if not self.is_resting and (plain_rate == 0 or here >= CLEARLY_BETTER * plain_rate):
                self._left = STAY_TOKENS_MIN
            else:
                self._change(TRIAL_TOKENS, is_trial=True)
        elif here > MARGIN * there:
            self._stay = STAY_TOKENS_MIN
            self._is_trial, self._left = False, self._stay
        else:
            self._stay = min(2 * self._stay, STAY_TOKENS_MAX)
            self._change(self._stay, is_trial=False)

    def _change(self, tokens: int, *, is_trial: bool) -> None:
        self.is_resting = not self.is_resting
        self._is_trial, self._left, self._settling = is_trial, tokens, SETTLING_TOKENS
