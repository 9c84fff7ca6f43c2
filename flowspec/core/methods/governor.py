"""Whether guessing pays: tokens per second with the drafter at work, beside those with the drafter at rest.

Where a drafter has cores of its own it costs nothing that a slot's price does not say. Where it shares them
with a stage, or is slow or wrong, plain decoding can be faster, and no model of costs sees that as surely as
a look at the clock. So where the rate is not clearly above what plain decoding should reach, a few tokens are
decoded plainly, and the faster way is kept for a while; each time that confirms it, for longer. What plain
decoding gives hardly depends on the text, what guessing gives does: so guessing is also given up between
trials when it falls behind the plain rate last measured, and a new answer soon gets a new chance.
"""

from __future__ import annotations

CLEARLY_BETTER = 1.3
"""Times the rate of plain decoding, as last measured or else estimated, from which on no trial is made."""
MARGIN = 1.03
"""How much faster the other way must be."""
SETTLING_TOKENS = 3
"""Tokens after a change that still owe to what was before."""
TRIAL_TOKENS = 12
LOOK_TOKENS = 16
"""Tokens of guessing between two looks at its rate."""
STAY_TOKENS_MIN, STAY_TOKENS_MAX = 24, 768


class Governor:
    """`is_resting`: the drafter should not be asked for anything now."""

    def __init__(self) -> None:
        self.is_resting = False
        self._is_trial = False
        self._rates = {False: 0.0, True: 0.0}
        self._stay = STAY_TOKENS_MIN
        self._stayed = float(STAY_TOKENS_MIN)
        self._left = LOOK_TOKENS
        self._settling = float(SETTLING_TOKENS)
        self._emitted = 0.0
        self._tokens = 0.0
        self._since_s: float | None = None

    def begin(self) -> None:
        """An answer begins: the time until its first token says nothing, and its text may be another one for
        the drafter."""
        self._since_s = None
        self._settling = SETTLING_TOKENS
        self._left = min(self._left, STAY_TOKENS_MIN)

    def emitted(self, tokens: float) -> None:
        """Tokens of each answer under way became known, on average; `look` comes after."""
        self._emitted += tokens

    def look(self, now_s: float, plain_rate: float) -> None:
        """Takes note of the time; `plain_rate` is an answer's by plain decoding as it should be, 0 while
        nobody knows."""
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
        if self._is_trial:
            if here > MARGIN * there:
                self._stay = STAY_TOKENS_MIN
                self._keep()
            else:
                self._stay = min(2 * self._stay, STAY_TOKENS_MAX)
                self._change()
        elif self.is_resting:
            self._try()
        elif MARGIN * here < there:
            self._stay = STAY_TOKENS_MIN
            self._change()
        elif here < CLEARLY_BETTER * (there or plain_rate):
            self._stayed += self._tokens
            if self._stayed >= self._stay:
                self._try()

    def _keep(self) -> None:
        """What is done now stays."""
        self._is_trial, self._stayed = False, 0.0
        self._left = self._stay if self.is_resting else LOOK_TOKENS

    def _change(self) -> None:
        self.is_resting = not self.is_resting
        self._settling = SETTLING_TOKENS
        self._keep()

    def _try(self) -> None:
        self._change()
        self._is_trial, self._left = True, TRIAL_TOKENS
