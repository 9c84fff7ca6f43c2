"""Which conversation of the head answers a prompt, so that what the stages hold of it need not be computed
again.

The API knows no conversations: a client sends the whole dialogue with each turn. So a few are kept when their
answers are over, with the tokens they hold, and a prompt that goes on where one stands takes it over. One
that goes on from the middle leaves it to whoever comes back, and begins another: the head has the stages copy
what both begin with (`core.head.sharing`). Where there is no room for two, it takes over what loses less than
it gains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from flowspec.core.head.request import Ids, common_prefix
from flowspec.core.head.sharing import BLOCK
from flowspec.core.protocol.model_spec import PROMPT_END_TOKENS, HeldPositions, SlidingWindow


@dataclass(slots=True)
class _Conversation:
    """The tokens that it holds (none yet while it is used), how many of them were its last prompt, and what
    layers with a window hold."""

    prompt: int
    windowed: HeldPositions | None
    tokens: Ids = field(default_factory=lambda: np.zeros(0, np.int64))

    def goes_on(self, shared: int) -> bool:
        """Whether a prompt that begins with so many of its tokens goes on where it stands: next to nothing is
        lost."""
        return len(self.tokens) - shared <= PROMPT_END_TOKENS

    def may_answer(self, shared: int) -> bool:
        """A prompt that begins with so many of its tokens gains more than this loses, or asks what was asked
        last, or goes on from there: then a template has left out the answer's thoughts, and whatever follows
        them is read again anyway."""
        is_own = self.prompt - shared <= min(PROMPT_END_TOKENS, self.prompt // 4)
        can_keep = self.windowed is None or self.windowed.keepable(shared) > 0
        return can_keep and (is_own or 2 * shared >= len(self.tokens))


class Conversations:
    """At most `bound` conversations, those in use and the idle ones; `new` begins one at the head, `forget`
    ends one there. Layers with a sliding window hold what `sliding_window` says of each (None: all).
    `may_copy` says whether another one may begin with a copy, and with so many tokens fits beside all."""

    def __init__(
        self,
        bound: int,
        new: Callable[[], int],
        forget: Callable[[int], None],
        sliding_window: SlidingWindow | None = None,
        may_copy: Callable[[int], bool] = lambda tokens: False,
    ) -> None:
        self._bound = bound
        self._window = sliding_window
        self._may_copy = may_copy
        self._new = new
        self._forget = forget
        self._idle: dict[int, _Conversation] = {}
        self._used: dict[int, _Conversation] = {}

    @property
    def idle(self) -> list[int]:
        """Those that nobody uses, the least recently used first."""
        return list(self._idle)

    def take(self, prompt: Sequence[int], new_tokens: int) -> int:
        """A conversation for this prompt and an answer of so many tokens: the idle one that shares the
        longest beginning with it, else a new one.

        One that would lose what a copy leaves to it is left alone; where nothing is copied, one that would
        lose more than the prompt gains: it is somebody else's, of whom only the system text is the same. So
        is one that would have to be read from its beginning again, since the prompt goes back too far: others
        may go on from where it stands.
        """
        wanted = np.asarray(prompt, np.int64)
        copies = self._window is None and self._may_copy(len(wanted) + new_tokens)
        best, most = None, 0
        source, most_copied = None, 0
        for number, held in self._idle.items():
            shared = common_prefix(held.tokens, wanted)
            is_copied = copies and shared >= BLOCK
            if is_copied and shared > most_copied:
                source, most_copied = number, shared
            if shared > most and (held.goes_on(shared) if is_copied else held.may_answer(shared)):
                best, most = number, shared
        windowed = None if self._window is None else self._window.nothing_run(len(wanted))
        if best is None:
            if source is not None:  # it is used: as the oldest one it would go before it was copied
                self._idle[source] = self._idle.pop(source)
            self._make_room(self._bound - 1)
            best = self._new()
        elif (old := self._idle.pop(best).windowed) is not None:
            windowed = old.keep(old.keepable(most), len(wanted))
        self._used[best] = _Conversation(len(wanted), windowed)
        return best

    def give_back(self, number: int, held: Sequence[int]) -> None:
        """The answer is over; the conversation holds these tokens now."""
        found = self._idle[number] = self._used.pop(number)
        found.tokens = np.asarray(held, np.int64)
        if found.windowed is not None:
            found.windowed = found.windowed.run(len(held))
        self._make_room(self._bound)

    def drop(self, number: int) -> None:
        self._idle.pop(number, None)
        self._used.pop(number, None)
        self._forget(number)

    def _make_room(self, most: int) -> None:
        while self._idle and len(self._idle) + len(self._used) > most:
            self.drop(next(iter(self._idle)))
