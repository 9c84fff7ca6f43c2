"""Incarnations: every pipeline that a head forms has a number of its own, and each device knows which one
holds it.

The number is the head's session (drawn by chance) and a generation that grows with every pipeline of it. All
messages carry it, so what an earlier pipeline left on the way is told from what counts; and a device that
still holds for an earlier generation lets go at once for a later one, for then the head has given the earlier
one up. Knows no sockets and no clock.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum

GENERATION_BITS = 16
SESSION_BITS = 62 - GENERATION_BITS
SESSIONS_MAX = 256
"""Heads whose newest generation a device remembers."""


def incarnation_of(session: int, generation: int) -> int:
    """The number of a session's pipeline; generations begin at 1."""
    assert 0 <= session < 1 << SESSION_BITS, f"session {session} has more than {SESSION_BITS} bits"
    assert 0 < generation < 1 << GENERATION_BITS, (
        f"generation {generation} has more than {GENERATION_BITS} bits"
    )
    return session << GENERATION_BITS | generation


class Claim(Enum):
    """What becomes of a head's request for the lease of a device."""

    GRANTED = "granted"
    SUPERSEDES = "supersedes"
    """The holder is an earlier pipeline of the same head, and over."""
    HELD = "held"
    STALE = "stale"
    """A later pipeline of the same head has been here already."""


class Lease:
    """Who holds a device, and until when unless it is heard of again; time is that of the caller."""

    def __init__(self, duration_s: float) -> None:
        self.duration_s = duration_s
        self.holder: int | None = None
        self.until_s = 0.0
        self._newest: OrderedDict[int, int] = OrderedDict()

    def claim(self, incarnation: int) -> Claim:
        """What a claim would come to; `take` carries it out."""
        session, generation = incarnation >> GENERATION_BITS, incarnation & ((1 << GENERATION_BITS) - 1)
        if generation < self._newest.get(session, 0):
            return Claim.STALE
        if self.holder is None:
            return Claim.GRANTED
        is_same = self.holder >> GENERATION_BITS == session
        return Claim.SUPERSEDES if is_same and incarnation > self.holder else Claim.HELD

    def take(self, incarnation: int, now_s: float) -> None:
        """The device is held from now on; whoever held it before has been let go of."""
        assert self.holder is None, f"held by {self.holder}"
        self.holder = incarnation
        session = incarnation >> GENERATION_BITS
        self._newest[session] = incarnation & ((1 << GENERATION_BITS) - 1)
        self._newest.move_to_end(session)
        if len(self._newest) > SESSIONS_MAX:
            self._newest.popitem(last=False)
        self.renew(now_s)

    def renew(self, now_s: float) -> None:
        self.until_s = now_s + self.duration_s

    def release(self) -> None:
        self.holder = None

    def validate(self) -> None:
        assert len(self._newest) <= SESSIONS_MAX, f"{len(self._newest)} heads are remembered"
        if self.holder is not None:
            session, generation = self.holder >> GENERATION_BITS, self.holder & ((1 << GENERATION_BITS) - 1)
            assert self._newest.get(session) == generation, (
                "the holder is not the newest pipeline of its head"
            )

    def admits(self, incarnation: int) -> bool:
        """Whether what comes under this number is of the pipeline that holds the device."""
        return incarnation == self.holder

    def is_over(self, now_s: float) -> bool:
        """Whether the holder has been silent for too long."""
        return self.holder is not None and now_s > self.until_s
