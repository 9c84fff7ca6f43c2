"""What layers with a sliding window hold of a request: they never look further back than the window, so older
keys and values are given back.

Who goes back (an edited turn, another answer to the same question) goes on behind what is kept, and needs the
window before that place. So such layers hold `BACK_TOKENS` more than their window. Further back nobody can
go: there the text is read again from its beginning, since a key in the window depends, layer by layer, on all
that is before it.

A short convolution sees as many positions as it is long, and holds its inputs in the same way. So does
linear attention, which sums up all before them in a *state*. A state cannot be taken back, so one is kept of
the place behind what was given back; from there the inputs that are held lead to any later one. They are far
larger than keys and values: such layers hold `STATE_BACK_TOKENS` of them. But a next turn often goes on where
the answer began: its template leaves the answer's thoughts out. So the end of each prompt stays held during
its answer, from a *snapshot* of the states on.

A stage decides by what it has run, the head by the most that any stage can have run (`HeldPositions`, whose
places never come to lie further ahead for having run less): it never keeps what a stage has given back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flowspec.core.protocol import limits
from flowspec.core.protocol.types import Length, Position, Record

CONVOLUTION = "conv"
"""What transformers' configs call layers that are short convolutions, of the length `conv_L_cache`."""
LINEAR = "linear_attention"
"""What they call layers that attend by a state, with a convolution of the length `linear_conv_kernel_dim`
before it."""
BACK_TOKENS = 1024
"""How far a request can go back at least without being read again: about one turn with its answer."""
STATES_HELD = 3
"""Of each layer with states: that behind what was given back, that of the output's path, and a snapshot."""
STATE_BYTES = 4
"""Of each number of a state: float32 in every precision, since sums over a whole text are held in it."""
STATE_BACK_TOKENS = 64
"""As `BACK_TOKENS`, and as a `step`, where layers have states."""
PROMPT_END_TOKENS = 32
"""Templates end a prompt with fewer tokens that the next prompt of the dialogue may not have there, such as
the beginning of the answer's thoughts. A snapshot is of so many before."""


class SlidingWindow(Record, frozen=True, kw_only=True):
    """A row at position p sees those above p - `tokens`. What lies more than `back` before that is given
    back, `step` positions at a time; but not the end of the prompt, from at least `snapshot` positions before
    it on (0: that, too)."""

    tokens: Length
    back: Position = BACK_TOKENS
    step: Length = limits.CACHE_BLOCK_SLOTS
    snapshot: Position = 0

    @property
    def slots(self) -> int:
        """The most that a layer holds of a request: what may be seen, how far one can go back, what is not
        given back yet, the end of a prompt, a tree, and the segment that runs."""
        prompt_end = self.snapshot + self.step if self.snapshot else 0
        path = self.tokens + self.back + self.step + prompt_end
        return path + limits.TREE_NODES_MAX + limits.NODES_PER_SEGMENT_MAX

    def nothing_run(self, prompt: int) -> HeldPositions:
        """Of a request whose prompt of so many tokens is read from its beginning."""
        return HeldPositions(window=self)._with_prompt(prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPositions:
    """What layers with a window hold of a request: of the output's path all from `given_back` on, and before
    that what lies from `snapshot` on and before `prompt_end`."""

    window: SlidingWindow
    given_back: int = 0
    snapshot: int = 0
    prompt_end: int = 0

    @property
    def prompt(self) -> range:
        """Positions that stay held during the answer."""
        return range(self.snapshot, self.prompt_end)

    def run(self, length: int) -> HeldPositions:
        """Once `length` positions of the output's path were run."""
        window = self.window
        given_back = (length - window.tokens - window.back) // window.step * window.step
        return replace(self, given_back=max(self.given_back, given_back))

    def keepable(self, count: int) -> int:
        """How many of the first `count` positions, at most, may be kept, so that the rows behind them find
        all that they see."""
        return next((most for most in (count, min(count, self.prompt_end)) if self._finds_all(most)), 0)

    def keep(self, count: int, prompt: int) -> HeldPositions:
        """With the first `count` positions kept, which must be `keepable`, and a prompt of so many tokens to
        go on with."""
        if count == 0:
            return self.window.nothing_run(prompt)
        return replace(self, given_back=self._first(count))._with_prompt(prompt)

    def _first(self, count: int) -> int:
        """Of the positions that lead to those behind the first `count`."""
        return min(self.given_back, self.snapshot) if count <= self.prompt_end else self.given_back

    def _finds_all(self, count: int) -> bool:
        first = self._first(count)
        return first == 0 or count + 1 - self.window.tokens >= first

    def _with_prompt(self, prompt: int) -> HeldPositions:
        window = self.window
        if not window.snapshot:
            return self
        place = (prompt - window.snapshot) // window.step * window.step
        return replace(self, snapshot=max(self.given_back, place), prompt_end=prompt)


def window_for(windows: Sequence[int], context: int, *, has_states: bool = False) -> SlidingWindow | None:
    """What layers with these windows hold of requests with such a context at a stage; None where
    there are none, and where holding less would save nothing."""
    tokens = max(windows, default=0)
    if not tokens:
        return None
    window = SlidingWindow(tokens=tokens)
    if has_states:
        back = STATE_BACK_TOKENS
        window = SlidingWindow(tokens=tokens, back=back, step=back, snapshot=PROMPT_END_TOKENS)
    return window if window.slots < context + limits.TREE_NODES_MAX else None
