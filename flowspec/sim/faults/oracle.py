"""What must happen in time, and what must not happen at all, whatever was drawn: the world knows what is wrong, and holds the head to it.

*Whoever is stuck is lost*: a device that has been at one pass for longer than the rule allows, while the head listens and can reach it, is a
member no more. *Whoever is healthy is not lost*: a device is lost only if something happened to it, to one of its links, or to the head.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from flowspec.core.membership import STUCK_PASSES, Membership
from flowspec.sim.clock import Clock
from flowspec.sim.faults.daemon import SimDaemon
from flowspec.sim.faults.network import Network

LOOK_S = 0.25
NOTICED_S = 2.0
"""What the head may take, beyond what the rule says, to hear how long a pass has run and to decide."""


class Oracle:
    """Looks at a world every `LOOK_S`; raises `AssertionError`. `head` is the head's place, and `touch` tells of faults as they begin."""

    def __init__(self, clock: Clock, network: Network, daemons: Mapping[str, SimDaemon], membership: Membership, head: str) -> None:
        self._clock = clock
        self._network = network
        self._daemons = daemons
        self._membership = membership
        self._head = head
        self._stuck_since_s: dict[str, float] = {}
        self._touched: set[str] = set()
        self._lost: set[str] = set()

    def touch(self, places: Collection[str]) -> None:
        """Something goes wrong at these places: the head (then all may be lost), a device, or both ends of a link."""
        self._touched.update(places)

    def look(self, *, head_listens: bool) -> None:
        now_s = self._clock.now_s
        for name, daemon in self._daemons.items():
            running_s, longest_s = daemon.at_work_s
            reached = head_listens and daemon.is_up and not daemon.is_stopped and not self._network.is_severed(self._head, name)
            if not (reached and running_s and self._membership.is_formed and name in self._membership.members):
                self._stuck_since_s.pop(name, None)
                continue
            limit_s = max(self._membership.patience.stuck_s, STUCK_PASSES * longest_s)
            stuck_s = min(running_s, now_s - self._stuck_since_s.setdefault(name, now_s) + limit_s)
            assert stuck_s <= limit_s + NOTICED_S, f"{name} has been at one pass for {running_s:.1f} s, and is not lost"
        for name in self._membership.lost:
            excused = name in self._touched or self._head in self._touched
            assert name in self._lost or excused, f"{name} is lost, though nothing was wrong with it"
        self._lost = set(self._membership.lost)
