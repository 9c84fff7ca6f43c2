"""Which conversation of the head answers a prompt, so that what the stages hold of it need not be computed
again.

The API knows no conversations: a client sends the whole dialogue with each turn. So a few are kept when their
answers are over, with the tokens they hold, and a prompt that goes on where one stands takes it over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from flowspec.core.head.request import Ids, common_prefix
from flowspec.core.protocol.sliding_window import SlidingWindow


class Conversations:
    """At most `bound` conversations, those in use and the idle ones; `new` begins one at the head, `forget`
    ends one there. Layers with a sliding window hold what `sliding_window` says of each (None: all)."""

    def __init__(
        self,
        bound: int,
        new: Callable[[], int],
        forget: Callable[[int], None],
        sliding_window: SlidingWindow | None = None,
    ) -> None:
        self._bound = bound
        self._window = sliding_window
        self._new = new
        self._forget = forget
        self._idle: dict[int, Ids] = {}
        self._used: set[int] = set()

    @property
    def idle(self) -> list[int]:
        """Those that nobody uses, the least recently used first."""
        return list(self._idle)

    def take(self, prompt: Sequence[int]) -> int:
        """A conversation for this prompt: the idle one that shares the longest beginning with it, else a new
        one.

        One that would lose more than the prompt gains is left alone: it is somebody else's, of whom only the
        system text is the same. So is one that would have to be read from its beginning again, since the
        prompt goes back too far: others may go on from where it stands.
        """
        wanted = np.asarray(prompt, np.int64)
        best, most = None, 0
        for number, held in self._idle.items():
            shared = common_prefix(held, wanted)
            can_keep = self._window is None or self._window.may_keep(
                shared, self._window.given_back(len(held))
            )
            if shared > most and 2 * shared >= len(held) and can_keep:
                best, most = number, shared
        if best is not None:
            del self._idle[best]
        else:
            self._make_room(self._bound - 1)
            best = self._new()
        self._used.add(best)
        return best

    def give_back(self, number: int, held: Sequence[int]) -> None:
        """The answer is over; the conversation holds these tokens now."""
        self._used.remove(number)
        self._idle[number] = np.asarray(held, np.int64)
        self._make_room(self._bound)

    def drop(self, number: int) -> None:
        self._idle.pop(number, None)
        self._used.discard(number)
        self._forget(number)

    def _make_room(self, most: int) -> None:
        while self._idle and len(self._idle) + len(self._used) > most:
            self.drop(next(iter(self._idle)))
